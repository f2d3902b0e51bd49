"""Orders an indexed dataset by similarity: the work of tools/order_by_similarity.py."""

from dataclasses import dataclass
from pathlib import Path

from moe_parallel.data.indexed import check_new
from moe_parallel.data.progress import ShowProgress
from moe_parallel.data.similarity.documents import Documents
from moe_parallel.data.similarity.embedding import Embedder
from moe_parallel.data.similarity.encoder import HuggingFaceEncoder
from moe_parallel.data.similarity.neighbors import BuildIndex, ExactIndex, InvertedIndex, faiss
from moe_parallel.data.similarity.rewrite import Ordering, Summary, rewrite
from moe_parallel.data.similarity.scratch import scratch
from moe_parallel.data.similarity.tf_idf import HashedTfIdf
from moe_parallel.data.tokenizer import build_tokenizer
from moe_parallel.errors import InputError

# The most documents for which all pairs are compared by default. It takes minutes.
EXACT_UP_TO = 100_000

_AT_LEAST_1 = (
    "seq_length", "instances_per_document", "encoder_batch_size", "embedding_size", "ngram",
    "neighbors", "probes", "shard_size",
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """The flags of tools/order_by_similarity.py, where each is described."""

    data_path: str
    output_prefix: str
    overwrite: bool
    eod_id: int | None
    work_folder: Path | None
    encoder: str | None
    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    encoder_batch_size: int
    embedding_size: int
    ngram: int
    neighbors: int
    index: str
    probes: int
    shard_size: int
    duplicate_threshold: float
    keep_duplicates: bool
    seq_length: int
    instances_per_document: int
    seed: int

    def check(self) -> None:
        """Raises InputError for an unusable number."""
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} is {getattr(self, name)}: it must be at least 1")
        if self.seed < 0:
            raise InputError(f"--seed is {self.seed}: it must be at least 0")
        if self.eod_id is not None and not 0 <= self.eod_id < 2**31:
            raise InputError(f"--eod-id {self.eod_id} is not a token id: give 0 or more")
        if not 0 < self.duplicate_threshold <= 1:
            raise InputError(
                f"--duplicate-threshold {self.duplicate_threshold} must be above 0 and at most 1 "
                "(--keep-duplicates leaves out none)"
            )
        if self.seq_length * self.instances_per_document >= 2**31:
            raise InputError(
                f"--instances-per-document {self.instances_per_document} of --seq-length "
                f"{self.seq_length} are more tokens than a document can hold; give fewer"
            )
        if Path(self.output_prefix).resolve() == Path(self.data_path).resolve():
            raise InputError(
                f"--output-prefix {self.output_prefix} is the --data-path: give another name"
            )


def order_by_similarity(flags: Order, progress: ShowProgress) -> str:
    """Reads the dataset, orders its documents, and writes the result.

    Returns:
        A summary of a few lines.

    Raises:
        InputError: an unusable flag or dataset; FAISS is not installed.
        OSError: a disk is full or cannot be written.
    """
    flags.check()
    check_new(flags.output_prefix, flags.overwrite)
    faiss()  # reports a missing package now, not after the embedding
    documents = Documents(flags.data_path, flags.eod_id)
    if len(documents) < 2:
        raise InputError(f"--data-path {flags.data_path} holds one document: nothing to order")
    ordering = Ordering(
        neighbors=flags.neighbors,
        build=_index(flags, len(documents)),
        shard=flags.shard_size,
        duplicate_threshold=None if flags.keep_duplicates else flags.duplicate_threshold,
        seq_length=flags.seq_length,
        per_document=flags.instances_per_document,
        seed=flags.seed,
    )
    output = Path(flags.output_prefix)
    embedder = _embedder(flags, documents)
    with scratch(flags.work_folder, beside=output) as work:
        done = rewrite(flags.data_path, output, documents, embedder, ordering, work, progress)
    return _described(done, flags)


def _embedder(flags: Order, documents: Documents) -> Embedder:
    if flags.encoder is None:
        return HashedTfIdf(flags.embedding_size, orders=flags.ngram, seed=flags.seed)
    tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
    if documents.tokenizer not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--tokenizer-model {flags.tokenizer_model} is not the tokenizer that wrote "
            f"{flags.data_path}: name that one, because the encoder would read other words"
        )
    return HuggingFaceEncoder(flags.encoder, tokenizer, flags.encoder_batch_size)


def _index(flags: Order, documents: int) -> BuildIndex:
    if flags.index == "exact" or (flags.index == "auto" and documents <= EXACT_UP_TO):
        return ExactIndex()
    return InvertedIndex(flags.probes, flags.seed)


def _described(done: Summary, flags: Order) -> str:
    return (
        f"{done.documents:,} documents, {done.neighbors:.1f} neighbors each "
        f"({done.found:.0%} of the nearest found); "
        f"{done.restarts:,} restarts, {done.duplicates:,} near duplicates left out\n"
        f"cosine of adjacent documents: {done.cosine_after:.3f} "
        f"(in the file {done.cosine_before:.3f}, in random order {done.cosine_random:.3f})\n"
        f"{flags.output_prefix}: {done.instances:,} instances of {flags.seq_length:,} "
        f"tokens in {done.written:,} documents; {done.left_out:,} tokens left over"
    )
