"""Hostile checkpoints that would run code when they are loaded; their records are valid.

Each payload creates a file, so that a test can see whether it ran.
"""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from moe_parallel.data.sealed import write_sealed
from moe_parallel.training.checkpoint.record import describe_files, list_files

MARKER = "this_ran"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def hostile_copies(checkpoint: Path, target: Path) -> Iterator[Path]:
    """Copies of a checkpoint under `target`, each with a payload in a different place."""
    for damage in _PLACES:
        path = target / damage.__name__.strip("_") / checkpoint.name
        shutil.copytree(checkpoint, path)
        damage(path, Payload(target / MARKER))
        reseal(path)
        yield path


def reseal(checkpoint: Path) -> None:
    """Make the record agree with the files, whatever they contain."""
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    del record["checksum"]
    record["files"] = describe_files(checkpoint, list_files(checkpoint))
    write_sealed(checkpoint / "checkpoint.json", record)


def _index(path: Path, payload: Payload) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(payload))


def _index_with_one_more_entry(path: Path, payload: Payload) -> None:
    def add(index: Metadata) -> None:
        index.planner_data = payload

    _change_index(path, add)


def _common(path: Path, payload: Payload) -> None:
    torch.save({"args": payload}, path / "common.pt")


def _random_state(path: Path, payload: Payload) -> None:
    _replace(path, "random_state/", [payload])


def _extra_state(path: Path, payload: Payload) -> None:
    _replace(path, "decoder.layers.0.self_attention.linear_qkv._extra_state/", [payload])


def _tensor(path: Path, payload: Payload) -> None:
    _replace(path, "decoder.final_layernorm.weight", payload)


def _tensor_elsewhere(path: Path, payload: Payload) -> None:
    def lead_away(index: Metadata) -> None:
        for place, piece in index.storage_data.items():
            if place.fqn == "decoder.final_layernorm.weight":
                piece.relative_path = "../../elsewhere"

    _change_index(path, lead_away)


def _random_state_that_is_none(path: Path, payload: Payload) -> None:
    _replace(path, "random_state/", [{"numpy": "of another kind"}])


_PLACES = (
    _index, _index_with_one_more_entry, _common, _random_state, _extra_state, _tensor,
    _tensor_elsewhere, _random_state_that_is_none,
)  # fmt: skip


def _change_index(path: Path, change: Callable[[Metadata], None]) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def _replace(path: Path, key: str, content: Any) -> None:
    """Put `content` in the place of the first entry whose key begins with `key`."""
    stored = io.BytesIO()
    torch.save(content, stored)

    def move(index: Metadata) -> None:
        place = next(place for place in index.storage_data if place.fqn.startswith(key))
        name = index.storage_data[place].relative_path
        with (path / name).open("ab") as file:
            offset = file.tell()
            file.write(stored.getvalue())
        index.storage_data[place] = _StorageInfo(name, offset, len(stored.getvalue()))

    _change_index(path, move)
