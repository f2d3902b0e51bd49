r"""Show what indexed datasets contain: documents as text, lengths, duplicates, origin.

    python tools/inspect_data.py data/my_text_document --tokenizer-model data/my_tokenizer

This command checks the files as training does. It prints the sources in the manifest, the lengths
of the documents, how many repeat an earlier one, and some documents as text. With several datasets
it also counts the documents of each that occur in one before it, such as validation text that is
also trained on.
"""

import argparse
import sys

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_positive, load_torch, progress


def main(arguments: list[str]) -> int:
    summary, _, example = (__doc__ or "").partition("\n")
    tool = Tool(__file__, summary, epilog=example, speaks_as="error")
    tool.add_argument(
        "data_path", nargs="+", metavar="PREFIX", help="datasets: paths without .bin and .idx"
    )
    tool.add_argument(
        "--tokenizer-type",
        default="ByteLevelBPE",
        help="ByteLevelBPE (default), HuggingFaceTokenizer, SentencePieceTokenizer, NullTokenizer",
    )
    tool.add_argument(
        "--tokenizer-model",
        help="tokenizer that wrote the data: file, folder or hub name (default: none; token ids "
        "are shown)",
    )
    tool.add_argument("--vocab-size", type=int, help="vocabulary size of NullTokenizer")
    tool.add_argument(
        "--samples", type=int, default=3, help="number of random documents to show (default: 3)"
    )
    tool.add_argument(
        "--documents",
        type=int,
        nargs="+",
        metavar="I",
        help="show these documents instead, counted from 0",
    )
    tool.add_argument(
        "--characters",
        type=int,
        default=400,
        help="number of characters of each document to show (default: 400)",
    )
    tool.add_argument("--seed", type=int, default=1234, help="seed of the samples (default: 1234)")
    return tool.run(arguments, inspect)


def inspect(flags: argparse.Namespace) -> None:
    """Print a report."""
    check_positive(flags, "characters")
    if min(flags.samples, flags.seed) < 0:
        raise InputError(f"--samples {flags.samples}, --seed {flags.seed}: give at least 0")
    load_torch()

    from moe_parallel.data.inspection import inspected
    from moe_parallel.data.tokenizer import build_tokenizer

    tokenizer = None
    if flags.tokenizer_model is not None or flags.tokenizer_type == "NullTokenizer":
        tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
    reports = inspected(flags, tokenizer, progress)
    for prefix, report in zip(flags.data_path, reports, strict=True):
        print("\n".join([prefix, *(f"  {line}" for line in report)]), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
