"""The encoder: pooling and limits with a stand-in for transformers, loading with the real one."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_parallel.data.similarity.encoder import HuggingFaceEncoder
from moe_parallel.data.tokenizer import NullTokenizer
from moe_parallel.errors import InputError
from tests.data.hostile import Payload, hostile_folder

WIDTH = 5
TABLE = torch.from_numpy(np.random.default_rng(0).normal(size=(40, WIDTH)))
CLS, PAD = 38, 39


class Inputs(dict[str, torch.Tensor]):
    """The return value of a tokenizer of transformers."""

    def to(self, device: torch.device) -> "Inputs":
        return self


class Words:
    """A tokenizer: a special token, then the numbers in the text."""

    model_max_length = 10**30  # the value in transformers if no limit was set

    def __call__(self, texts: list[str], *, max_length: int, **how: Any) -> Inputs:
        assert how == {"padding": True, "truncation": True, "return_tensors": "pt"}
        ids = [[CLS, *map(int, text.split())][:max_length] for text in texts]
        width = max(map(len, ids))
        filled = [each + [PAD] * (width - len(each)) for each in ids]
        mask = [[1] * len(each) + [0] * (width - len(each)) for each in ids]
        return Inputs(input_ids=torch.tensor(filled), attention_mask=torch.tensor(mask))


class Lookup(torch.nn.Module):
    """An encoder that is a lookup table."""

    config = SimpleNamespace(hidden_size=WIDTH, max_position_embeddings=6)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=TABLE[input_ids].float())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda name, **how: Words()),
        AutoModel=SimpleNamespace(from_pretrained=lambda name, **how: Lookup()),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setattr("moe_parallel.data.similarity.encoder.ask_hub", lambda name, file: None)


def test_the_mean_over_tokens_without_the_filling(stand_in: None) -> None:
    encoder = HuggingFaceEncoder("any", NullTokenizer(30), batch_size=4)
    bodies = [[3, 1], [4, 1, 5, 9, 2, 6, 5], [], [7]]
    found = encoder.embed([np.array(body, dtype=np.int32) for body in bodies])
    assert (encoder.size, found.shape, found.dtype) == (WIDTH, (4, WIDTH), np.float32)
    for body, vector in zip(bodies, found, strict=True):
        if not body:
            assert (vector == 0).all()
            continue
        read = [CLS, *body][:6]  # up to the number of positions of the encoder
        mean = sum(TABLE[i].numpy() for i in read) / len(read)
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)


def test_no_such_encoder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **how: object) -> None:
        raise OSError(f"{name} is not a folder\nand much more")

    library = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=fail))
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setattr("moe_parallel.data.similarity.encoder.ask_hub", lambda name, file: None)
    expected = (
        r"^--encoder no/such is not an encoder .*\(no/such is not a folder\); give its folder"
    )
    with pytest.raises(InputError, match=expected) as told:
        HuggingFaceEncoder("no/such", NullTokenizer(9))
    assert "\n" not in str(told.value)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"--encoder x needs .*: pip install transformers$"):
        HuggingFaceEncoder("x", NullTokenizer(9))


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers, an optional library, is not installed"
    )
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(30))]
    (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
    to_ids = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    to_ids.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    model.save_pretrained(tmp_path)
    encoder = HuggingFaceEncoder(str(tmp_path), NullTokenizer(30))
    bodies = [np.array([3, 1, 4]), np.array([1, 5, 9, 2, 6, 5])]
    found = encoder.embed(bodies)
    for body, vector in zip(bodies, found, strict=True):  # one at a time, so nothing is padded
        ids = torch.tensor([[2, *(5 + int(i) for i in body), 3]])
        with torch.no_grad():
            mean = model(input_ids=ids).last_hidden_state[0].mean(0).numpy()
        assert vector == pytest.approx(mean / np.linalg.norm(mean), abs=1e-5)


def test_code_in_a_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers, an optional library, is missing")
    monkeypatch.setattr("builtins.input", lambda *of: pytest.fail("asked"))
    folder = hostile_folder(tmp_path)
    with pytest.raises(InputError, match=r"without running code of its own \(.*\); give") as told:
        HuggingFaceEncoder(str(folder), NullTokenizer(9))
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()


def test_a_pickle_in_the_place_of_weights_is_not_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers, an optional library, is not installed"
    )
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    transformers.BertConfig(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    torch.save({"weights": Payload(tmp_path / "marker")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="--encoder .* is not an encoder") as told:
        HuggingFaceEncoder(str(tmp_path), NullTokenizer(9))
    assert "\n" not in str(told.value) and not (tmp_path / "marker").exists()
