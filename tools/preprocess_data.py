r"""Convert files of text to Megatron indexed datasets that --data-path reads.

    python tools/preprocess_data.py --input my_texts --output-prefix data/my \
        --vocab-size 8192 --append-eod

This command writes data/my_text_document.bin and .idx, and a manifest next to them. It also writes
data/my_tokenizer/, because it trains the tokenizer itself. The files appear at the end, all or
none. The flags and the file names are those of Megatron's tool.

The input is text files (one document each), JSON lines and Parquet. docs/data.md describes it.
"""

import sys
from argparse import Namespace
from functools import partial

from moe_parallel.tool import Tool, check_positive, progress


def main(arguments: list[str]) -> int:
    summary, _, example = (__doc__ or "").partition("\n")
    tool = Tool(
        __file__,
        summary,
        epilog=example,
        speaks_as="error",
        when_interrupted="interrupted; nothing was written",
    )
    group = tool.add_argument_group("text")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files and folders. The files are .txt (one document each) or JSON lines, in UTF-8 "
        "and possibly compressed as .gz, .zst or .bz2, or .parquet. A folder is read at any depth, "
        "in order of the paths; its .txt files are read only if it has none of the others",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns that hold text; one dataset is written per key (default: text)",
    )
    group.add_argument(
        "--max-bad",
        type=int,
        default=0,
        metavar="N",
        help="leave out up to N records that cannot be used, and list them with reasons at the end "
        "(default: 0; the first one ends the program)",
    )
    group = tool.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        default="ByteLevelBPE",
        help="ByteLevelBPE (default), HuggingFaceTokenizer, SentencePieceTokenizer, NullTokenizer",
    )
    group.add_argument("--tokenizer-model", help="file, folder or hub name of the tokenizer")
    group.add_argument(
        "--vocab-size",
        type=int,
        help="without --tokenizer-model: vocabulary size of a byte-level BPE, trained on the input",
    )
    group.add_argument(
        "--append-eod",
        action="store_true",
        help="append the end-of-document token to each document",
    )
    group = tool.add_argument_group("output")
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="datasets are written as PREFIX_KEY_document.bin and .idx",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="replace existing datasets and an existing tokenizer",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=1,
        help="number of threads that tokenize; it does not change the output (default: 1)",
    )
    return tool.run(arguments, work)


def work(flags: Namespace) -> None:
    """Write the datasets and print what was written."""
    from moe_parallel.data.preprocess import preprocess

    check_positive(flags, "workers")
    print("\n".join(preprocess(flags, partial(progress, unit="B"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
