"""Similarity batching: training instances of similar documents (Lory, section 3.2).

The work of tools/order_by_similarity.py, from an indexed dataset to another one: vectors of the
documents, their nearest neighbors, a greedy path from neighbor to neighbor, instances along it. The
rows of every array are documents, in the order of the file, unless its name says otherwise.
"""

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_parallel.data.indexed import (
    ANY_VOCABULARY,
    ShowProgress,
    check_indexed,
    check_new,
    read_manifest,
    type_of_ids,
    write_indexed,
)
from moe_parallel.data.tokenizer import Tokenizer, ask_hub, build_tokenizer, hush_transformers
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import first_line

# The most documents for which all pairs are compared by default. It takes minutes.
_EXACT_UP_TO = 100_000
# FAISS's k-means uses so many vectors per centroid, and warns below 39.
_SAMPLE_PER_CELL = 64
# Documents looked up at a time. Ctrl-C may wait as long as one such look-up.
_QUERIES = 1024
# The most by which float32 cosines differ if they are computed in another order.
_ROUNDING = 1e-5
# Tokens, and documents, that are embedded at a time.
_SPAN_TOKENS, _SPAN = 2**20, 4096
# The documents in a batch of an encoder, and the tokens that it reads of each at most: the limit of
# Contriever, for encoders whose tokenizer has none.
_ENCODED, _MOST_TOKENS = 32, 512
# Our tokens that are converted to text per token that the encoder reads: enough for a tokenizer
# with long tokens, but not a complete book for its first page.
_TOKENS_EACH = 4

Advance = Callable[[int], object]


