r"""Convert JSON lines to Megatron indexed datasets that --data-path reads.

    python tools/preprocess_data.py --input my.jsonl --output-prefix data/my \
        --tokenizer-type ByteLevelBPE --vocab-size 8192 --append-eod

writes data/my_text_document.bin and .idx, a manifest beside them and, because it trained the
tokenizer itself, data/my_tokenizer/. The files appear at the end, all or none. The flags and the
file names are those of Megatron's tool.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from moe_parallel.data.jsonl import read_jsonl
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, train_byte_bpe
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_positive, load_torch, progress


def main(arguments: list[str]) -> int:
    summary, _, example = (__doc__ or "").partition("\n")
    tool = Tool(
        __file__,
        summary,
        epilog=example,
        speaks_as="error",
        when_interrupted="interrupted; nothing was written",
    )
    tool.add_argument("--input", type=Path, required=True, help="JSON lines, UTF-8")
    tool.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys that hold text; one dataset is written per key",
    )
    tool.add_argument(
        "--output-prefix",
        required=True,
        help="datasets are written as PREFIX_KEY_document.bin and .idx",
    )
    tool.add_argument(
        "--tokenizer-type",
        default="ByteLevelBPE",
        help="ByteLevelBPE (default), HuggingFaceTokenizer, SentencePieceTokenizer, NullTokenizer",
    )
    tool.add_argument("--tokenizer-model", help="file, folder or hub name of the tokenizer")
    tool.add_argument(
        "--vocab-size",
        type=int,
        help="without --tokenizer-model: vocabulary size of a byte-level BPE, trained on the input",
    )
    tool.add_argument(
        "--append-eod",
        action="store_true",
        help="append the end-of-document token to each document",
    )
    tool.add_argument(
        "--overwrite",
        action="store_true",
        help="replace existing datasets and an existing tokenizer",
    )
    tool.add_argument(
        "--workers", type=int, default=1, help="number of tokenizer threads (default 1)"
    )
    return tool.run(arguments, preprocess)


def find_tokenizer(options: argparse.Namespace) -> Tokenizer:
    """Open the tokenizer that the flags name, or train one on the input."""
    if not _trains(options):
        return build_tokenizer(options.tokenizer_type, options.tokenizer_model, options.vocab_size)
    if options.vocab_size is None:
        raise InputError(
            "--tokenizer-type ByteLevelBPE needs --tokenizer-model FOLDER, "
            "or --vocab-size to train a new one on the input"
        )
    with _progress(options.input, len(options.json_keys), "training the tokenizer") as advance:
        texts = (
            text for key in options.json_keys for text in read_jsonl(options.input, key, advance)
        )
        return train_byte_bpe(texts, options.vocab_size)


def preprocess(options: argparse.Namespace) -> None:
    """Write one indexed dataset for each key, and the tokenizer if it is new."""
    load_torch()

    from moe_parallel.data.indexed import (
        check_new,
        move_indexed,
        tokenize_documents,
        write_indexed,
    )

    check_positive(options, "workers")
    # The tokenizers library reads this variable when it starts its threads, which is later.
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    target = Path(f"{options.output_prefix}_tokenizer")
    datasets = {key: Path(f"{options.output_prefix}_{key}_document") for key in options.json_keys}
    for prefix in datasets.values():
        check_new(prefix, options.overwrite)
    if _trains(options) and target.exists() and not options.overwrite:
        raise InputError(f"{target} exists: give another --output-prefix, or --overwrite")
    tokenizer = find_tokenizer(options)
    lines = []
    with _staging(target) as folder:
        if _trains(options):
            tokenizer.save(folder / target.name)
            lines.append(f"{target}: {_size(tokenizer, options.vocab_size)}")
        for key, prefix in datasets.items():
            with _progress(options.input, 1, f"tokenizing {key!r}") as advance:
                texts = read_jsonl(options.input, key, advance, tokenizer.check)
                documents = tokenize_documents(texts, tokenizer, append_eod=options.append_eod)
                written = write_indexed(
                    folder / prefix.name,
                    documents,
                    tokenizer.vocab_size,
                    tokenizer=tokenizer.fingerprint,
                )
            lines.append(f"{prefix}: {written.documents:,} documents, {written.tokens:,} tokens")
        if _trains(options):
            shutil.rmtree(target, ignore_errors=True)
            os.replace(folder / target.name, target)
        for prefix in datasets.values():
            move_indexed(folder / prefix.name, prefix)
    print("\n".join(lines))


def _trains(options: argparse.Namespace) -> bool:
    return options.tokenizer_type == "ByteLevelBPE" and options.tokenizer_model is None


def _size(tokenizer: Tokenizer, asked: int) -> str:
    size = f"byte-level BPE, {tokenizer.vocab_size:,} tokens"
    if tokenizer.vocab_size == asked:
        return size
    return f"{size}, fewer than --vocab-size {asked:,}: the text has no more pairs to merge"


@contextmanager
def _staging(beside: Path) -> Iterator[Path]:
    """A temporary folder on the same disk. At the end it is removed with what is still in it."""
    beside.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.writing-", dir=beside.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _progress(
    path: Path, passes: int, label: str
) -> AbstractContextManager[Callable[[int], object]]:
    return progress(label, path.stat().st_size * passes if path.is_file() else None, "B")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
