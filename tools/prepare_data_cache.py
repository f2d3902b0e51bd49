"""Build the indices of a run's data before its job starts.

    python tools/prepare_data_cache.py --config my.yaml [--flag value ...]

Rank 0 of a run builds what is missing in --data-cache-path while the other ranks wait. For large
data this takes minutes, in which every GPU of the job is idle. This tool builds the same files on
one process, without a GPU. The run finds them if it has the same data, tokenizer, split, sequence
length, seed, --train-iters and --global-batch-size. The tool accepts the flags of
pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import sys

from moe_parallel.tool import Tool, load_torch


def main(arguments: list[str]) -> int:
    usage = "python tools/prepare_data_cache.py --config FILE.yaml [--flag value ...]"
    return Tool(__file__, __doc__, usage=usage).run_with_training_flags(arguments, _prepare)


def _prepare(own: argparse.Namespace, flags: list[str]) -> None:
    load_torch()

    from moe_parallel.training.run_config import run_config
    from moe_parallel.training.text import open_text

    config = run_config(flags).config
    text = open_text(config)
    datasets = text.datasets(config)
    for warning in (*text.warnings, *datasets.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    training = config.training
    print(
        f"{config.data.data_cache_path} is ready for {training.train_iters} iterations of "
        f"{training.global_batch_size} sequences of {training.seq_length} tokens from "
        f"{', '.join(datasets.train_domains)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