def order_by_similarity(flags: Namespace, progress: ShowProgress) -> str:
    """Order the documents of a dataset by similarity and write their instances to another one.

    That one is published completely or not at all. Memory holds two copies of the vectors.

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
    count, k, seed = len(documents), flags.neighbors, flags.seed
    if count < 2:
        raise InputError(f"--data-path {flags.data_path} holds one document: nothing to order")
    output = Path(flags.output_prefix)
    output.parent.mkdir(parents=True, exist_ok=True)
    if flags.encoder is None:
        with progress("embedding", 2 * int(documents.lengths.sum())) as advance:
            vectors_ND = tf_idf(documents, flags.embedding_size, seed, advance)
    else:
        tokenizer = build_tokenizer(flags.tokenizer_type, flags.tokenizer_model, flags.vocab_size)
        if documents.tokenizer not in (None, tokenizer.fingerprint):
            raise InputError(
                f"--tokenizer-model {flags.tokenizer_model} is not the tokenizer that wrote "
                f"{flags.data_path}: name that one, because the encoder would read other words"
            )
        with progress("embedding", int(documents.lengths.sum())) as advance:
            vectors_ND = encoded(flags.encoder, tokenizer, documents, advance)
    exact = flags.index == "exact" or (flags.index == "auto" and count <= _EXACT_UP_TO)
    index = build_index(vectors_ND, None if exact else flags.probes, seed)
    with progress("neighbors", count) as advance:
        neighbors_NK, cosines_NK = find_neighbors(vectors_ND, index, k, advance)
    found = 1.0 if exact else found_share(vectors_ND, neighbors_NK, cosines_NK, seed)
    path, restarts = greedy_order(neighbors_NK, lonely_first(neighbors_NK, seed))
    order = drop_near_duplicates(path, vectors_ND, flags.duplicate_threshold)
    pieces = Instances(documents, order, flags.seq_length, flags.instances_per_document)
    with progress("writing", pieces.count * flags.seq_length) as advance:
        written = write_indexed(
            output,
            pieces.shuffled(seed, advance),
            documents.largest_id + 1,
            tokenizer=documents.tokenizer,
            seq_length=flags.seq_length,
            sources=documents.sources,
        )
    # GPTDataset shuffles the documents of the original file.
    shuffled = np.random.default_rng(seed).permutation(count)
    after, before, at_random = (
        adjacent_cosine(each, vectors_ND) for each in (order, np.arange(count), shuffled)
    )
    neighbors = (neighbors_NK >= 0).sum() / count
    return (
        f"{count:,} documents, {neighbors:.1f} neighbors each ({found:.0%} of the nearest found); "
        f"{restarts:,} restarts, {count - len(order):,} near duplicates left out\n"
        f"cosine of adjacent documents: {after:.3f} "
        f"(in the file {before:.3f}, in random order {at_random:.3f})\n"
        f"{output}: {pieces.count:,} instances of {flags.seq_length:,} tokens in "
        f"{written.documents:,} documents; {pieces.left_out:,} tokens left over"
    )


def _check(flags: Namespace) -> None:
    """Raises InputError for an unusable number or name."""
    if flags.seed < 0:
        raise InputError(f"--seed is {flags.seed}: it must be at least 0")
    if flags.eod_id is not None and not 0 <= flags.eod_id < 2**31:
        raise InputError(f"--eod-id {flags.eod_id} is not a token id: give 0 or more")
    if not flags.duplicate_threshold > 0:
        raise InputError(
            f"--duplicate-threshold {flags.duplicate_threshold} must be above 0 "
            "(2, which no cosine reaches, leaves out none)"
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


class Documents:
    """The documents of PREFIX.bin, read from the disk when they are requested.

    A document is what Megatron's GPTDataset shuffles: one sequence of the index. Each ends with
    the token `eod`. A document that lacks it in the file gets it here, so that two adjacent
    documents stay separate.

    Attributes:
        eod: id of the token that ends a document.
        largest_id: in the file, or `eod`.
        lengths: int64 [N], tokens of each document, `eod` included.
        tokenizer: fingerprint of the tokenizer that wrote them; None: unknown.
        sources: the files of text that they came from; None: unknown.
    """

    def __init__(self, prefix: str, eod: int | None = None) -> None:
        """Open the dataset PREFIX. `eod` None: the last token of all documents.

        Raises:
            InputError: files as in check_indexed; documents that end differently, without `eod`.
        """
        lengths = check_indexed(prefix, ANY_VOCABULARY).astype(np.int64)
        manifest = read_manifest(prefix)
        self.tokenizer = None if manifest is None else manifest.tokenizer
        self.sources = None if manifest is None else manifest.sources
        self._ids = np.memmap(f"{prefix}.bin", mode="r", dtype=type_of_ids(prefix))
        self._starts = np.cumsum(lengths) - lengths
        last = self._ids[(self._starts + lengths)[lengths > 0] - 1]
        if eod is None and (different := len(np.unique(last))) != 1:
            raise InputError(
                f"--data-path {prefix}: its documents end with {different} different tokens, so "
                "the end-of-document token is unknown; give it with --eod-id"
            )
        self.eod = int(last[0]) if eod is None else eod
        self.largest_id = max(self.eod, int(self._ids.max()))
        ended = np.zeros(len(lengths), dtype=bool)
        ended[lengths > 0] = last == self.eod
        self.lengths = lengths - ended + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """int64 [lengths[i]]: the ids of document i, ended by `eod`."""
        return np.append(self.body(i).astype(np.int64), self.eod)

    def body(self, i: int) -> np.ndarray:
        """The ids of document i without the `eod` at its end, in the file's own integer type."""
        return self._ids[self._starts[i] : self._starts[i] + self.lengths[i] - 1]

    def spans(self, most: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Places and bodies of at most `most` documents, of a million tokens (or one longer)."""
        first, ends = 0, np.cumsum(self.lengths)
        while first < len(self):
            start = ends[first] - self.lengths[first]
            reach = np.searchsorted(ends, start + _SPAN_TOKENS, side="right")
            last = min(max(int(reach), first + 1), first + most)
            yield slice(first, last), [self.body(i) for i in range(first, last)]
            first = last


def tf_idf(documents: Documents, size: int, seed: int, advance: Advance) -> np.ndarray:
    """float32 [N, size]: TF-IDF of token ids, projected to vectors of length 1 or 0.

    For a document d, a token t, and N documents, df(t) of which have t:

        weight(d, t) = (1 + ln count(d, t)) * ln((1 + N) / df(t))

    The second factor is never 0 for a token that occurs, so equal documents have cosine 1 even if
    all documents are equal. A token that occurs everywhere has only a weight of about 1/N. The
    projection by random signs (Achlioptas, "Database-friendly random projections", 2003) preserves
    cosines up to about 1/sqrt(size).

    `advance` receives the tokens that were read, twice each.
    """
    sparse = import_optional("scipy.sparse", "TF-IDF")
    width = documents.largest_id + 1

    def counts() -> Iterator[tuple[slice, Any]]:
        for where, bodies in documents.spans(_SPAN):
            ends = np.cumsum([0, *map(len, bodies)])
            ids = np.concatenate([np.zeros(0, np.int32), *bodies]).astype(np.int32)
            ones = np.ones(len(ids), np.float32)
            found = sparse.csr_matrix((ones, ids, ends), shape=(len(bodies), width))
            found.sum_duplicates()
            yield where, found
            advance(int(documents.lengths[where].sum()))

    holding_V = sum(found.getnnz(axis=0) for _, found in counts())
    idf_V = np.log((1 + len(documents)) / np.maximum(holding_V, 1)).astype(np.float32)
    signs = np.random.default_rng(seed).integers(0, 2, (width, size), dtype=np.int8)
    signs_VD = 2 * signs.astype(np.float32) - 1
    vectors_ND = np.empty((len(documents), size), dtype=np.float32)
    for where, found in counts():
        found.data = (1 + np.log(found.data)) * idf_V[found.indices]
        vectors_ND[where] = _normalized(found @ signs_VD)
    return vectors_ND


def _normalized(rows: np.ndarray) -> np.ndarray:
    """float32, each row divided by its length; zero rows stay zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), dtype=np.float32)


