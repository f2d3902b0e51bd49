"""The logits of a model that is divided over ranks, for whole sequences and for the next token.

Shape suffixes: B sequences, S tokens, V vocabulary, D model width, P places for tokens, C width of
a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.config import Config
from moe_parallel.layers.expert_layer import ExpertLayer
from moe_parallel.layers.past import Past
from moe_parallel.parallel import Groups


@dataclass(frozen=True)
class GenerationModel:
    """This rank's chunk of a model, one per pipeline stage, without sequence parallelism.

    Every method is collective over tp and pp, and over the ranks that share the experts. The
    ranks of tp and pp pass the same tokens and get the same result.
    """

    chunk: Any  # a LanguageModel, in evaluation mode
    groups: Groups
    vocab_size: int  # of the tokenizer
    config: Config
    model_vocab_size: int  # at least that of the tokenizer, without padding

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.chunk.parameters()).device
        return device

    def logits(self, tokens_BS: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        """The logits of the token after each token: fp32 [B, S, V], on every rank.

        V is the vocabulary of the model with its padding, whose logits are -inf: the probabilities
        are those of a model without padding.
        """
        return self._run(tokens_BS, past, tokens_BS.shape[1])

    def next_logits(self, tokens_BS: torch.Tensor, past: Past) -> torch.Tensor:
        """The logits of the token after the last one: fp32 [B, V]. `past` takes the tokens in.

        V is the vocabulary of the tokenizer: padding is never generated.
        """
        with _last_token_only(self.chunk):
            logits_BV = self._run(tokens_BS, past, 1)[:, 0]
        past.grow(tokens_BS)
        return logits_BV[:, : self.vocab_size]

    def losses(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """-ln p of each label, in nats: fp32 [B, S], on every rank. Never holds all logits.

        As in `logits`, padding of the vocabulary has probability 0.
        """
        self.chunk.vocab_size_of_losses = self.model_vocab_size
        try:
            losses_BS = self._through_stages(tokens_BS, None, labels=labels_BS)
        finally:
            self.chunk.vocab_size_of_losses = None
        return self._from_last_stage(losses_BS, tokens_BS.shape)

    def agree(self, tokens: list[int]) -> list[int]:
        """The tokens of rank 0, on every rank; rounding may give others elsewhere."""
        if dist.get_world_size() == 1:
            return tokens
        agreed = torch.tensor(tokens, dtype=torch.int64, device=self.device)
        dist.broadcast(agreed, src=0)
        found: list[int] = agreed.tolist()
        return found

    @torch.no_grad()
    def _run(self, tokens_BS: torch.Tensor, past: Past | None, places: int) -> torch.Tensor:
        with ExitStack() as stack:
            if past is not None:
                stack.enter_context(_serving(self.chunk, past))
            if past is not None and past.length_B is not None:
                positions = _positions(past.length_B, past.places)
                stack.enter_context(_hook(self.chunk.rotary_pos_emb, positions))
            logits = self._through_stages(tokens_BS, past, runtime_gather_output=True)
        if logits is not None:
            logits[..., self.model_vocab_size :] = -torch.inf
        vocab_size = self.config.padded_vocab_size(self.model_vocab_size)
        return self._from_last_stage(logits, (len(tokens_BS), places, vocab_size))

    @torch.no_grad()
    def _through_stages(
        self, tokens_BS: torch.Tensor, past: Past | None, **named: Any
    ) -> torch.Tensor | None:
        """The output of the last stage, there; None elsewhere."""
        pp = self.groups.pp
        if pp.rank() > 0:
            shape = (tokens_BS.shape[1], len(tokens_BS), self.config.model.hidden_size)
            dtype = next(self.chunk.parameters()).dtype
            hidden_SBD = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(hidden_SBD, group=pp, group_src=pp.rank() - 1)
            self.chunk.set_input_tensor(hidden_SBD)
        positions_BS = torch.arange(tokens_BS.shape[1], device=self.device).expand_as(tokens_BS)
        output: torch.Tensor = self.chunk(tokens_BS, positions_BS, past, **named)
        if pp.rank() < pp.size() - 1:
            dist.send(output.contiguous(), group=pp, group_dst=pp.rank() + 1)
            return None
        return output.float()

    def _from_last_stage(
        self, output: torch.Tensor | None, shape: tuple[int, ...] | torch.Size
    ) -> torch.Tensor:
        pp = self.groups.pp
        if pp.size() == 1:
            assert output is not None
            return output
        if output is None:
            output = torch.empty(shape, device=self.device)
        output = output.contiguous()
        dist.broadcast(output, group=pp, group_src=pp.size() - 1)
        return output


def _positions(length_B: torch.Tensor, places: int) -> Callable[..., torch.Tensor]:
    """A hook that replaces the rotary embeddings from position 0 by those of the next tokens."""

    def at_lengths(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        angles_P11C: torch.Tensor = module.forward(places)
        return angles_P11C[length_B].transpose(0, 1)  # [1, B, 1, C]

    return at_lengths


def _last_token_only(chunk: Any) -> Any:
    """In this context the output layer computes only the logits after the last token."""

    def last(module: Any, arguments: Any, output_SBD: torch.Tensor) -> torch.Tensor:
        return output_SBD[-1:]

    return _hook(chunk.decoder, last) if chunk.post_process else ExitStack()


@contextmanager
def _hook(module: Any, function: Callable[..., torch.Tensor]) -> Iterator[None]:
    handle = module.register_forward_hook(function)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _serving(chunk: Any, past: Past) -> Iterator[None]:
    """In this context the layers of experts continue the sequences of `past`."""
    layers = [each for each in chunk.modules() if isinstance(each, ExpertLayer)]
    for layer in layers:
        layer.past = past
    try:
        yield
    finally:
        for layer in layers:
            layer.past = None
