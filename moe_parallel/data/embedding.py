"""Documents of token ids, and vectors whose inner products are the documents' cosines.

The rows of every array are documents, in the order of the file, unless its name says otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from moe_parallel.data.indexed import ANY_VOCABULARY, check_indexed, read_manifest, type_of_ids
from moe_parallel.data.tokenizer import Tokenizer, ask_hub, hush_transformers
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional
from moe_parallel.reading import first_line

# Tokens that are processed at a time.
_SPAN_TOKENS = 2**20


class Documents:
    """The documents of PREFIX.bin, read from the disk when they are requested.

    A document is what Megatron's GPTDataset shuffles: one sequence of the index. Each ends with
    the token `eod`. A document that lacks it in the file gets it here, so that two adjacent
    documents stay separate.

    Attributes:
        eod: id of the token that ends a document.
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
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        last = self._ids[self._ends[lengths > 0] - 1]
        if eod is None and (different := len(np.unique(last))) != 1:
            raise InputError(
                f"--data-path {prefix}: its documents end with {different} different tokens, so "
                "the end-of-document token is unknown; give it with --eod-id"
            )
        self.eod = int(last[0]) if eod is None else eod
        ended = np.zeros(len(lengths), dtype=bool)
        ended[lengths > 0] = last == self.eod
        self._body_ends = self._ends - ended
        self.lengths = self._body_ends - self._starts + 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        """int64 [lengths[i]]: the ids of document i, ended by `eod`."""
        return np.append(self.body(i).astype(np.int64), self.eod)

    def body(self, i: int) -> np.ndarray:
        """The ids of document i without the `eod` at its end, in the file's own integer type."""
        return self._ids[self._starts[i] : self._body_ends[i]]

    @property
    def largest_id(self) -> int:
        """The largest id in the file, or `eod`."""
        pieces = range(0, len(self._ids), _SPAN_TOKENS)
        return max(self.eod, *(int(self._ids[i : i + _SPAN_TOKENS].max()) for i in pieces))

    def spans(self, most: int) -> Iterator[tuple[slice, list[np.ndarray]]]:
        """Places and bodies of at most `most` documents, of a million tokens (or one longer)."""
        first = 0
        while first < len(self):
            reach = np.searchsorted(self._ends, self._starts[first] + _SPAN_TOKENS, side="right")
            last = min(max(int(reach), first + 1), first + most)
            yield slice(first, last), [self.body(i) for i in range(first, last)]
            first = last


