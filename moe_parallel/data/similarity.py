"""Similarity batching: training instances of similar documents (Lory, section 3.2).

The work of tools/order_by_similarity.py, from an indexed dataset to another one: embeddings of the
documents, their nearest neighbors, a greedy path from neighbor to neighbor, instances along it. The
rows of every array are documents, in the order of the file, unless its name says otherwise.
"""

import hashlib
import math
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from moe_parallel.data.embedding import Documents, HashedTfIdf, HuggingFaceEncoder
from moe_parallel.data.indexed import ShowProgress, check_new, write_indexed
from moe_parallel.data.sealed import file_digest
from moe_parallel.data.tokenizer import build_tokenizer
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import open_regular

# The most documents for which all pairs are compared by default. It takes minutes.
_EXACT_UP_TO = 100_000

# FAISS's k-means needs at least 39 vectors per centroid, and warns below that.
_SAMPLE_PER_CELL = 64

# Documents looked up at a time. Ctrl-C may wait as long as one such look-up.
_QUERIES = 1024

# Rows of a memory map that are read at a time.
_ROWS = 4096

# The most by which float32 cosines differ if they are computed in another order.
_ROUNDING = 1e-5

_AT_LEAST_1 = (
    "seq_length", "instances_per_document", "encoder_batch_size", "embedding_size", "ngram",
    "neighbors", "probes", "shard_size",
)  # fmt: skip

#: float32 [M, D] -> an index of FAISS of its rows.
BuildIndex = Callable[[np.ndarray], Any]


def order_by_similarity(flags: Namespace, progress: ShowProgress) -> str:
    """Order the documents of a dataset by similarity and write their instances to another one.

    That one is published completely or not at all. Memory contains one shard, one span of documents
    and some tens of bytes per document. Vectors and neighbors are on the disk.

    Args:
        flags: those of tools/order_by_similarity.py, which describes them.
        progress: shows the progress.

    Returns:
        A summary of a few lines.

    Raises:
        InputError: an unusable flag or dataset; text shorter than an instance; no FAISS.
        OSError: a disk is full or cannot be written.
    """
    _check(flags)
    check_new(flags.output_prefix, flags.overwrite)
    faiss()  # reports a missing package now, not after the embedding
    documents = Documents(flags.data_path, flags.eod_id)
    count = len(documents)
    if count < 2:
        raise InputError(f"--data-path {flags.data_path} holds one document: nothing to order")
    embedder = _embedder(flags, documents)
    output = Path(flags.output_prefix)
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        TemporaryDirectory(prefix=f".{output.name}.ordering-", dir=output.parent)
        if flags.work_folder is None
        else nullcontext(flags.work_folder)
    ) as folder:
        vectors_ND, neighbors_NK, cosines_NK = _found(
            flags, documents, embedder, Path(folder), progress
        )
        path, restarts = greedy_order(neighbors_NK, lonely_first(neighbors_NK, flags.seed))
        order = path
        if not flags.keep_duplicates:
            order = drop_near_duplicates(path, vectors_ND, flags.duplicate_threshold)
        pieces = Instances(documents, order, flags.seq_length, flags.instances_per_document)
        with progress("writing", pieces.count * flags.seq_length) as advance:
            written = write_indexed(
                output,
                pieces.shuffled(flags.seed, advance),
                documents.largest_id + 1,
                tokenizer=documents.tokenizer,
                seq_length=flags.seq_length,
                sources=documents.sources,
            )
        found = found_share(
            vectors_ND, neighbors_NK, cosines_NK, shard=flags.shard_size, seed=flags.seed
        )
        # GPTDataset shuffles the documents of the original file.
        shuffled = np.random.default_rng(flags.seed).permutation(count)
        after, before, at_random = (
            adjacent_cosine(each, vectors_ND) for each in (order, np.arange(count), shuffled)
        )
        neighbors = sum(int((rows >= 0).sum()) for rows in _chunks(neighbors_NK)) / count
    return (
        f"{count:,} documents, {neighbors:.1f} neighbors each ({found:.0%} of the nearest found); "
        f"{restarts:,} restarts, {count - len(order):,} near duplicates left out\n"
        f"cosine of adjacent documents: {after:.3f} "
        f"(in the file {before:.3f}, in random order {at_random:.3f})\n"
        f"{output}: {pieces.count:,} instances of {flags.seq_length:,} tokens in "
        f"{written.documents:,} documents; {pieces.left_out:,} tokens left over"
    )


