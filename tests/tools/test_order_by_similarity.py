"""The complete tool: its files and output, its exit codes, and a training run on its output."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_parallel.data.indexed import read_manifest, write_indexed
from moe_parallel.data.similarity import Documents
from tests.data.small_text import small_bpe
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tools.order_by_similarity import main

EOD = 500
S = 32
SOURCES = ("kinds.jsonl",)


def kinds_of_text(folder: Path, documents: int = 200, length: int = 30) -> Path:
    """Ten kinds of documents in random order, each with its own fifty tokens; two are copies."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 10, documents)
    bodies = 50 * kinds[:, None] + rng.integers(0, 50, (documents, length))
    bodies[11] = bodies[3]
    write_indexed(
        folder / "in", [[*body, EOD] for body in bodies.tolist()], EOD + 1, sources=SOURCES
    )
    return folder / "in"


def order(data: Path, output: Path, *more: object) -> int:
    line = ["--data-path", data, "--output-prefix", output, "--seq-length", S, *more]
    return main([str(word) for word in line])


def kinds_in(instance: np.ndarray) -> set[int]:
    return set((instance[instance != EOD] // 50).tolist())


def instances(prefix: Path) -> np.ndarray:
    return np.fromfile(f"{prefix}.bin", np.uint16).reshape(-1, S)


def test_instances_hold_similar_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = kinds_of_text(tmp_path), tmp_path / "out"
    assert order(data, output) == 0
    before = [len(kinds_in(each)) for each in instances_of_random_order(data)]
    after = [len(kinds_in(each)) for each in instances(output)]
    assert np.mean(before) > 1.7  # measured: 1.87
    assert np.mean(after) < 1.2  # measured: 1.06
    printed = re.fullmatch(
        r"200 documents, 10\.0 neighbors each \(100% of the nearest found\); "
        r"(\d+) restarts, 1 near duplicates left out\n"
        r"cosine of adjacent documents: (\S+) \(in the file (\S+), in random order (\S+)\)\n"
        rf"{output}: 192 instances of 32 tokens in 24 documents; 25 tokens left over\n",
        capsys.readouterr().out,
    )
    assert printed is not None
    restarts, cosine_after, *cosines_before = map(float, printed.groups())
    assert restarts < 60
    assert cosine_after > 3 * max(cosines_before)
    manifest = read_manifest(output)
    assert manifest is not None
    assert (manifest.sources, manifest.seq_length) == (SOURCES, S)
    # The same again, unless the seed is another.
    assert order(data, tmp_path / "again") == 0
    assert order(data, tmp_path / "other", "--seed", 1) == 0
    for suffix in (".bin", ".idx"):
        assert (
            Path(f"{tmp_path}/again{suffix}").read_bytes() == Path(f"{output}{suffix}").read_bytes()
        )
    assert not np.array_equal(instances(output), instances(tmp_path / "other"))
    capsys.readouterr()
    assert order(data, output) == 2
    assert re.fullmatch(r"error: \S*out\.bin exists: .*--overwrite\n", capsys.readouterr().err)


def instances_of_random_order(data: Path) -> np.ndarray:
    documents = np.fromfile(f"{data}.bin", np.uint16).reshape(200, 31)
    text = np.random.default_rng(0).permutation(documents).reshape(-1)
    return text[: len(text) // S * S].reshape(-1, S)


def test_every_document_but_the_copy_is_there_once(tmp_path: Path) -> None:
    data, output = kinds_of_text(tmp_path), tmp_path / "out"
    assert order(data, output, "--instances-per-document", 10_000, "--seq-length", 1) == 0
    text = np.fromfile(f"{output}.bin", np.uint16)  # one part: in the order of the path
    found = text.reshape(-1, 31).tolist()
    expected = [Documents(str(data))[i].tolist() for i in range(200)]
    expected.remove(expected[3])
    assert sorted(found) == sorted(expected)
    assert order(data, output, "--duplicate-threshold", 2, "--overwrite") == 0
    assert instances(output).size == 200 * 31 // S * S


@pytest.mark.parametrize(
    "stage",
    [
        "moe_parallel.data.similarity.tf_idf",
        "moe_parallel.data.similarity.Documents.__getitem__",
    ],
)
def test_an_interruption_leaves_what_was_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
) -> None:
    data, output = kinds_of_text(tmp_path), tmp_path / "out"
    assert order(data, output) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    calls = []

    def interrupted(*of: object) -> Any:
        calls.append(of)
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, interrupted)
    assert order(data, output, "--seed", 1, "--overwrite") == 130
    assert calls
    assert capsys.readouterr() == ("", "error: interrupted; no dataset was written\n")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seq-length", 10**6], r"--seq-length 1000000 is longer than the text.*6169 tokens"),
        (["--neighbors", 0], "--neighbors is 0: it must be at least 1"),
        (["--instances-per-document", 2**30], "more tokens than a document can hold"),
        (["--duplicate-threshold", "nan"], r"--duplicate-threshold nan must be above 0"),
        (["--eod-id", -3], "--eod-id -3 is not a token id"),
        (["--encoder", "x"], "ByteLevelBPE needs --tokenizer-model"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[object], message: str
) -> None:
    data = kinds_of_text(tmp_path)
    assert order(data, tmp_path / "new" / "out", *more) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(rf"error: .*{message}.*\n", printed.err), printed.err
    assert not list(tmp_path.glob("new/*"))


def test_training_takes_what_it_wrote(tmp_path: Path) -> None:
    data = small_data(tmp_path)
    assert order(data["data_path"][0], tmp_path / "ordered", "--instances-per-document", 2) == 0
    assert Documents(str(data["data_path"][0])).eod == small_bpe().eod
    run = SMALL | data | {"data_path": tmp_path / "ordered", "save": tmp_path / "run"}
    [[(code, printed)]] = run_distributed(1, pretrain_here, [run])
    assert code == 0
    losses = [float(loss) for loss in re.findall(r"iteration +\d+/4 \| loss (\S+)", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    manifest = read_manifest(tmp_path / "ordered")
    assert manifest is not None
    assert (manifest.tokenizer, manifest.seq_length) == (small_bpe().fingerprint, S)
