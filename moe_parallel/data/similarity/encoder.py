"""Vectors from a Hugging Face text encoder, such as the paper's facebook/contriever."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from moe_parallel.data.similarity.embedding import Embedder, normalized
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.data.tokenizer_files import ask_hub, first_line, hush_transformers
from moe_parallel.errors import InputError
from moe_parallel.optional import import_optional

# Tokens that an encoder reads if its tokenizer does not specify it; this is Contriever's limit.
_ENCODER_TOKENS = 512

# Our tokens that are converted to text per token that the encoder reads: enough for a tokenizer
# with long tokens, but not a complete book for its first page.
_TOKENS_EACH = 4


class HuggingFaceEncoder(Embedder):
    """The mean over a document's tokens of the encoder's last hidden state, as in Contriever.

    Only the beginning of a document is read, as far as the encoder's limit (512 tokens).
    """

    passes = 1

    def __init__(self, name: str, tokenizer: Tokenizer, batch_size: int = 32) -> None:
        """Open the encoder, on a GPU if torch finds one.

        Args:
            name: a folder, or a name on the hub.
            tokenizer: the tokenizer that wrote the documents.
            batch_size: documents encoded at a time.

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
        self.batch = batch_size
        places = getattr(model.config, "max_position_embeddings", _ENCODER_TOKENS)
        self._limit = min(_ENCODER_TOKENS, places, self._to_ids.model_max_length)
        self.size = int(model.config.hidden_size)
        self.description = f"encoder {name} of {tokenizer.fingerprint}"

    def embed(self, bodies: Sequence[np.ndarray]) -> np.ndarray:
        beginnings = (body[: _TOKENS_EACH * self._limit].tolist() for body in bodies)
        vectors_BD = self._encode([self._tokenizer.detokenize(ids) for ids in beginnings])
        # For a document without text, only the encoder's special tokens would be embedded.
        vectors_BD[[len(body) == 0 for body in bodies]] = 0
        return normalized(vectors_BD)

    @torch.inference_mode()
    def _encode(self, texts: list[str]) -> np.ndarray:
        """float32 [B, D], not normalized."""
        inputs = self._to_ids(
            texts, padding=True, truncation=True, max_length=self._limit, return_tensors="pt"
        ).to(self._device)
        hidden_BSD = self._model(**inputs).last_hidden_state
        mask_BS1 = inputs["attention_mask"].unsqueeze(-1).to(hidden_BSD.dtype)
        mean_BD = (hidden_BSD * mask_BS1).sum(1) / mask_BS1.sum(1).clamp(min=1)
        return mean_BD.cpu().numpy()