def _check(flags: Namespace) -> None:
    """Raises InputError for an unusable number."""
    for name in _AT_LEAST_1:
        if getattr(flags, name) < 1:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is {getattr(flags, name)}: it must be at least 1")
    if flags.seed < 0:
        raise InputError(f"--seed is {flags.seed}: it must be at least 0")
    if flags.eod_id is not None and not 0 <= flags.eod_id < 2**31:
        raise InputError(f"--eod-id {flags.eod_id} is not a token id: give 0 or more")
    if not 0 < flags.duplicate_threshold <= 1:
        raise InputError(
            f"--duplicate-threshold {flags.duplicate_threshold} must be above 0 and at most 1 "
            "(--keep-duplicates leaves out none)"
        )
    if flags.seq_length * flags.instances_per_document >= 2**31:
        raise InputError(
            f"--instances-per-document {flags.instances_per_document} of --seq-length "
            f"{flags.seq_length} are more tokens than a document can hold; give fewer"
        )
    if Path(flags.output_prefix).resolve() == Path(flags.data_path).resolve():
        raise InputError(
            f"--output-prefix {flags.output_prefix} is the --data-path: give another name"
        )


def _embedder(flags: Namespace, documents: Documents) -> HashedTfIdf | HuggingFaceEncoder:
    if flags.encoder is None:
        return HashedTfIdf(flags.embedding_size, orders=flags.ngram, seed=flags.seed)
    tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
    if documents.tokenizer not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--tokenizer-model {flags.tokenizer_model} is not the tokenizer that wrote "
            f"{flags.data_path}: name that one, because the encoder would read other words"
        )
    return HuggingFaceEncoder(flags.encoder, tokenizer, flags.encoder_batch_size)


