"""Rewrites an indexed dataset so that similar documents are adjacent in training."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.progress import Advance, ShowProgress
from moe_parallel.data.sealed import file_digest
from moe_parallel.data.similarity.document_order import (
    adjacent_cosine,
    drop_near_duplicates,
    greedy_order,
    lonely_first,
)
from moe_parallel.data.similarity.documents import Documents
from moe_parallel.data.similarity.embedding import Embedder, embed_all
from moe_parallel.data.similarity.instances import Instances
from moe_parallel.data.similarity.neighbors import (
    BuildIndex,
    find_neighbors,
    found_share,
    mean_neighbors,
)
from moe_parallel.data.similarity.scratch import Scratch


@dataclass(frozen=True)
class Ordering:
    """The settings by which similar documents are brought together.

    Attributes:
        neighbors: K, the neighbors of each document to which the path may continue.
        build: creates the index that finds them.
        shard: the most documents in an index.
        duplicate_threshold: of adjacent documents with this cosine one is dropped; None: keep all.
        seq_length: S, tokens per instance.
        per_document: instances that are written as one document.
        seed: of the starts and the shuffle.
    """

    neighbors: int
    build: BuildIndex
    shard: int
    duplicate_threshold: float | None
    seq_length: int
    per_document: int
    seed: int


@dataclass(frozen=True)
class Summary:
    """The results of finding and writing.

    Attributes:
        documents: number read.
        neighbors: average number found per document.
        found: share of the true nearest neighbors that the index found, in a sample.
        restarts: of the path.
        duplicates: documents left out.
        cosine_random, cosine_before, cosine_after: mean of adjacent documents in random order
            (as GPTDataset shuffles the original file), in the file, and on the path.
        instances: number written.
        written: number of documents of instances written.
        tokens: number written.
        left_out: tokens that filled no instance.
    """

    documents: int
    neighbors: float
    found: float
    restarts: int
    duplicates: int
    cosine_random: float
    cosine_before: float
    cosine_after: float
    instances: int
    written: int
    tokens: int
    left_out: int


def rewrite(
    prefix: str,
    output: Path,
    documents: Documents,
    embedder: Embedder,
    ordering: Ordering,
    work: Scratch,
    progress: ShowProgress,
) -> Summary:
    """Order the documents of `prefix` by similarity and write their instances to `output`.

    The pair of files is published completely or not at all. Memory contains one shard, one span of
    documents and some tens of bytes per document; everything else is stored in `work`.

    Raises:
        InputError: FAISS is not installed; the text is shorter than one instance.
        OSError: a disk is full or cannot be written.
    """
    vectors_ND, neighbors_NK, cosines_NK = _find(
        prefix, documents, embedder, ordering, work, progress
    )
    path = greedy_order(neighbors_NK, lonely_first(neighbors_NK, ordering.seed))
    order = path.order
    if ordering.duplicate_threshold is not None:
        order = drop_near_duplicates(order, vectors_ND, ordering.duplicate_threshold)
    pieces = Instances(documents, order, ordering.seq_length, ordering.per_document)
    with progress("writing", pieces.count * ordering.seq_length) as advance:
        shuffled = pieces.shuffled(ordering.seed)
        written = write_indexed(
            output,
            _told(shuffled, advance),
            documents.largest_id + 1,
            tokenizer=documents.tokenizer,
            seq_length=ordering.seq_length,
            sources=documents.sources,
        )
    anyhow = np.random.default_rng(ordering.seed).permutation(len(documents))
    return Summary(
        documents=len(documents),
        neighbors=mean_neighbors(neighbors_NK),
        found=found_share(vectors_ND, neighbors_NK, cosines_NK, seed=ordering.seed),
        restarts=path.restarts,
        duplicates=len(documents) - len(order),
        cosine_random=adjacent_cosine(anyhow, vectors_ND),
        cosine_before=adjacent_cosine(np.arange(len(documents)), vectors_ND),
        cosine_after=adjacent_cosine(order, vectors_ND),
        instances=pieces.count,
        written=written.documents,
        tokens=written.tokens,
        left_out=pieces.left_out,
    )


def _find(
    prefix: str,
    documents: Documents,
    embedder: Embedder,
    ordering: Ordering,
    work: Scratch,
    progress: ShowProgress,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors [N, D], neighbors and their cosines [N, K], as memory maps; computed or found."""
    count = len(documents)

    def embed(out_ND: np.ndarray) -> None:
        with progress("embedding", embedder.passes * documents.tokens) as advance:
            embed_all(documents, embedder, out_ND, advance)

    made_from = [_content(prefix), documents.eod, embedder.description]
    (vectors_ND,) = work.arrays(
        "embeddings", made_from, [((count, embedder.size), np.float32)], embed
    )

    def search(neighbors_NK: np.ndarray, cosines_NK: np.ndarray) -> None:
        shards = -(-count // ordering.shard)
        with progress("neighbors", count * shards) as advance:
            find_neighbors(
                vectors_ND,
                ordering.build,
                shard=ordering.shard,
                neighbors_NK=neighbors_NK,
                cosines_NK=cosines_NK,
                advance=advance,
            )

    shape = (count, ordering.neighbors)
    neighbors_NK, cosines_NK = work.arrays(
        "neighbors",
        [*made_from, ordering.build, ordering.shard],
        [(shape, np.int64), (shape, np.float32)],
        search,
    )
    return vectors_ND, neighbors_NK, cosines_NK


def _content(prefix: str) -> str:
    """A name of a dataset's content that does not need reading all of it."""
    state = os.stat(f"{prefix}.bin")
    index = file_digest(Path(f"{prefix}.idx"))
    return f"{index} {state.st_size} {state.st_mtime_ns}"


def _told(pieces: Iterable[np.ndarray], advance: Advance) -> Iterator[list[int]]:
    for piece in pieces:
        yield piece.tolist()
        advance(len(piece))
