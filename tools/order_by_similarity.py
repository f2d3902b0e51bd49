r"""Rewrite an indexed dataset so that training instances consist of similar documents.

    python tools/order_by_similarity.py --data-path data/my_text_document \
        --output-prefix data/my_similar --seq-length 4096

This command writes data/my_similar.bin and .idx. Training must use the same --seq-length, which
their manifest contains:

    python pretrain_gpt_moe.py --nproc-per-node 2 --expert-selection lory \
        --data-path data/my_similar --seq-length 4096 ...

docs/similarity_batching.md explains it.
"""

import sys
from argparse import Namespace

from moe_parallel.tool import Tool, check_positive, load_torch, progress


def main(arguments: list[str]) -> int:
    summary, _, example = (__doc__ or "").partition("\n")
    tool = Tool(
        __file__,
        summary,
        epilog=example,
        speaks_as="error",
        when_interrupted="interrupted; no dataset was written",
    )
    group = tool.add_argument_group("files")
    group.add_argument("--data-path", required=True, metavar="PREFIX", help="dataset to read")
    group.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="dataset to write: .bin and .idx"
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    group.add_argument(
        "--eod-id",
        type=int,
        help="id of the end-of-document token (default: the last token of all documents)",
    )
    group = tool.add_argument_group("embeddings")
    group.add_argument(
        "--encoder",
        metavar="NAME",
        help="Hugging Face encoder, a folder or a name such as facebook/contriever "
        "(default: TF-IDF of tokens)",
    )
    group.add_argument(
        "--tokenizer-type",
        default="ByteLevelBPE",
        help="tokenizer type of the data (for --encoder, which reads text; default: ByteLevelBPE)",
    )
    group.add_argument("--tokenizer-model", help="tokenizer of the data: file, folder or hub name")
    group.add_argument("--vocab-size", type=int, help="vocabulary size of NullTokenizer")
    group.add_argument(
        "--embedding-size",
        type=int,
        default=512,
        help="number of values of a TF-IDF vector (default: 512)",
    )
    group = tool.add_argument_group("neighbors")
    group.add_argument(
        "--neighbors", type=int, default=10, help="number of neighbors per document (default: 10)"
    )
    group.add_argument(
        "--index",
        choices=("auto", "exact", "ivf"),
        default="auto",
        help="how neighbors are found: by comparing all pairs (exact), with inverted lists (ivf), "
        "or exact up to 100,000 documents and ivf above (default: auto)",
    )
    group.add_argument(
        "--probes", type=int, default=64, help="number of lists that ivf searches (default: 64)"
    )
    group.add_argument(
        "--duplicate-threshold",
        type=float,
        default=0.95,
        help="leave out a document whose cosine with the previous one is at least this; 2 keeps "
        "all (default: 0.95)",
    )
    group = tool.add_argument_group("instances")
    group.add_argument("--seq-length", type=int, required=True, help="--seq-length of the run")
    group.add_argument(
        "--instances-per-document",
        type=int,
        default=8,
        help="number of instances per written document. --split divides the written documents; "
        "the last label of each belongs to another instance (default: 8)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=1234,
        help="seed of the projection, the starts and the shuffle (default: 1234)",
    )
    return tool.run(arguments, order)


def order(flags: Namespace) -> None:
    """Write the ordered dataset and print a summary."""
    check_positive(
        flags, "seq-length", "instances-per-document", "embedding-size", "neighbors", "probes"
    )
    load_torch()

    from moe_parallel.data.similarity import order_by_similarity

    print(order_by_similarity(flags, progress))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
