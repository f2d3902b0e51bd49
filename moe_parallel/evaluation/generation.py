"""Generates text from a model, one token at a time.

The complete sequence is computed again for every token. This is simple, the same for every system
of expert selection, and fast enough to see what a model has learned. Shape suffixes: S tokens, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


@torch.no_grad()
def generate(
    model: Any,
    prompt: Sequence[int],
    vocab_size: int,
    temperature: float,
    generator: torch.Generator,
) -> Iterator[int]:
    """Generate the tokens that follow a prompt, without end.

    Args:
        model: a complete GPT (Megatron-Core's) on one process; left in evaluation mode.
        prompt: at least one token.
        vocab_size: the vocabulary size of the tokenizer; the model's may be padded to a larger one.
        temperature: logits are divided by it; 0: always the most probable token.
        generator: a generator on the CPU that draws the tokens.
    """
    device = next(model.parameters()).device
    tokens_S = torch.tensor(prompt, device=device)
    model.eval()
    while True:
        positions_S = torch.arange(len(tokens_S), device=device)
        logits_V = model(tokens_S[None], positions_S[None], None)[0, -1, :vocab_size].float().cpu()
        if temperature:
            probabilities_V = torch.softmax(logits_V / temperature, dim=0)
            token = int(torch.multinomial(probabilities_V, 1, generator=generator))
        else:
            token = int(logits_V.argmax())
        yield token
        tokens_S = torch.cat([tokens_S, tokens_S.new_tensor([token])])
