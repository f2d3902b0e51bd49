"""tools/checkpoint.py on the checkpoints of a small run, whole, damaged and changed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parallel.training.checkpoint.index import read_index
from moe_parallel.training.checkpoint.inspection import compare, how_values_differ, place_in_model
from tests.distributed import run_distributed
from tests.training.tiny_run import AOE, Layout, TinyRun
from tools.checkpoint import main


def _three_checkpoints(path: Path) -> None:
    run = TinyRun(Layout(2, ep=2, distributed=True), path, options=AOE)
    for _ in range(3):
        run.steps(1)
        run.save()


def _same_on_one_rank(path: Path) -> None:
    """The first two steps once more, in another layout; then the weights of an expert change."""
    run = TinyRun(Layout(), path, options=AOE)
    run.load(path.parent / "run" / "iter_0000002")
    run.save()
    name, weight = next((n, p) for n, p in run.parameters() if n.endswith("experts.w_out_LWD"))
    weight.data[1, 2, :3] += 0.25
    run.iteration += 1
    run.save()
    (path / "changed").write_text(name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_distributed(2, _three_checkpoints, folder / "run")
    run_distributed(1, _same_on_one_rank, folder / "other")
    return folder


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(runs / "run", tmp_path / "run"))


def said(capsys: Any, *words: object, code: int = 0) -> list[str]:
    assert main([str(word) for word in words]) == code
    out, err = capsys.readouterr()
    return (out + err).splitlines()


def test_verify_reads_every_byte(run: Path, capsys: Any) -> None:
    assert all("  whole: " in line for line in said(capsys, "verify", run))
    damaged = next((run / "iter_0000002").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    first, second, third, error = said(capsys, "verify", run, code=2)
    assert "whole" in first and "whole" in third
    assert f"{damaged.name} is damaged" in second and "--load" not in second
    assert error == f"checkpoint.py: {run}: 1 of 3 checkpoints are damaged"


def test_show(runs: Path, capsys: Any) -> None:
    lines = said(capsys, "show", runs / "run", "--tensors")
    facts = dict(line.split("  ", 1) for line in lines if not line.startswith(" "))
    assert facts["iteration"].strip() == "3" and facts["consumed samples"].strip() == "12"
    assert "ep 2" in facts["layout"] and facts["optimizer state"].strip() == "yes"
    tensors = [line for line in lines if line.startswith("  ")]
    assert len(tensors) == int(facts["tensors"])
    assert any("w_down_EDR  [4, 32, 8]" in line for line in tensors)


def test_the_same_state_in_another_layout_is_equal(runs: Path, capsys: Any) -> None:
    one, other = runs / "run" / "iter_0000002", runs / "other" / "iter_0000002"
    (line,) = said(capsys, "diff", one, other)
    assert line.endswith(" tensors are equal, 0 differ")


def test_what_changed_is_named(runs: Path, capsys: Any) -> None:
    other = runs / "other"
    *lines, last = said(capsys, "diff", other / "iter_0000002", other, code=1)
    changed = (other / "changed").read_text().removeprefix("decoder.layers.")
    layer = changed.partition(".")[0]
    assert layer in lines[0] and "w_out_LWD" in lines[0]
    assert lines[0].endswith("3 of 7,680 values, largest difference 2.50e-01")
    assert last.endswith(" differ") and int(last.split()[-2]) == len(lines)


def test_tensors_of_one_checkpoint_alone_are_named(runs: Path, tmp_path: Path) -> None:
    run_distributed(1, _dense_head, tmp_path)
    _, found = compare(runs / "run" / "iter_0000001", tmp_path / "iter_0000001")
    alone = [key for key, how in found.items() if how == f"only in {tmp_path / 'iter_0000001'}"]
    assert len(alone) == 3 and all(key.endswith("output_layer.weight") for key in alone)
    layers = [key.split(".")[2] for key in found if key.startswith("decoder.layers")]
    assert layers == sorted(layers)


def _dense_head(path: Path) -> None:
    run = TinyRun(Layout(), path, options=AOE | {"untie_embeddings_and_output_weights": True})
    run.steps(1)
    run.save()


@pytest.mark.parametrize("files", [1, 3])
def test_reshard_changes_the_files_only(
    runs: Path, tmp_path: Path, files: int, capsys: Any
) -> None:
    source, target = runs / "run" / "iter_0000002", tmp_path / "moved"
    (line,) = said(capsys, "reshard", source, target, "--files", files)
    written = target / "iter_0000002"
    assert line == f"wrote {written}, {files} files of tensors"
    assert len(list(written.glob("*.distcp"))) == files
    parts = read_index(written).state_dict_metadata["embedding.word_embeddings.weight"].chunks
    assert len(parts) == files
    (whole,) = said(capsys, "verify", target)
    assert "  whole: " in whole
    (same,) = said(capsys, "diff", source, written)
    assert same.endswith(", 0 differ")
    (line,) = said(capsys, "reshard", source, target, "--files", files, code=2)
    assert line.endswith("iter_0000002 exists already: name another folder")


def _two_steps_from(checkpoint: Path, save: Path) -> list[tuple[float, float]]:
    run = TinyRun(Layout(2, ep=2, distributed=True), save, options=AOE)
    run.load(checkpoint)
    measured = run.steps(2)
    run.close()
    return measured


def test_training_goes_on_from_other_files(runs: Path, tmp_path: Path, capsys: Any) -> None:
    source = runs / "run" / "iter_0000002"
    said(capsys, "reshard", source, tmp_path / "moved", "--files", 5)
    before = run_distributed(2, _two_steps_from, source, tmp_path / "one")
    after = run_distributed(2, _two_steps_from, tmp_path / "moved", tmp_path / "other")
    assert before == after


def test_a_damaged_checkpoint_is_not_resharded(run: Path, tmp_path: Path, capsys: Any) -> None:
    damaged = next((run / "iter_0000003").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    (line,) = said(capsys, "reshard", run, tmp_path / "moved", "--files", 2, code=2)
    assert f"{damaged.name} is damaged" in line
    assert not list((tmp_path / "moved").glob("*iter*"))


def test_an_index_that_is_none(run: Path, capsys: Any) -> None:
    index = run / "iter_0000003" / ".metadata"
    index.write_bytes(bytes(index.stat().st_size))
    (line,) = said(capsys, "show", run, code=2)
    assert line.startswith("checkpoint.py: .metadata is not the index of a checkpoint")


def test_differences_are_in_the_order_of_the_model() -> None:
    ordered = [
        "embedding.word_embeddings.weight",
        "optimizer.state.exp_avg.embedding.word_embeddings.weight",
        "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight",
        "optimizer.state.fp32_param.embedding.word_embeddings.weight",
        "decoder.layers.2.self_attention.linear_qkv.weight",
        "decoder.layers.2.mlp.w_router_ED",
        "optimizer.state.exp_avg.decoder.layers.2.mlp.w_router_ED",
        "decoder.layers.10.self_attention.linear_proj.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        "optimizer.state.exp_avg.output_layer.weight",
    ]
    assert sorted(sorted(ordered), key=place_in_model) == ordered


def test_values_are_compared_by_their_bits() -> None:
    one = torch.tensor([0.0, 1.0, torch.nan, torch.inf, 2.0])
    assert how_values_differ(one, one.clone()) is None
    other = torch.tensor([-0.0, 1.5, torch.nan, -torch.inf, 2.0])
    assert how_values_differ(one, other) == "3 of 5 values, largest difference 5.00e-01"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["verify", "none"], "none: there is no checkpoint; name the folder given to --save"),
        (["diff", "{run}", "none"], "none: there is no such folder; check the path"),
        (["reshard", "{run}", "{run}", "--files", "0"], "--files is 0: it must be at least 1"),
        (["reshard", "{run}", "x"], "the following arguments are required: --files; --help lists"),
        (["verify", "{run}/iter_0000001"], "iter_0000001 is one checkpoint: name the folder"),
        (["tidy", "{run}"], "COMMAND: invalid choice: 'tidy'"),
    ],
)
def test_wrong_flags(runs: Path, words: list[str], message: str, capsys: Any) -> None:
    given = [word.format(run=runs / "run") for word in words]
    (line,) = said(capsys, *given, code=2)
    assert line.startswith("checkpoint.py: ") and message in line
