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


METADATA = b"ctorch.distributed.checkpoint.metadata\n"
PAIRS = {"memo": 60 * b"q\x00h\x00\x86", "copy": 60 * b"2\x86"}  # each the one before, twice
NOT_RUN = "which is not part of an index and was not run"
SETS = "it sets attributes of a "
MARKED = b"N}X\x06\0\0\0markedK\x01s\x86b."

#: What is no index, and a part of the error.
INDICES = {
    "nothing": (b"", ""),
    "garbage": (b"garbage", ""),
    "a value": (pickle.dumps({"a": 1}), "it is something else"),
    "a line in a name": (pickle.dumps("deep").replace(b"deep", b"de\npp"), ""),
    "many marks": (b"\x80\x04" + b"(" * 100_000 + b".", ""),
    "nested lists": (b"\x80\x04" + b"]" + b"]a" * 100_000 + b".", ""),
    "a function": (b"cos\nsystem\n(S'true'\ntR.", NOT_RUN),
    "a builtin": (b"cbuiltins\neval\n(S'1'\ntR.", NOT_RUN),
    "another function of torch": (b"ctorch.serialization\nload\n(S'x'\ntR.", NOT_RUN),
    "a name with a dot": (METADATA + b"os.system\n(S'true'\ntR.", NOT_RUN),
    "an attribute": (
        b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR.",
        "it asks <class 'torch.Size'> for '__class__'",
    ),
    "sets a class's": (b"\x80\x02" + METADATA + b"Metadata\n" + MARKED, SETS + "type"),
    "sets an enum's": (b"\x80\x02" + METADATA + b"_MEM_FORMAT_ENCODING\n" + MARKED, SETS + "Enum"),
    "sets a function's": (b"\x80\x02ctorch.serialization\n_get_layout\n" + MARKED, SETS + "func"),
    "a large memo": (b"\x80\x02]r\xff\xff\xff\x7f.", ""),
    "a large array": (b"\x96" + b"\0" * 7 + b"\x7f.", ""),
    **{
        f"{use} of a {name}": (b"\x80\x04" + begin + b"N" + pairs + end, "")
        for name, pairs in PAIRS.items()
        for use, begin, end in (
            ("key", b"}", b"Ns."),
            ("set", b"(", b"\x91."),
            ("argument", b"ctorch.serialization\n_get_layout\n", b"\x85R."),
            ("text", b"cbuiltins\ngetattr\n", b"X\x01\0\0\0a\x86R."),
        )
    },
}


@pytest.mark.parametrize("name", INDICES)
def test_what_is_no_index_is_one_line_in_bounded_time_and_memory(tmp_path, name):
    content, said = INDICES[name]
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(
        StorageError, match=r"^\.metadata is not the index of a che.*: [^\n]*$"
    ) as it:
        read_index(tmp_path)
    assert said in str(it.value)
    assert not hasattr(Metadata, "marked")


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
