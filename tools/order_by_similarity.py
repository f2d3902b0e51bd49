r"""Rewrite an indexed dataset so that training instances consist of similar documents.

    python tools/order_by_similarity.py --data-path data/my_text_document \
        --output-prefix data/my_similar --seq-length 4096

writes data/my_similar.bin and .idx. Training on them needs the same --seq-length: their manifest
contains it, and training refuses another:

    python pretrain_gpt_moe.py --nproc-per-node 2 --expert-selection lory \
        --data-path data/my_similar --seq-length 4096 ...

docs/similarity_batching.md explains it.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_positive, load_torch, progress

if TYPE_CHECKING:
    from moe_parallel.data.similarity.documents import Documents
    from moe_parallel.data.similarity.embedding import Embedder
    from moe_parallel.data.similarity.neighbors import BuildIndex
    from moe_parallel.data.similarity.rewrite import Summary

# The most documents for which all pairs are compared by default. It takes minutes.
EXACT_UP_TO = 100_000


def main(arguments: list[str]) -> int:
    summary, _, example = (__doc__ or "").partition("\n")
    tool = Tool(
        __file__,
        summary,
        epilog=example,
        speaks_as="error",
        when_interrupted="interrupted; no dataset was written",
    )
    files = tool.add_argument_group("files")
    files.add_argument("--data-path", required=True, metavar="PREFIX", help="dataset to read")
    files.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="dataset to write: .bin and .idx"
    )
    files.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    files.add_argument(
        "--eod-id",
        type=int,
        help="id of the end-of-document token (default: the last token of all documents)",
    )
    files.add_argument(
        "--work-folder",
        type=Path,
        help="folder in which embeddings and neighbors are kept for reuse (default: a temporary "
        "folder beside the output)",
    )
    _add_embedding(tool.add_argument_group("embeddings"))
    _add_neighbors(tool.add_argument_group("neighbors"))
    instances = tool.add_argument_group("instances")
    instances.add_argument("--seq-length", type=int, required=True, help="--seq-length of the run")
    instances.add_argument(
        "--instances-per-document",
        type=int,
        default=8,
        help="number of instances per written document; the last label of each document belongs to "
        "another instance; --split divides documents (default 8)",
    )
    instances.add_argument(
        "--seed",
        type=int,
        default=1234,
        help="seed of the projection, the starts and the shuffle (default 1234)",
    )
    return tool.run(arguments, lambda own: print(describe(order(own), own)))


def _add_embedding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--encoder",
        metavar="NAME",
        help="Hugging Face encoder, a folder or a name such as facebook/contriever "
        "(default: TF-IDF of hashed n-grams of tokens)",
    )
    group.add_argument(
        "--tokenizer-type",
        default="ByteLevelBPE",
        help="tokenizer type of the data (for --encoder, which reads text)",
    )
    group.add_argument("--tokenizer-model", help="tokenizer of the data: file, folder or hub name")
    group.add_argument("--vocab-size", type=int, help="vocabulary size of NullTokenizer")
    group.add_argument(
        "--encoder-batch-size",
        type=int,
        default=32,
        help="number of documents per batch of the encoder (default 32)",
    )
    group.add_argument(
        "--embedding-size", type=int, default=512, help="size of the TF-IDF vectors (default 512)"
    )
    group.add_argument("--ngram", type=int, default=1, help="longest n-gram of TF-IDF (default 1)")


def _add_neighbors(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--neighbors", type=int, default=10, help="number of neighbors per document (default 10)"
    )
    group.add_argument(  # as it was called
        "--neighbours",
        dest="neighbors",
        type=int,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    group.add_argument(
        "--index",
        choices=("auto", "exact", "ivf"),
        default="auto",
        help=f"auto: exact up to {EXACT_UP_TO:,} documents, inverted lists (ivf) above",
    )
    group.add_argument("--probes", type=int, default=64, help="lists searched by ivf (default 64)")
    group.add_argument(
        "--shard-size",
        type=int,
        default=1_000_000,
        help="documents in memory at once (default 1,000,000)",
    )
    group.add_argument(
        "--duplicate-threshold",
        type=float,
        default=0.95,
        help="leave out a document whose cosine with the previous one is at least this "
        "(default 0.95)",
    )
    group.add_argument("--keep-duplicates", action="store_true", help="keep near duplicates")


def check(options: argparse.Namespace) -> None:
    """Raise InputError for an unusable number."""
    check_positive(
        options, "seq-length", "instances-per-document", "encoder-batch-size", "embedding-size",
        "ngram", "neighbors", "probes", "shard-size",
    )  # fmt: skip
    if options.seed < 0:
        raise InputError(f"--seed is {options.seed}: it must be at least 0")
    if options.eod_id is not None and not 0 <= options.eod_id < 2**31:
        raise InputError(f"--eod-id {options.eod_id} is no token: give one from 0 up")
    if not 0 < options.duplicate_threshold <= 1:
        raise InputError(
            f"--duplicate-threshold {options.duplicate_threshold} must be above 0 and at most 1 "
            "(--keep-duplicates leaves out none)"
        )
    if options.seq_length * options.instances_per_document >= 2**31:
        raise InputError(
            f"--instances-per-document {options.instances_per_document} of --seq-length "
            f"{options.seq_length} are more tokens than a document can hold; give fewer"
        )
    if Path(options.output_prefix).resolve() == Path(options.data_path).resolve():
        raise InputError(
            f"--output-prefix {options.output_prefix} is the --data-path: give another name"
        )


def order(options: argparse.Namespace) -> "Summary":
    """Read the dataset, order its documents, and write the result."""
    load_torch()

    from moe_parallel.data.indexed import check_new
    from moe_parallel.data.similarity.documents import Documents
    from moe_parallel.data.similarity.neighbors import faiss
    from moe_parallel.data.similarity.rewrite import Ordering, rewrite
    from moe_parallel.data.similarity.scratch import scratch

    check(options)
    check_new(options.output_prefix, options.overwrite)
    faiss()  # reports a missing package now, not after the embedding
    documents = Documents(options.data_path, options.eod_id)
    if len(documents) < 2:
        raise InputError(f"--data-path {options.data_path} holds one document: nothing to order")
    ordering = Ordering(
        neighbors=options.neighbors,
        build=_index(options, documents),
        shard=options.shard_size,
        duplicate_threshold=None if options.keep_duplicates else options.duplicate_threshold,
        seq_length=options.seq_length,
        per_document=options.instances_per_document,
        seed=options.seed,
    )
    output = Path(options.output_prefix)
    embedder = _embedder(options, documents)
    with scratch(options.work_folder, beside=output) as work:
        return rewrite(options.data_path, output, documents, embedder, ordering, work, progress)


def _embedder(options: argparse.Namespace, documents: "Documents") -> "Embedder":
    if options.encoder is None:
        from moe_parallel.data.similarity.tf_idf import HashedTfIdf

        return HashedTfIdf(options.embedding_size, orders=options.ngram, seed=options.seed)
    from moe_parallel.data.similarity.encoder import HuggingFaceEncoder
    from moe_parallel.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(options.tokenizer_type, options.tokenizer_model, options.vocab_size)
    if documents.tokenizer not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--tokenizer-model {options.tokenizer_model} is not the tokenizer that wrote "
            f"{options.data_path}: name that one, or the encoder reads other words"
        )
    return HuggingFaceEncoder(options.encoder, tokenizer, options.encoder_batch_size)


def _index(options: argparse.Namespace, documents: "Documents") -> "BuildIndex":
    from moe_parallel.data.similarity.neighbors import ExactIndex, InvertedIndex

    if options.index == "exact" or (options.index == "auto" and len(documents) <= EXACT_UP_TO):
        return ExactIndex()
    return InvertedIndex(options.probes, options.seed)


def describe(summary: "Summary", options: argparse.Namespace) -> str:
    """A summary of a few lines."""
    return (
        f"{summary.documents:,} documents, {summary.neighbors:.1f} neighbors each "
        f"({summary.found:.0%} of the nearest found); "
        f"{summary.restarts:,} restarts, {summary.duplicates:,} near duplicates left out\n"
        f"cosine of adjacent documents: {summary.cosine_after:.3f} "
        f"(in the file {summary.cosine_before:.3f}, in random order {summary.cosine_random:.3f})\n"
        f"{options.output_prefix}: {summary.instances:,} instances of {options.seq_length:,} "
        f"tokens in {summary.written:,} documents; {summary.left_out:,} tokens left over"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
