"""A checkpoint that cannot be imported: one line, nothing that runs, and no run folder."""

import copy
import dataclasses
import os
import pickle
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from moe_parallel.errors import InputError
from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.megatron_checkpoint.export import export
from tests.huggingface.models import build, save
from tests.training.hostile import MARKER, Payload
from tools.megatron_checkpoint import main

FC1 = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
NORM = "decoder.final_layernorm.weight"
WITHOUT_TEXT = ["--tokenizer-type", "NullTokenizer"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be imported; the run that it came from is beside it."""
    folder = tmp_path_factory.mktemp("good")
    theirs = save(build("mixtral"), folder / "mixtral").folder
    import_folder(plan_import(theirs, WITHOUT_TEXT), folder / "run")
    export(str(folder / "run"), folder / "theirs")
    return folder / "theirs"


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(good, tmp_path / "theirs"))


def _in_checkpoint(damage: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: damage(folder / "release")


def _write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _link(name: str, to: str | None = None) -> Callable[[Path], object]:
    """In place of a file a link to `to`; None: to the file elsewhere."""

    def damage(folder: Path) -> None:
        elsewhere = folder.parent.parent / "elsewhere"
        (folder / name).rename(elsewhere)
        (folder / name).symlink_to(to or elsewhere)

    return damage


def _pipe(folder: Path) -> None:
    (folder / "__0_0.distcp").unlink()
    os.mkfifo(folder / "__0_0.distcp")


def _arguments(**changes: Any) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        common = torch.load(folder / "common.pt", weights_only=True)
        vars(common["args"]).update(changes)
        torch.save(common, folder / "common.pt")

    return damage


def _runs(what: str) -> Callable[[Path], object]:
    """Put a payload in a file."""

    def damage(folder: Path) -> None:
        payload = Payload(folder.parent.parent / MARKER)
        if what == ".metadata":
            (folder / what).write_bytes(pickle.dumps(payload))
        else:
            torch.save({"args": Namespace(num_layers=payload)}, folder / what)

    return damage


def _compress(folder: Path) -> None:
    with zipfile.ZipFile(folder / "common.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))


def _index(change: Callable[[Metadata], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        index = pickle.loads((folder / ".metadata").read_bytes())
        change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return damage


def _elsewhere(index: Metadata) -> None:
    place = MetadataIndex(NORM, torch.Size([0]))
    piece = index.storage_data[place]
    index.storage_data[place] = dataclasses.replace(piece, relative_path="../../secret")


def _huge(index: Metadata) -> None:
    entry = index.state_dict_metadata[NORM]
    entry.size = entry.chunks[0].sizes = torch.Size([2**50])


def _of_type(dtype: torch.dtype, index: Metadata) -> None:
    index.state_dict_metadata[NORM].properties.dtype = dtype


def _twice(index: Metadata) -> None:
    for number in range(100):
        _add(f"optimizer.{number}", index)


def _add(key: str, index: Metadata) -> None:
    index.state_dict_metadata[key] = copy.deepcopy(index.state_dict_metadata[NORM])
    places, start = index.storage_data, torch.Size([0])
    places[MetadataIndex(key, start)] = copy.deepcopy(places[MetadataIndex(NORM, start)])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "there is no such folder"),
    "no tracker": (_remove("latest_checkpointed_iteration.txt"), "theirs: it has no .metadata: na"),
    "another tracker": (
        _write("latest_checkpointed_iteration.txt", b"../../run"), "says '../../run' instead of an"
    ),
    "a lost checkpoint": (
        _write("latest_checkpointed_iteration.txt", b"7"), "iter_0000007: it has no .metadata"
    ),
} | {
    name: (_in_checkpoint(damage), message) for name, (damage, message) in {
        "an index that runs code": (_runs(".metadata"), "it names posix.mkdir, which is not part"),
        "an index of another folder": (_index(_elsewhere), "it names the file '../../secret'"),
        "an index that is cut": (_cut(".metadata"), ".metadata is not the index of a checkpoint"),
        "a link to an index": (_link(".metadata"), ".metadata is missing, or a link"),
        "a huge tensor": (_index(_huge), r"is \[1125899906842624\] of torch.float32, and has"),
        "integers": (_index(partial(_of_type, torch.int64)), "of torch.int64"),
        "FP8": (_index(partial(_of_type, torch.float8_e4m3fn)), "of torch.float8_e4m3fn"),
        "bytes that are used twice": (_index(_twice), ".metadata uses bytes of a file twice"),
        "one more tensor": (
            _index(lambda index: _add("embedding.position_embeddings.weight", index)),
            "embedding.position_embeddings.weight' is a tensor that the model of these sizes does",
        ),
        "a missing tensor": (
            _index(lambda index: index.state_dict_metadata.pop(FC1)),
            "decoder.layers.0.mlp.experts.experts.linear_fc1.weight is missing, which the model",
        ),
        "a cut file": (_cut("__0_0.distcp"), "__0_0.distcp has .* bytes instead of"),
        "a renamed file": (
            lambda folder: (folder / "__0_0.distcp").rename(folder / "__1_0.distcp"),
            "__0_0.distcp is missing, or a link",
        ),
        "a link to elsewhere": (_link("__0_0.distcp"), "__0_0.distcp is missing, or a link"),
        "a link to a device": (_link("__0_0.distcp", "/dev/zero"), "is missing, or a link"),
        "a pipe": (_pipe, "__0_0.distcp is missing, or a link"),
        "arguments that run code": (
            _runs("common.pt"), "common.pt is not what Megatron-LM saves, and was not run"
        ),
        "arguments that are cut": (_cut("common.pt"), "common.pt is not what Megatron-LM saves"),
        "arguments that are compressed": (_compress, "was not run .it is compressed."),
        "a link to arguments": (_link("common.pt", "/dev/zero"), "common.pt is missing, or a link"),
        "no arguments": (
            _remove("common.pt"), r"embeddings.weight is \[96, 32\], and by the model's sizes it is"
        ),
        "LayerNorm": (_arguments(normalization="LayerNorm"), "normalization is 'LayerNorm': only"),
        "learned positions": (
            _arguments(position_embedding_type="learned_absolute"), "type is 'learned_absolute': on"
        ),
        "biases": (_arguments(add_bias_linear=True), "add_bias_linear is True: biases of linear"),
        "GELU": (_arguments(swiglu=False), "swiglu is False: only SwiGLU is known"),
        "latent attention": (_arguments(multi_latent_attention=True), "multi_latent_attention is"),
        "sinkhorn": (
            _arguments(moe_router_load_balancing_type=["aux_loss", "sinkhorn"]), "it must be of aux"
        ),
        "an object": (_arguments(softmax_scale=torch.Size([1])), "softmax_scale is an object"),
        "a tensor": (_arguments(rotary_percent=torch.ones(2)), "rotary_percent is an object"),
        "one expert per token": (_arguments(moe_router_topk=1), "moe_router_topk is 1 and its"),
        "another width": (
            _arguments(hidden_size=40), r"embeddings.weight is \[96, 32\], and by the model's sizes"
        ),
        "fewer layers": (_arguments(num_layers=1), r"\[2, .* and the model has 1 layers: the tens"),
        "no heads": (_arguments(num_attention_heads=None), "it has no num_attention_heads: take"),
        "endless layers": (_arguments(num_layers=10**9), "num_layers is 1000000000: it must"),
        "endless experts": (_arguments(num_experts=10**9), "mlp.router.weight is .*, and by"),
        "a number that is a text": (_arguments(num_layers="two"), "num_layers is 'two': it must"),
    }.items()
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    output = tmp_path / "runs" / "new"
    words = ["import", "--input", str(folder), "--output", str(output), *WITHOUT_TEXT]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("megatron_checkpoint.py: ") and said.count("\n") == 1, said
    with pytest.raises(InputError, match=message):
        raise InputError(said)
    assert not output.parent.exists() and not (tmp_path / MARKER).exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["import"], "--input is not set"),
        (["import", "--input", "x"], "--output is not set"),
        (["import", "--input", "GOOD", "--output", "RUN", *WITHOUT_TEXT], ": name a new folder"),
        (["import", "--input", "RUN", "--output", "y"], "it is a checkpoint of this program: --lo"),
        (["import", "--input", "GOOD", "--output", "y"], "it has no tokenizer: name one by"),
        (["import", "--input", "GOOD", "--output", "y", "--hidden-size", "64"], "is 64, but 32 in"),
        (["import", "--input", "GOOD", "--output", "y", "--vocab-size", "64"], "is 64, but 96 in"),
        (["import", "--input", "GOOD", "--output", "y", "--config", "x"], "but common.pt has the"),
        (["export", "--load", "RUN", "--output", "GOOD"], ": name a new folder"),
        (["export", "--load", "RUN", "--output", "y", "--lr", "1"], "--lr is for `import`"),
        (["export", "--load", "RUN", "--output", "y", "--transformer-impl", "x"], "is x: use tran"),
    ],
)
def test_wrong_flags(
    flags: list[str], message: str, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"GOOD": str(good), "RUN": str(good.parent / "run")}
    assert main([words.get(word, word) for word in flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and message in said, said
    assert not Path("y").exists()


def test_the_good_one_is_good_and_needs_no_arguments(
    good: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise each test here would pass for another reason."""
    _index(lambda index: _add("chained_0.optimizer.state", index))(folder / "release")
    words = ["import", "--input", str(folder), *WITHOUT_TEXT, "--output"]
    assert main([*words, str(tmp_path / "run")]) == 0
    assert "GPTModel of Megatron-Core" in capsys.readouterr().out
    sizes = (tmp_path / "run/config.yaml").read_text()
    bare = Path(shutil.copytree(good, tmp_path / "bare"))
    (bare / "release/common.pt").unlink()
    words = ["import", "--input", str(bare / "release"), "--output", str(tmp_path / "same")]
    assert main([*words, "--config", str(tmp_path / "run/config.yaml")]) == 0
    assert (tmp_path / "same/config.yaml").read_text() == sizes
    tensors = "iter_0000000/__0_0.distcp"
    assert (tmp_path / "run" / tensors).read_bytes() == (tmp_path / "same" / tensors).read_bytes()
    words = ["import", "--input", str(bare), "--output", str(tmp_path / "another"), *WITHOUT_TEXT]
    assert main([*words, "--num-experts", "8", "--expert-selection", "relu"]) == 2
    assert "Megatron-LM has no --expert-selection relu: leave it out" in capsys.readouterr().err