@torch.inference_mode()
def encoded(name: str, tokenizer: Tokenizer, documents: Documents, advance: Advance) -> np.ndarray:
    """float32 [N, D]: the mean over a document's tokens of an encoder's last hidden state, as in
    Contriever, of length 1; 0 for a document without text.

    Only the beginning of a document is read, as far as the encoder's limit, at most 512 tokens.

    Args:
        name: of the encoder: a folder, or a name on the hub. It runs on a GPU if torch finds one.
        tokenizer: the tokenizer that wrote the documents.
        documents: to be encoded.
        advance: receives tokens.

    Raises:
        InputError: transformers is not installed, or cannot open an encoder of that name without
            executing code that comes with it.
    """
    library = import_optional("transformers", f"--encoder {name}")
    hush_transformers()
    only_here = Path(name).exists() or ask_hub(name, "config.json") is not None
    safely = {"trust_remote_code": False, "local_files_only": only_here}
    try:
        to_ids = library.AutoTokenizer.from_pretrained(name, **safely)
        model = library.AutoModel.from_pretrained(name, weights_only=True, **safely)
    except Exception as error:  # a download can fail with many kinds of errors
        raise InputError(
            f"--encoder {name} is not an encoder that transformers can open without running "
            f"code of its own ({first_line(error)}); give its folder or its name on the hub"
        ) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.float().to(device).eval()
    places = getattr(model.config, "max_position_embeddings", _MOST_TOKENS)
    limit = min(_MOST_TOKENS, places, to_ids.model_max_length)
    vectors_ND = np.empty((len(documents), model.config.hidden_size), dtype=np.float32)
    for where, bodies in documents.spans(_ENCODED):
        texts = [tokenizer.detokenize(body[: _TOKENS_EACH * limit].tolist()) for body in bodies]
        inputs = to_ids(
            texts, padding=True, truncation=True, max_length=limit, return_tensors="pt"
        ).to(device)
        hidden_BSD = model(**inputs).last_hidden_state
        mask_BS1 = inputs["attention_mask"].unsqueeze(-1).to(hidden_BSD.dtype)
        mean_BD = (hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1).clamp(min=1)
        # For a document without text, only the encoder's special tokens would be embedded.
        mean_BD[[len(body) == 0 for body in bodies]] = 0
        vectors_ND[where] = _normalized(mean_BD.cpu().numpy())
        advance(int(documents.lengths[where].sum()))
    return vectors_ND


def faiss() -> Any:
    """The FAISS library. Raises InputError if it is not installed."""
    return import_optional("faiss", "the search for similar documents")


