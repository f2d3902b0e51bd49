"""Print the vocabulary items that take the most experts, and those that take the fewest.

    python tools/experts_per_vocab_item.py --load runs/my [--at-least 10000] [--items 100]
        [--samples N]

The numbers are experts per token, mean over layers, on held-out text (Huang et al. 2024, section
5.3, count items that occur more than 10,000 times). The tool runs on one process, in fp32, whatever
layout trained the model, and changes and writes nothing. Besides its own flags, it accepts those of
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
    from moe_parallel.data.tokenizer import Tokenizer


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument(
        "--at-least",
        metavar="N",
        type=int,
        default=10_000,
        help="leave out items that occur less often (default: 10000)",
    )
    tool.add_argument(
        "--items",
        metavar="N",
        type=int,
        default=100,
        help="number of items to list at each end (default: 100)",
    )
    tool.add_argument(
        "--samples", metavar="N", type=int, help="number of samples per domain (default: all)"
    )
    return tool.run_with_training_flags(arguments, _print_items)


def _check(own: argparse.Namespace) -> None:
    check_positive(own, "at-least", "items", "samples")
    check_load(own)


def _print_items(own: argparse.Namespace, flags: list[str]) -> None:
    _check(own)
    load_torch()

    from moe_parallel.data.sampler import evaluation_batches
    from moe_parallel.evaluation.experts_per_vocab_item import experts_per_vocab_item
    from moe_parallel.training.standalone import (
        single_process,
        standalone_config,
        standalone_model,
    )
    from moe_parallel.training.text import open_text

    config = standalone_config(flags, load=own.load)
    if config.moe.num_experts is None or config.selection.merges:
        raise InputError(f"--load {own.load}: no token of this model is sent to experts")
    text = open_text(config)
    with single_process(config) as groups:
        model, _ = standalone_model(config, text.vocab_size, groups)
        batches = itertools.chain.from_iterable(
            evaluation_batches(
                dataset,
                samples=own.samples,
                micro_batch_size=config.training.micro_batch_size,
                data_parallel_rank=0,
                data_parallel_size=1,
            )
            for dataset in text.datasets(config).valid.values()
        )
        counts = experts_per_vocab_item(model, batches, text.vocab_size)
    rows = counts.experts_per_token(own.at_least)
    if not rows:
        raise InputError(
            f"--at-least {own.at_least}: no item occurs that often; the most frequent one occurs "
            f"{int(counts.tokens_V.max())} times"
        )
    total = float(counts.experts_V.sum() / counts.tokens_V.sum())
    print(f"{total:.3f} experts per token; {len(rows)} items occur {own.at_least} times or more")
    shown = rows if len(rows) <= 2 * own.items else [*rows[: own.items], *rows[-own.items :]]
    for place, row in enumerate(shown):
        if place == own.items and len(shown) < len(rows):
            print("...")
        print(_line(row, text.tokenizer))


def _line(row: tuple[int, int, float], tokenizer: Tokenizer) -> str:
    item, times, experts = row
    return f"{experts:8.3f}  {times:>9,}  {tokenizer.detokenize([item])!r}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
