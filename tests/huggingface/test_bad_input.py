"""A folder that cannot be imported: one line, and nothing under the final name."""

import errno
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_parallel.data.tokenizer import CONFIG_FILE
from moe_parallel.errors import InputError
from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.training.checkpoint.tensors import _WatchedStream
from tests.huggingface.models import save_with_text, text_tokenizer
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


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


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


def _of_integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NORM] = tensors[NORM].long()


def _twice(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    _index(**{NORM: "other.safetensors", EXPERT: "model.safetensors"})(folder)


def _an_endless_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "config.json: there is no such file: name a folder that"),
    "no config.json": (_remove("config.json"), "config.json: there is no such file"),
    "config.json cut": (_write("config.json", b'{"model_'), "config.json is damaged .not JSON"),
    "config.json a list": (_write("config.json", b"[]"), "config.json is not a configuration"),
    "config.json deep": (
        _write("config.json", b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}"), "nested too deeply"
    ),
    "a number of 400 digits": (
        _change_json("config.json", rope_theta=10**400), "is damaged .a number is not finite"
    ),
    "endless layers": (
        _change_json("config.json", num_hidden_layers=10**9), "it must be at most 10000"
    ),
    "endless experts": (
        _change_json("config.json", num_local_experts=10**9), "gate.weight is .*, and by config"
    ),
    "another family": (_change_json("config.json", model_type="gpt2"), "model_type is gpt2: it"),
    "another number of layers": (
        _change_json("config.json", num_hidden_layers=3),
        "model.layers.2.input_layernorm.weight is missing, which the model of its config.json has",
    ),
    "fewer layers": (
        _change_json("config.json", num_hidden_layers=1),
        "model.layers.1.block_sparse_moe.experts.0.w1.weight is a tensor that the model of its",
    ),
    "another width": (
        _change_json("config.json", intermediate_size=50),
        r"experts.0.w1.weight is \[48, 32\], and by config.json it is \[50, 32\]",
    ),
    "a missing tensor": (
        _change_tensors(lambda tensors: tensors.pop(EXPERT)), f"{EXPERT} is missing, which"
    ),
    "an extra tensor": (
        _change_tensors(lambda tensors: tensors.update({"score.weight": torch.ones(2)})),
        "score.weight is a tensor that the model of its config.json does not have",
    ),
    "integers": (_change_tensors(_of_integers), f"{NORM} is of type I64: only F32, BF16 and F16"),
    "a cut file": (_cut, "model.safetensors is incomplete or not a file of safetensors"),
    "a header without end": (_an_endless_header, "model.safetensors is incomplete or not a file"),
    "pickles": (_pickles, "its weights are pickles, which may run code and are not read"),
    "no weights": (_remove("model.safetensors"), "it has neither model.safetensors nor model.saf"),
    "an index of nothing": (_index(), "index.json is damaged .it has no weight_map"),
    "an index of a missing file": (_index(a="b.safetensors"), "b.safetensors is missing, which"),
    "an index of another folder": (
        _index(a="../theirs/model.safetensors"), "names the file .*: it must be one next to it"
    ),
    "an index of a missing tensor": (
        _index(a="model.safetensors"), "model.safetensors has no a, which model.safetensors.index"
    ),
    "a tensor twice": (_twice, "both model.safetensors and other.safetensors have lm_head.weight"),
    "code of its own": (
        _change_json("config.json", auto_map={"AutoModel": "modeling.M"}),
        "has code of its own .auto_map., which is not run here: .* add --trust-remote-code",
    ),
    "no tokenizer": (_remove("tokenizer.json"), "it has no tokenizer: name one by"),
    "a damaged tokenizer": (_write("tokenizer.json", b"{}"), "is not a tokenizer.json"),
    "a chat template that is a number": (
        _change_json(CONFIG_FILE, chat_template=7), "chat_template is 7: it must be a text"
    ),
    "a token that is a list": (
        _change_json(CONFIG_FILE, pad_token=["a"]), "pad_token is .'a'.: it must be a token"
    ),
    "a damaged configuration of generation": (
        _write("generation_config.json", b'{"eos'), "generation_config.json is damaged .not JSON"
    ),
    "a beginning that is a text": (
        _change_json("generation_config.json", bos_token_id="a"), "bos_token_id is 'a': it must be"
    ),
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
        ([], "--input is not set"),
        (["--input", "x"], "--output is not set"),
        (["--input", "x", "--output", "y"], "x/config.json: there is no such file"),
        (["--input", "GOOD", "--output", "GOOD"], "--output .* exists already: name a new folder"),
        (
            ["--input", "GOOD", "--output", "y", "--hidden-size", "64"],
            "--hidden-size is 64, but",
        ),
        (["--input", "GOOD", "--output", "y", "--num-expert", "4"], "did you mean --num-experts"),
        (["--input", "GOOD", "--output", "y", "--expert-selection", "aoe"], "tools/convert.py"),
        (["--input", "GOOD", "--output", "y", "--vocab-size", "999"], "--vocab-size is 999, but"),
        (["--input", "GOOD", "--output", "y", "--save", "x"], "--save is for training: --input"),
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


def test_another_tokenizer(good: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    text_tokenizer().save(other)
    same = plan_import(good, ["--tokenizer-model", str(other)])
    assert same.tokenizer.fingerprint == text_tokenizer().fingerprint
    _change_json(CONFIG_FILE, eos_token="e")(other)
    with pytest.raises(InputError, match="differs from the tokenizer of --input"):
        plan_import(good, ["--tokenizer-model", str(other)])


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


def test_a_disk_without_room_is_refused_at_once(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    with pytest.raises(InputError, match=r"weights take 0\.[1-9] MiB, and 0\.0 MiB of the"):
        import_folder(plan_import(good, []), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


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
