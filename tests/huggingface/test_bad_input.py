"""A folder that cannot be imported: one line, and nothing under the final name."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_parallel.errors import InputError
from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.training.checkpoint.tensors import _WatchedStream
from tests.huggingface.models import save_with_text
from tools.import_hf import main

NORM = "model.norm.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be imported."""
    return save_with_text("mixtral", tmp_path_factory.mktemp("good") / "theirs").folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "theirs"))


def _change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def _change_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / name
        values = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(values | changes))

    return damage


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _another_end(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    _change_json("config.json", eos_token_id=[5, 3])(folder)


def _another_end_of_words(folder: Path) -> None:
    _change_json("generation_config.json", eos_token_id=[0, 3])(folder)
    _change_json("config.json", eos_token_id=3)(folder)


def _cut(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 20_000)


def _pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _index(**files: str) -> Callable[[Path], None]:
    return _change_json("model.safetensors.index.json", weight_map=files)


def _twice(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    _index(**{NORM: "other.safetensors", EXPERT: "model.safetensors"})(folder)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "config.json: there is no such file: name a folder that"),
    "endless layers": (
        _change_json("config.json", num_hidden_layers=10**9), "it must be at most 10000"
    ),
    "a missing tensor": (
        _change_tensors(lambda tensors: tensors.pop(EXPERT)), f"{EXPERT} is missing, which"
    ),
    "an extra tensor": (
        _change_tensors(lambda tensors: tensors.update({"score.weight": torch.ones(2)})),
        "score.weight is a tensor that the model of its config.json does not have",
    ),
    "a cut file": (_cut, "model.safetensors is incomplete or not a file of safetensors"),
    "pickles": (_pickles, "its weights are pickles, which may run code and are not read"),
    "an index of another folder": (
        _index(a="../theirs/model.safetensors"), "names the file .*: it must be one next to it"
    ),
    "a tensor twice": (_twice, "both model.safetensors and other.safetensors have lm_head.weight"),
    "code of its own": (
        _change_json("config.json", auto_map={"AutoModel": "modeling.M"}),
        "has code of its own .auto_map., which is not run here: .* add --trust-remote-code",
    ),
    "no tokenizer": (_remove("tokenizer.json"), "it has no tokenizer: name one by"),
    "a larger tokenizer": (
        _change_json("config.json", vocab_size=100), "the tokenizer has .* tokens, and the model"
    ),
    "another end of text": (
        _another_end,
        "ends a text with token 0, and eos_token_id of config.json is 3, 5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    output = tmp_path / "runs" / "new"
    assert main(["--input", str(folder), "--output", str(output)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("import_hf.py: ") and said.count("\n") == 1
    with pytest.raises(InputError, match=message):
        raise InputError(said)
    assert not output.parent.exists()


def test_the_good_folder_is_good(good: Path, tmp_path: Path, capsys: Any) -> None:
    """Otherwise each test here would pass for another reason."""
    assert main(["--input", str(good), "--output", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "family: MixtralForCausalLM" in printed and "tensors of float32" in printed
    for name, damage in {
        "end of generation": _another_end_of_words,
        "code": _change_json("config.json", auto_map={"AutoModel": "modeling.M"}),
        "tensor of old versions": _change_tensors(
            lambda tensors: tensors.update(
                {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
            )
        ),
    }.items():
        folder = Path(shutil.copytree(good, tmp_path / name))
        damage(folder)
        plan = plan_import(folder, [], trust_remote_code=True)
        import_folder(plan, tmp_path / f"run of {name}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "GOOD", "--output", "GOOD"], "--output .* already exists: name a new folder"),
        (["--input", "GOOD", "--output", "y", "--hidden-size", "64"], "--hidden-size is 64, but"),
        (["--input", "GOOD", "--output", "y", "--config", "x"], "--config names a file, but"),
        (["--input", "GOOD", "--output", "y", "--tokenizer-type", "NullTokenizer"], "differs from"),
    ],
)
def test_wrong_flags(
    flags: list[str], message: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(good) if word == "GOOD" else word for word in flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    with pytest.raises(InputError, match=message):
        raise InputError(said)
    assert not Path("y").exists()


def test_weights_that_are_not_finite(folder: Path, tmp_path: Path, capsys: Any) -> None:
    _change_tensors(lambda tensors: tensors[EXPERT][3].fill_(torch.nan))(folder)
    assert main(["--input", str(folder), "--output", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == f"warning: {EXPERT} has a NaN or an infinity, as in --input\n"


@pytest.mark.parametrize("room", [0, 30_000])
def test_a_full_disk(
    room: int, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, left = _WatchedStream._put, room

    def limited(self: _WatchedStream, data: bytes) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return put(self, data)

    monkeypatch.setattr(_WatchedStream, "_put", limited)
    output = tmp_path / "runs" / "new"
    with pytest.raises(InputError, match="--output .* cannot be written .No space left on device"):
        import_folder(plan_import(good, []), output)
    assert list(output.parent.iterdir()) == []


def test_a_tied_output_layer_may_be_written_too(tmp_path: Path) -> None:
    folder = save_with_text("llama", tmp_path / "theirs").folder
    embedding = "model.embed_tokens.weight"
    _change_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))(
        folder
    )
    import_folder(plan_import(folder, []), tmp_path / "run")
    _change_tensors(lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + 1}))(
        folder
    )
    with pytest.raises(InputError, match="lm_head.weight is a tensor that the model of its"):
        import_folder(plan_import(folder, []), tmp_path / "another")
    assert not (tmp_path / "another").exists()
