"""Loading a checkpoint from elsewhere runs no code from it."""

import ast
import enum
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_parallel.collective_errors import StorageError
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.index import read_index
from tests.distributed import run_distributed
from tests.training.hostile import MARKER, Payload, hostile_copies
from tests.training.tiny_run import Layout, TinyRun


def _save_then_load_hostile_copies(folder):
    """The error of loading each copy, by its name; None: it was loaded."""
    run = TinyRun(Layout(), folder / "run")
    saved = run.save()
    errors = {}
    for path in hostile_copies(saved, folder / "hostile"):
        try:
            run.load(path)
            errors[path.parent.name] = None
        except InputError as error:
            errors[path.parent.name] = str(error)
    return errors


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    return folder, *run_distributed(1, _save_then_load_hostile_copies, folder)


def test_nothing_in_a_checkpoint_is_run(loaded):
    folder, errors = loaded
    assert len(errors) == 8
    assert not (folder / "hostile" / MARKER).exists()


REASONS = {
    "index": r".metadata is not the index of a checkpoint: it names posix.mkdir, which is not part "
    "of an index and was not run",
    "index_with_one_more_entry": "it names posix.mkdir, which is not part of an index",
    "random_state": "it contains something other than tensors and values, which was not run",
    "extra_state": "it contains something other than tensors and values, which was not run",
    "tensor": "it contains something other than tensors and values, which was not run",
    "tensor_elsewhere": "it names the file '../../elsewhere'",
    "random_state_that_is_none": "its random states are of another kind",
}


@pytest.mark.parametrize("place", REASONS)
def test_each_is_refused_in_one_line(loaded, place):
    folder, errors = loaded
    message = errors[place]
    assert message.startswith(f"--load {folder}/hostile/{place}/iter_0000000")
    assert REASONS[place] in message and "\n" not in message


def test_what_is_harmless_is_loaded(loaded):
    assert loaded[1]["common"] is None  # never read


def _refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(StorageError) as caught:
        read_index(tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_index_of_anything_else(tmp_path):
    for content in (
        b"",
        b"garbage",
        pickle.dumps(None),
        pickle.dumps({"a": 1}),
        pickle.dumps("deep").replace(b"deep", b"de\npp"),
        b"\x80\x04" + b"(" * 100_000 + b".",
        b"\x80\x04" + b"]" + b"]a" * 100_000 + b".",
    ):
        assert _refused(tmp_path, content).startswith(".metadata is not the index of a checkpoint")


@pytest.mark.parametrize(
    "call",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(S'true'\ntR.",
    ],
)
def test_an_index_names_only_its_own_parts(tmp_path, call):
    assert "which is not part of an index and was not run" in _refused(tmp_path, call)


class _PicklerOfPython3112(pickle.Pickler):
    def reducer_override(self, value):
        return (
            (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented
        )


def test_a_member_of_an_enum_may_be_an_attribute(tmp_path):
    start, size = torch.Size([0]), torch.Size([2])
    tensor = TensorStorageMetadata(
        TensorProperties(torch.float32), size, [ChunkStorageMetadata(start, size)]
    )
    index = Metadata(
        {"w": tensor}, storage_data={MetadataIndex("w", start): _StorageInfo("__0_0.distcp", 0, 8)}
    )
    content = io.BytesIO()
    _PicklerOfPython3112(content).dump(index)
    assert b"getattr" in content.getvalue()
    (tmp_path / ".metadata").write_bytes(content.getvalue())
    assert read_index(tmp_path) == index


def test_no_other_attribute_is_read(tmp_path):
    call = b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR."
    assert "it asks <class 'torch.Size'> for '__class__'" in _refused(tmp_path, call)


_METADATA = b"ctorch.distributed.checkpoint.metadata\n"


@pytest.mark.parametrize(
    ("thing", "kind"),
    [
        (_METADATA + b"Metadata\n", "type"),
        (_METADATA + b"_MEM_FORMAT_ENCODING\n", "EnumType"),
        (_METADATA + b"_MEM_FORMAT_ENCODING\n(I0\ntR", "_MEM_FORMAT_ENCODING"),
        (b"ctorch.serialization\n_get_layout\n", "function"),
    ],
)
def test_no_attribute_of_a_part_is_set(tmp_path, thing, kind):
    call = b"\x80\x02" + thing + b"N}X\x06\0\0\0markedK\x01s\x86b."
    assert f"it sets attributes of a {kind}" in _refused(tmp_path, call)
    assert not hasattr(Metadata, "marked")


@pytest.mark.parametrize(
    "content", [b"\x80\x02]r\xff\xff\xff\x7f.", b"\x96" + b"\0" * 7 + b"\x7f."]
)
def test_an_index_allocates_no_more_than_it_has(tmp_path, content):
    _refused(tmp_path, content)


@pytest.mark.parametrize("pair", [b"q\x00h\x00\x86", b"2\x86"], ids=["memo", "copy"])
@pytest.mark.parametrize(
    "use",
    [
        (b"}", b"Ns."),
        (b"(", b"\x91."),
        (b"ctorch.serialization\n_get_layout\n", b"\x85R."),
        (b"cbuiltins\ngetattr\n", b"X\x01\0\0\0a\x86R."),
    ],
    ids=["key", "set", "argument", "shown"],
)
def test_nothing_in_an_index_doubles_without_end(tmp_path, pair, use):
    _refused(tmp_path, b"\x80\x04" + use[0] + b"N" + 60 * pair + use[1])


def _may_run_code(call):
    name = ast.unparse(call.func)
    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return (
        name in ("pickle.load", "pickle.loads", "dist_checkpointing.load")
        or (name == "torch.load" and arguments.get("weights_only") != "True")
        or arguments.get("allow_pickle") == "True"
    )


def test_nothing_else_reads_pickles():
    """Resuming, upcycling, conversion, probes and generation all read with `read_tensors`."""
    root = Path(__file__).resolve().parents[3]
    sources = [path for name in ("moe_parallel", "tools") for path in (root / name).rglob("*.py")]
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _may_run_code(node)
    ]
    assert sources and not found


def test_the_payload_would_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / MARKER)))
    assert (tmp_path / MARKER).exists()