def _found(
    flags: Namespace,
    documents: Documents,
    embedder: HashedTfIdf | HuggingFaceEncoder,
    folder: Path,
    progress: ShowProgress,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Vectors [N, D], neighbors and their cosines [N, K], as memory maps in `folder`."""
    count, k, shard = len(documents), flags.neighbors, flags.shard_size

    def embed(out_ND: np.ndarray) -> None:
        with progress("embedding", embedder.passes * int(documents.lengths.sum())) as advance:
            embedder.embed(documents, out_ND, advance)

    # A name of the dataset's content that does not need reading all of it.
    state = os.stat(f"{flags.data_path}.bin")
    content = f"{file_digest(Path(f'{flags.data_path}.idx'))} {state.st_size} {state.st_mtime_ns}"
    made_from = f"{content!r}, {documents.eod}, {embedder.description!r}"
    (vectors_ND,) = computed_once(
        folder / "embeddings", made_from, [((count, embedder.size), np.float32)], embed
    )
    build, name = exact_index, "ExactIndex()"
    if flags.index == "ivf" or (flags.index == "auto" and count > _EXACT_UP_TO):
        build, name = (
            lambda vectors_MD: inverted_index(vectors_MD, flags.probes, flags.seed),
            f"InvertedIndex(probes={flags.probes}, seed={flags.seed})",
        )

    def search(neighbors_NK: np.ndarray, cosines_NK: np.ndarray) -> None:
        with progress("neighbors", count * -(-count // shard)) as advance:
            find_neighbors(vectors_ND, build, shard, neighbors_NK, cosines_NK, advance=advance)

    neighbors_NK, cosines_NK = computed_once(
        folder / "neighbors",
        f"{made_from}, {name}, {shard}",
        [((count, k), np.int64), ((count, k), np.float32)],
        search,
    )
    return vectors_ND, neighbors_NK, cosines_NK


def computed_once(
    path: Path,
    made_from: str,
    shapes: Sequence[tuple[tuple[int, ...], type]],
    make: Callable[..., object],
) -> list[np.ndarray]:
    """Read-only memory maps of arrays that `make(*arrays)` fills, unless they exist.

    They get their names when all are filled, so an interrupted `make` starts anew. It also starts
    anew if the files are not arrays of those shapes and types.

    Args:
        path: the beginning of the files' names.
        made_from: everything that the content depends on.
        shapes: shape and type of each array.
        make: called with the arrays to fill.
    """
    described = f"[{', '.join([made_from, *map(repr, shapes)])}]"
    digest = hashlib.sha256(described.encode()).hexdigest()[:16]
    final = [path.with_name(f"{path.name}{i}-{digest}.npy") for i in range(len(shapes))]
    found = [_array(each, *of) for each, of in zip(final, shapes, strict=True)]
    if any(array is None for array in found):
        path.parent.mkdir(parents=True, exist_ok=True)
        writing = [each.with_name(f"{each.name}.writing-{os.getpid()}") for each in final]
        try:
            outs = []
            for temporary, (shape, dtype) in zip(writing, shapes, strict=True):
                outs.append(np.lib.format.open_memmap(temporary, "w+", dtype, shape))
                # A full disk raises an error now; later, writing to a map, it would kill us.
                with temporary.open("r+b") as stream:
                    os.posix_fallocate(stream.fileno(), 0, temporary.stat().st_size)
            make(*outs)
            for out, temporary, each in zip(outs, writing, final, strict=True):
                out.flush()
                os.replace(temporary, each)
        finally:
            for temporary in writing:
                temporary.unlink(missing_ok=True)
        found = [_array(each, *of) for each, of in zip(final, shapes, strict=True)]
    return [array for array in found if array is not None]


def _array(path: Path, shape: tuple[int, ...], dtype: type) -> np.ndarray | None:
    """The array in a file; None if there is no such file, or its content is something else."""
    try:
        open_regular(path).close()
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except OSError:
        raise
    except Exception:  # arbitrary bytes may cause any error
        return None
    fits = isinstance(array, np.ndarray) and (array.shape, array.dtype) == (shape, dtype)
    return array if fits else None


def faiss() -> Any:
    """The FAISS library. Raises InputError if it is not installed."""
    return import_optional("faiss", "the search for similar documents")


def exact_index(vectors_MD: np.ndarray) -> Any:
    """Compares every pair: time grows with the square of the corpus."""
    index = faiss().IndexFlatIP(vectors_MD.shape[1])
    index.add(vectors_MD)
    return index


def inverted_index(vectors_MD: np.ndarray, probes: int, seed: int) -> Any:
    """Inverted lists: k-means divides the shard into cells, and a query searches a few of them.

    Args:
        vectors_MD: float32, of the shard.
        probes: number of cells that a query searches.
        seed: of the k-means and of its training sample.
    """
    library = faiss()
    count, width = vectors_MD.shape
    cells = max(1, min(round(4 * math.sqrt(count)), count // _SAMPLE_PER_CELL))
    centers = library.IndexFlatIP(width)
    index = library.IndexIVFFlat(centers, width, cells, library.METRIC_INNER_PRODUCT)
    index.cp.spherical = True
    index.cp.seed = seed
    index.cp.min_points_per_centroid = 1  # else it warns about a corpus of a few documents
    sample = np.random.default_rng(seed).choice(
        count, size=min(count, cells * _SAMPLE_PER_CELL), replace=False
    )
    index.train(vectors_MD[np.sort(sample)])
    index.add(vectors_MD)
    index.nprobe = probes
    return index


def find_neighbors(
    vectors_ND: np.ndarray,
    build: BuildIndex,
    shard: int,
    neighbors_QK: np.ndarray,
    cosines_QK: np.ndarray,
    *,
    asked: np.ndarray | None = None,
    advance: Callable[[int], object] = lambda queries: None,
) -> None:
    """Find the K documents most similar to each of Q, most similar first, without itself.

    An index contains at most `shard` documents. It is filled with one shard of the corpus after
    another, all of the Q documents are looked up in each, and the best K so far are kept. With
    exact indices the result does not depend on the shard, except for cosines equal to the last
    bits. Only documents of positive cosine are neighbors: others have nothing in common.

    Args:
        vectors_ND: float32, with cosines as inner products; may be a memory map.
        build: creates the index of a shard.
        shard: the most documents in an index.
        neighbors_QK: int64, output: numbers of documents, -1 if there are fewer than K.
        cosines_QK: float32, output: their cosines, 0 if there is no neighbor.
        asked: int64 [Q], numbers of documents; None: all.
        advance: receives numbers of queries; Q per shard.
    """
    k = neighbors_QK.shape[1]
    asked = np.arange(len(vectors_ND)) if asked is None else asked
    for start in range(0, len(vectors_ND), shard):
        index = build(np.ascontiguousarray(vectors_ND[start : start + shard]))
        for first in range(0, len(asked), _QUERIES):
            chunk = slice(first, first + _QUERIES)
            numbers = asked[chunk]
            # One more than K, because a document finds itself.
            cosines, found = index.search(np.ascontiguousarray(vectors_ND[numbers]), k + 1)
            found = np.where(found >= 0, found + start, -1)
            found[found == numbers[:, None]] = -1
            if start:
                found = np.concatenate([neighbors_QK[chunk], found], axis=1)
                cosines = np.concatenate([cosines_QK[chunk], cosines], axis=1)
            usable = (found >= 0) & (cosines > 0)
            cosines, found = np.where(usable, cosines, 0), np.where(usable, found, -1)
            # Of equal cosines the lower number comes first.
            best = np.lexsort((found, -cosines), axis=1)[:, :k]
            neighbors_QK[chunk] = np.take_along_axis(found, best, axis=1)
            cosines_QK[chunk] = np.take_along_axis(cosines, best, axis=1)
            advance(len(numbers))


def found_share(
    vectors_ND: np.ndarray,
    neighbors_NK: np.ndarray,
    cosines_NK: np.ndarray,
    *,
    shard: int,
    seed: int,
    sample: int = 100,
) -> float:
    """The share of the true K nearest that was found, for `sample` documents compared with all.

    A document as similar as the true K-th counts as found, because equal ones are interchangeable.
    """
    count, k = neighbors_NK.shape
    asked = np.sort(np.random.default_rng(seed).permutation(count)[:sample])
    true, nearest = np.zeros((len(asked), k), np.int64), np.zeros((len(asked), k), np.float32)
    find_neighbors(vectors_ND, exact_index, shard, true, nearest, asked=asked)
    least = np.where(true >= 0, nearest, np.inf).min(axis=1, keepdims=True)
    found = (neighbors_NK[asked] >= 0) & (cosines_NK[asked] >= least - _ROUNDING)
    return float(found.sum() / max(1, (true >= 0).sum()))


def greedy_order(neighbors_NK: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, int]:
    """An order of documents in which adjacent documents are similar.

    Lory, Appendix C, after Shi et al., "In-Context Pretraining" (2024): start from a document,
    append the most similar unused neighbor of the last document, and restart with a new document
    when all its neighbors are used.

    Args:
        neighbors_NK: int64, the neighbors of each document, most similar first; -1: none.
        starts: int64 [N], every document once: the order in which new starts are tried.

    Returns:
        int64 [N], every document once; the number of restarts, without the first start.
    """
    used = np.zeros(len(starts), dtype=bool)
    order: list[int] = []
    begun = 0
    for start in starts.tolist():
        document = -1 if used[start] else start
        begun += document >= 0
        while document >= 0:
            order.append(document)
            used[document] = True
            around = neighbors_NK[document].tolist()
            document = next((other for other in around if other >= 0 and not used[other]), -1)
    assert len(order) == len(starts)
    return np.array(order, dtype=np.int64), begun - 1


def lonely_first(neighbors_NK: np.ndarray, seed: int) -> np.ndarray:
    """int64 [N]: documents by how many have them as a neighbor, fewest first; ties at random.

    Shi et al. start with a document of the smallest degree, because it is the most likely to be
    left over. Their degree counts the remaining documents, ours counts all.
    """
    named = np.zeros(len(neighbors_NK), dtype=np.int64)
    for rows in _chunks(neighbors_NK):
        np.add.at(named, rows[rows >= 0], 1)
    shuffled = np.random.default_rng(seed).permutation(len(named))
    return shuffled[np.argsort(named[shuffled], kind="stable")]


def drop_near_duplicates(order: np.ndarray, vectors_ND: np.ndarray, threshold: float) -> np.ndarray:
    """Leave out each document whose cosine with the last kept one reaches the threshold.

    Returns:
        int64 [<= N]: the kept documents, in the same order. No two adjacent documents are then
        near duplicates.
    """
    kept: list[int] = []
    last = np.zeros(vectors_ND.shape[1], dtype=np.float32)
    for chunk in _chunks(order):
        for document, vector in zip(chunk.tolist(), vectors_ND[chunk], strict=True):
            if float(last @ vector) < threshold:
                kept.append(document)
                last = vector
    return np.array(kept, dtype=np.int64)


def adjacent_cosine(order: np.ndarray, vectors_ND: np.ndarray, pairs: int = 100_000) -> float:
    """The mean cosine of adjacent documents, over at most `pairs` evenly spread pairs.

    NaN for fewer than two documents.
    """
    count = len(order) - 1
    if count < 1:
        return float("nan")
    places = np.unique(np.linspace(0, count - 1, min(count, pairs)).astype(np.int64))
    total = 0.0
    for left in _chunks(places):
        a, b = vectors_ND[order[left]], vectors_ND[order[left + 1]]
        total += float(np.einsum("nd,nd->", a, b, dtype=np.float64))
    return total / len(places)


def _chunks(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS))


class Instances:
    """Ordered documents, joined and cut into pieces of `per_piece` instances of one length.

    GPTDataset shuffles documents, joins them, and cuts the result. Sample i is tokens
    [i*S, i*S + S + 1); its last token is only a label, and is the first token of sample i + 1. So

    - documents of S + 1 tokens, input and label of one sample, would drift: each sample would start
      one token earlier in its document than the previous one, and most samples would span two;
    - documents of m*S tokens fit: in any shuffled order, every sample is one instance. The label of
      an instance's last token is its true successor, except in the last instance of a document,
      where it is the first token of the next document: one wrong label in m*S.

    Within an epoch GPTDataset also shuffles samples, so the m instances of a document are
    separated. The last piece may have fewer instances. Tokens that do not fill an instance are left
    out.

    Attributes:
        count: number of instances.
        left_out: number of tokens at the end that fill no instance.
    """

    def __init__(
        self, documents: Documents, order: np.ndarray, seq_length: int, per_piece: int
    ) -> None:
        """
        Args:
            documents: the documents with the text.
            order: int64, the documents to use, in order.
            seq_length: S, tokens per instance; training must use the same value.
            per_piece: m, instances per piece.

        Raises:
            InputError: the text is shorter than one instance.
        """
        self._documents = documents
        self._order = order
        self._ends = np.cumsum(documents.lengths[order])
        self._piece = seq_length * per_piece
        tokens = int(self._ends[-1])
        self.count, self.left_out = divmod(tokens, seq_length)
        self._tokens = tokens - self.left_out
        if not self.count:
            raise InputError(
                f"--seq-length {seq_length} is longer than the text: the documents that are kept "
                f"have {tokens} tokens; use a shorter sequence or more text"
            )

    def __len__(self) -> int:
        return (self._tokens + self._piece - 1) // self._piece

    def __getitem__(self, piece: int) -> np.ndarray:
        """int64 [m*S]: a piece of the text."""
        start = piece * self._piece
        end = min(start + self._piece, self._tokens)
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, end, side="left"))
        ids = np.concatenate([self._documents[i] for i in self._order[first : last + 1].tolist()])
        skipped = start - (int(self._ends[first - 1]) if first else 0)
        return ids[skipped : skipped + end - start]

    def shuffled(
        self, seed: int, advance: Callable[[int], object] = lambda tokens: None
    ) -> Iterator[list[int]]:
        """Every piece once, in random order; `advance` receives the tokens of each."""
        for piece in np.random.default_rng(seed).permutation(len(self)).tolist():
            ids = self[piece].tolist()
            yield ids
            advance(len(ids))