class HashedTfIdf:
    """TF-IDF of hashed n-grams of token ids, projected to a dense vector, without trained weights.

    For a document d, an n-gram g of 1 to `orders` tokens, and N documents, df(g) of which have g:

        weight(d, g) = (1 + ln count(d, g)) * ln((1 + N) / df(g))

    The second factor is never 0 for an n-gram that occurs, so equal documents have cosine 1 even if
    all documents are equal. An n-gram that occurs everywhere has only a weight of about 1/N.
    N-grams are counted by a hash in `buckets` places. A sparse random projection (Kane and Nelson,
    "Sparser Johnson-Lindenstrauss Transforms", 2014) then adds each weight, with a random sign, to
    8 of `size` numbers. It preserves inner products up to about 1/sqrt(size).

    An n-gram that only one document contains adds nothing to any inner product with another
    document. Yet most n-grams of two or more tokens are such, and would cause most of the
    projection's error. So they count in a document's length but are not projected: vectors are
    shorter than 1 by the part that only they contain, and the inner product of two documents is
    their cosine.
    """

    #: How often it reads the corpus.
    passes = 2
    #: The most documents that it embeds at a time.
    batch = 4096
    _COPIES = 8

    def __init__(self, size: int, orders: int = 1, seed: int = 0, buckets: int = 2**20) -> None:
        """
        Args:
            size: D, width of the vectors.
            orders: longest n-gram, in tokens.
            seed: of the projection.
            buckets: number of places to which n-grams are hashed, a power of two.
        """
        assert buckets & (buckets - 1) == 0, buckets
        self.size, self.orders, self.seed, self.buckets = size, orders, seed, buckets
        #: Everything that the vectors depend on besides the documents.
        self.description = f"tf-idf size={size} orders={orders} seed={seed} buckets={buckets}"

    def embed(
        self, documents: Documents, out_ND: np.ndarray, advance: Callable[[int], object]
    ) -> None:
        """Write each document's vector to its row; `advance` receives tokens, each pass."""
        held = np.zeros(self.buckets, dtype=np.int64)  # documents that contain an n-gram
        for where, bodies in documents.spans(self.batch):
            held += np.bincount(self._counts(bodies)[1], minlength=self.buckets)
            advance(int(documents.lengths[where].sum()))
        idf = np.log((1 + len(documents)) / np.maximum(held, 1))
        for where, bodies in documents.spans(self.batch):
            rows, columns, counts = self._counts(bodies)
            weights = (1 + np.log(counts)) * idf[columns]
            shared = held[columns] > 1
            whole, part = (
                np.sqrt(np.bincount(rows[chosen], weights[chosen] ** 2, len(bodies)))
                for chosen in (slice(None), shared)
            )
            dense = self._projected(rows[shared], columns[shared], weights[shared], len(bodies))
            share = (part / np.maximum(whole, 1e-30)).astype(np.float32)
            out_ND[where] = _normalized(dense) * share[:, None]
            advance(int(documents.lengths[where].sum()))

    def _projected(
        self, rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, count: int
    ) -> np.ndarray:
        """float64 [count, D]."""
        dense = np.zeros(count * self.size)
        for copy in range(self._COPIES):
            # A different hash of the column for each copy; its top bit is the sign.
            salt = _mix(np.array([self.seed * self._COPIES + copy]))
            hashed = _mix(columns.astype(np.uint64) ^ salt)
            places = rows * self.size + (hashed % np.uint64(self.size)).astype(np.int64)
            signs = np.where(hashed >> np.uint64(63), -1.0, 1.0)
            dense += np.bincount(places, weights=weights * signs, minlength=len(dense))
        return dense.reshape(count, self.size)

    def _counts(self, bodies: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [M]: document, bucket and number of each n-gram, none across two documents."""
        row = np.repeat(np.arange(len(bodies)), [len(body) for body in bodies])
        ids = np.concatenate([np.zeros(0, np.uint64), *(body.astype(np.uint64) for body in bodies)])
        grams = _mix(ids + np.uint64(1))
        rows_of, grams_of = [row], [grams]
        for n in range(1, self.orders):
            # Hash the hash of n tokens with the next id: a sum of two hashes would lose the order.
            grams = _mix(grams[:-1] + ids[n:])
            inside = row[:-n] == row[n:]
            rows_of.append(row[:-n][inside])
            grams_of.append(grams[inside])
        buckets = (np.concatenate(grams_of) & np.uint64(self.buckets - 1)).astype(np.int64)
        found, counts = np.unique(
            np.concatenate(rows_of) * self.buckets + buckets, return_counts=True
        )
        return found // self.buckets, found % self.buckets, counts


def _mix(x: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood's SplitMix64: a bijection of uint64 whose bits look independent."""
    x = x.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normalized(rows: np.ndarray) -> np.ndarray:
    """float32, each row divided by its length; zero rows stay zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1), dtype=np.float32)


class HuggingFaceEncoder:
    """The mean over a document's tokens of an encoder's last hidden state, as in Contriever.

    Only the beginning of a document is read, as far as the encoder's limit, at most 512 tokens.
    """

    passes = 1
    # Contriever's limit, for encoders whose tokenizer has none.
    _MOST_TOKENS = 512
    # Our tokens that are converted to text per token that the encoder reads: enough for a tokenizer
    # with long tokens, but not a complete book for its first page.
    _TOKENS_EACH = 4

    def __init__(self, name: str, tokenizer: Tokenizer, batch: int = 32) -> None:
        """Open the encoder, on a GPU if torch finds one.

        Args:
            name: a folder, or a name on the hub.
            tokenizer: the tokenizer that wrote the documents.
            batch: documents encoded at a time.

        Raises:
            InputError: transformers is not installed, or cannot open an encoder of that name
                without executing code that comes with it.
        """
        library = import_optional("transformers", f"--encoder {name}")
        hush_transformers()
        only_here = Path(name).exists() or ask_hub(name, "config.json") is not None
        safely = {"trust_remote_code": False, "local_files_only": only_here}
        try:
            self._to_ids = library.AutoTokenizer.from_pretrained(name, **safely)
            model = library.AutoModel.from_pretrained(name, weights_only=True, **safely)
        except Exception as error:  # a download can fail with many kinds of errors
            raise InputError(
                f"--encoder {name} is not an encoder that transformers can open without running "
                f"code of its own ({first_line(error)}); give its folder or its name on the hub"
            ) from None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.float().to(self._device).eval()
        self._tokenizer = tokenizer
        places = getattr(model.config, "max_position_embeddings", self._MOST_TOKENS)
        self._limit = min(self._MOST_TOKENS, places, self._to_ids.model_max_length)
        self._batch = batch
        self.size = int(model.config.hidden_size)
        self.description = f"encoder {name} of {tokenizer.fingerprint}"

    def embed(
        self, documents: Documents, out_ND: np.ndarray, advance: Callable[[int], object]
    ) -> None:
        """Write each document's vector to its row; `advance` receives tokens."""
        for where, bodies in documents.spans(self._batch):
            read = (body[: self._TOKENS_EACH * self._limit].tolist() for body in bodies)
            vectors_BD = self._encoded([self._tokenizer.detokenize(ids) for ids in read])
            # For a document without text, only the encoder's special tokens would be embedded.
            vectors_BD[[len(body) == 0 for body in bodies]] = 0
            out_ND[where] = _normalized(vectors_BD)
            advance(int(documents.lengths[where].sum()))

    @torch.inference_mode()
    def _encoded(self, texts: list[str]) -> np.ndarray:
        """float32 [B, D], not normalized."""
        inputs = self._to_ids(
            texts, padding=True, truncation=True, max_length=self._limit, return_tensors="pt"
        ).to(self._device)
        hidden_BSD = self._model(**inputs).last_hidden_state
        mask_BS1 = inputs["attention_mask"].unsqueeze(-1).to(hidden_BSD.dtype)
        mean_BD = (hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1).clamp(min=1)
        return mean_BD.cpu().numpy()