def build_index(vectors_ND: np.ndarray, probes: int | None, seed: int) -> Any:
    """An index of FAISS of the vectors, by inner product.

    `probes` None: it compares every pair, so time grows with the square of the corpus. Otherwise
    k-means, which depends on `seed`, divides the vectors into cells, and a query searches `probes`
    of them.
    """
    library, (count, width) = faiss(), vectors_ND.shape
    cells = max(1, min(round(4 * math.sqrt(count)), count // _SAMPLE_PER_CELL))
    kind = "Flat" if probes is None else f"IVF{cells},Flat"
    index = library.index_factory(width, kind, library.METRIC_INNER_PRODUCT)
    if probes is not None:
        index.cp.seed = seed
        index.cp.max_points_per_centroid = _SAMPLE_PER_CELL
        index.cp.min_points_per_centroid = 1  # else it warns about a corpus of a few documents
        index.nprobe = probes
        index.train(vectors_ND)
    index.add(vectors_ND)
    return index


def find_neighbors(
    vectors_ND: np.ndarray, index: Any, k: int, advance: Advance = lambda queries: None
) -> tuple[np.ndarray, np.ndarray]:
    """The K documents most similar to each, most similar first, without itself.

    Only documents of positive cosine are neighbors: others have nothing in common. Of equal cosines
    the lower number comes first.

    Args:
        vectors_ND: float32, of length 1 or 0.
        index: build_index of them.
        k: K.
        advance: receives numbers of queries.

    Returns:
        int64 [N, K], numbers of documents, -1 if there are fewer than K; float32 [N, K], their
        cosines, 0 if there is no neighbor.
    """
    neighbors_NK = np.empty((len(vectors_ND), k), dtype=np.int64)
    cosines_NK = np.empty((len(vectors_ND), k), dtype=np.float32)
    for first in range(0, len(vectors_ND), _QUERIES):
        chunk = slice(first, first + _QUERIES)
        # One more than K, because a document finds itself.
        cosines, found = index.search(vectors_ND[chunk], k + 1)
        itself = found == np.arange(first, first + len(found))[:, None]
        usable = (found >= 0) & (cosines > 0) & ~itself
        cosines, found = np.where(usable, cosines, 0), np.where(usable, found, -1)
        best = np.lexsort((found, -cosines), axis=1)[:, :k]
        neighbors_NK[chunk] = np.take_along_axis(found, best, axis=1)
        cosines_NK[chunk] = np.take_along_axis(cosines, best, axis=1)
        advance(len(found))
    return neighbors_NK, cosines_NK


def found_share(
    vectors_ND: np.ndarray,
    neighbors_NK: np.ndarray,
    cosines_NK: np.ndarray,
    seed: int,
    sample: int = 100,
) -> float:
    """The share of the true K nearest that was found, for `sample` documents compared with all.

    A document as similar as the true K-th counts as found, because equal ones are interchangeable.
    """
    count, k = neighbors_NK.shape
    asked = np.random.default_rng(seed).permutation(count)[:sample]
    found = total = 0
    for document in asked.tolist():
        cosines = vectors_ND @ vectors_ND[document]
        cosines[document] = 0
        nearest = np.sort(cosines[cosines > 0])[-k:]
        kept = neighbors_NK[document] >= 0
        if len(nearest):
            found += int((kept & (cosines_NK[document] >= nearest[0] - _ROUNDING)).sum())
            total += len(nearest)
    return found / max(1, total)


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
    return np.array(order, dtype=np.int64), begun - 1


def lonely_first(neighbors_NK: np.ndarray, seed: int) -> np.ndarray:
    """int64 [N]: documents by how many have them as a neighbor, fewest first; ties at random.

    Shi et al. start with a document of the smallest degree, because it is the most likely to be
    left over. Their degree counts the remaining documents, ours counts all.
    """
    count = len(neighbors_NK)
    named = np.bincount(neighbors_NK[neighbors_NK >= 0], minlength=count)
    shuffled = np.random.default_rng(seed).permutation(count)
    return shuffled[np.argsort(named[shuffled], kind="stable")]


def drop_near_duplicates(order: np.ndarray, vectors_ND: np.ndarray, threshold: float) -> np.ndarray:
    """Leave out each document whose cosine with the last kept one reaches the threshold.

    Returns:
        int64 [<= N]: the kept documents, in the same order. No two adjacent documents are then
        near duplicates.
    """
    kept: list[int] = []
    last = np.zeros(vectors_ND.shape[1], dtype=np.float32)
    for document in order.tolist():
        if float(last @ vectors_ND[document]) < threshold:
            kept.append(document)
            last = vectors_ND[document]
    return np.array(kept, dtype=np.int64)


def adjacent_cosine(order: np.ndarray, vectors_ND: np.ndarray, pairs: int = 10_000) -> float:
    """The mean cosine of adjacent documents, over at most `pairs` evenly spread pairs.

    NaN for fewer than two documents.
    """
    count = len(order) - 1
    if count < 1:
        return math.nan
    left = np.linspace(0, count - 1, min(count, pairs)).astype(np.int64)
    a, b = vectors_ND[order[left]], vectors_ND[order[left + 1]]
    return float(np.einsum("nd,nd->", a, b, dtype=np.float64)) / len(left)


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

    def shuffled(self, seed: int, advance: Advance = lambda tokens: None) -> Iterator[list[int]]:
        """Every piece once, in random order; `advance` receives the tokens of each."""
        pieces = -(-self._tokens // self._piece)
        for piece in np.random.default_rng(seed).permutation(pieces).tolist():
            start = piece * self._piece
            end = min(start + self._piece, self._tokens)
            first = int(np.searchsorted(self._ends, start, side="right"))
            last = int(np.searchsorted(self._ends, end, side="left"))
            joined = [self._documents[i] for i in self._order[first : last + 1].tolist()]
            skipped = start - (int(self._ends[first - 1]) if first else 0)
            yield np.concatenate(joined)[skipped : skipped + end - start].tolist()
            advance(end - start)
