"""Continue a text with a trained model.

    python tools/generate.py --load runs/my --prompt "def read(self" [--tokens 100]

The tool runs on one process, in fp32, whatever layout trained the model. A Lory model merges its
experts once, by the mean of the prompt, for the prompt and all that follows. With --lory-inference
segment it routes as in training. Besides its own flags, the tool accepts those of
pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from typing import TYPE_CHECKING

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, check_positive, load_torch

if TYPE_CHECKING:
    from moe_parallel.config import Config


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument("--prompt", metavar="TEXT", help="text that the model continues")
    tool.add_argument(
        "--tokens", metavar="N", type=int, default=100, help="maximum number of tokens to generate"
    )
    tool.add_argument(
        "--temperature",
        metavar="X",
        type=float,
        default=0.8,
        help="sampling temperature; 0: always the most probable token",
    )
    return tool.run_with_training_flags(arguments, _write)


def _check(own: argparse.Namespace) -> None:
    check_load(own)
    if not own.prompt:
        raise InputError("--prompt is not set: give a text to continue")
    check_positive(own, "tokens")
    if not own.temperature >= 0:
        raise InputError(f"--temperature is {own.temperature}: it must be at least 0")


def _write(own: argparse.Namespace, flags: list[str]) -> None:
    _check(own)
    load_torch()

    import torch

    from moe_parallel.evaluation.generation import generate
    from moe_parallel.training.standalone import (
        single_process,
        standalone_config,
        standalone_model,
        vocab_size_of,
    )
    from moe_parallel.training.text import open_tokenizer

    config = standalone_config(flags, load=own.load)
    tokenizer = open_tokenizer(config)
    prompt = tokenizer.tokenize(own.prompt)
    room = config.training.seq_length - len(prompt)
    if room < 1:
        raise InputError(
            f"--prompt has {len(prompt)} tokens, and the model reads --seq-length "
            f"{config.training.seq_length}: shorten it"
        )
    if "--lory-inference" not in flags:
        config = _routed_by_the_prompt(config, len(prompt))
    with single_process(config) as groups:
        model, _ = standalone_model(config, vocab_size_of(config), groups)
        generator = torch.Generator().manual_seed(config.training.seed)
        tokens = generate(model, prompt, tokenizer.vocab_size, own.temperature, generator)
        written = itertools.islice(tokens, min(own.tokens, room))
        written = itertools.takewhile(lambda token: token != tokenizer.eod, written)
        print(own.prompt + tokenizer.detokenize(list(written)))


def _routed_by_the_prompt(config: Config, length: int) -> Config:
    """The configuration in which the prompt is the first segment, if the system merges by segment.
    The prompt then determines the merge of all segments."""
    import dataclasses

    from moe_parallel.config import LorySelection

    if not isinstance(config.selection, LorySelection):
        return config
    selection = dataclasses.replace(
        config.selection,
        lory_segment_length=length,
        lory_first_segment="own",
        lory_inference="prompt",
    )
    return dataclasses.replace(config, selection=selection)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
