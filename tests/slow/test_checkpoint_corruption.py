"""Damage to the files of a checkpoint gives one line, or exactly the state that was saved.

Each damage is done in place and undone. Bits are drawn with a fixed seed.
"""

import hashlib
import json
import pickle
import random
import resource
from collections import Counter
from contextlib import contextmanager

import numpy
import pytest
import torch

from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.record import list_files
from moe_parallel.training.checkpoint.state import random_state
from moe_parallel.training.optimizer import optimizer_parts
from tests.distributed import run_distributed
from tests.training.hostile import reseal
from tests.training.tiny_run import Layout, TinyRun

pytestmark = pytest.mark.full

FLIPS, CUTS = 60, 6  # of each file
CRAFTED = 150  # flips of the index and of the data, with a record that agrees with them
TRACKER = "latest_checkpointed_iteration.txt"
MEMORY = 16 << 30  # a flipped index may request any amount


def _state(run):
    """A digest of all state that a load sets."""
    digest = hashlib.sha256()
    for _, parameter in run.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    for part in optimizer_parts(run.engine.optimizer):
        for state in part.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                digest.update(state[name].numpy().tobytes())
    digest.update(pickle.dumps(run.engine.scheduler.state_dict()))
    digest.update(json.dumps(random_state()["python"]).encode())
    digest.update(numpy.random.get_state()[1].tobytes() + torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def _changed(path, content):
    before = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(before)


def _flipped(content, bit):
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _damages(run_folder, checkpoint):
    """(kind, file, context manager) of every damage."""
    draw = random.Random(1)
    names = [*list_files(checkpoint), "checkpoint.json"]
    for path in [run_folder / TRACKER, *(checkpoint / name for name in names)]:
        content = path.read_bytes()
        bits = range(8 * len(content))
        for bit in sorted(draw.sample(bits, min(FLIPS, len(bits)))):
            yield "flip", path.name, _changed(path, _flipped(content, bit))
        for size in sorted(draw.sample(range(len(content)), min(CUTS, len(content)))):
            yield "cut", path.name, _changed(path, content[:size])
        yield "longer", path.name, _changed(path, content + b"\0")
        yield "missing", path.name, _renamed(path, path.with_name("elsewhere"))
        yield "nested", path.name, _changed(path, b"[" * 100_000)
        yield "not UTF-8", path.name, _changed(path, b"\xff\xfe" + content)
    for name in ("more", "__9_0.distcp", "tokenizer/more", ".metadata.writing"):
        yield "left over", name, _added(checkpoint / name)
    yield "renamed", checkpoint.name, _renamed(checkpoint, run_folder / "iter_0000003")


@contextmanager
def _renamed(path, other):
    path.rename(other)
    yield
    other.rename(path)


@contextmanager
def _added(path):
    path.write_bytes(b"more")
    yield
    path.unlink()


def _train_and_damage(folder):
    """(kind, file, result of loading it) of every damage."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": ["a", "b"]}')
    files = {"config.yaml": "num-layers: 4\n", "tokenizer": folder / "tokenizer"}
    run = TinyRun(Layout(), folder / "run", files=files)
    for _ in range(2):
        run.steps(1)
        checkpoint = run.save()
    run.load(folder / "run")
    whole = _state(run)
    loaded = set()

    def load(*, may_change=False):
        try:
            run.load(folder / "run")
        except InputError as error:
            return "one line" if "\n" not in str(error) else str(error)
        loaded.add(_state(run))
        return "as it was" if may_change or loaded == {whole} else "changed"

    found = []
    for kind, name, damage in _damages(folder / "run", checkpoint):
        with damage:
            found.append((kind, name, load()))

    draw = random.Random(2)
    record = (checkpoint / "checkpoint.json").read_bytes()
    for name in (".metadata", "__0_0.distcp"):
        content = (checkpoint / name).read_bytes()
        for bit in draw.sample(range(8 * len(content)), CRAFTED):
            with _changed(checkpoint / name, _flipped(content, bit)):
                reseal(checkpoint)
                found.append(("crafted", name, load(may_change=True)))
            (checkpoint / "checkpoint.json").write_bytes(record)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_distributed(1, _train_and_damage, tmp_path_factory.mktemp("damaged"), timeout=1800)[
        0
    ]


def test_damage_is_one_line_or_changes_nothing(found):
    counts = Counter((kind, end) for kind, _, end in found)
    assert {end for _, end in counts} == {"one line", "as it was"}, counts
    assert counts["flip", "one line"] > 7 * FLIPS * 0.9
    assert counts["crafted", "one line"] + counts["crafted", "as it was"] == 2 * CRAFTED


def test_damage_to_what_a_record_describes_is_always_found(found):
    kinds = ("flip", "cut", "longer", "not UTF-8", "nested")
    unseen = [
        (kind, name)
        for kind, name, end in found
        if end == "as it was" and kind in kinds and name not in (TRACKER, "checkpoint.json")
    ]
    assert not unseen
