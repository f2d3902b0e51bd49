"""The program: its table, its exit codes and its errors for wrong flags."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here, small_data
from tests.tools.running import RunTool
from tools.probe_autonomy import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that split the experts."""
    folder = tmp_path_factory.mktemp("probed")
    options = SMALL | small_data(folder) | {"save": folder / "run"}
    options |= {"expert_model_parallel_size": 2, "train_iters": 30}
    run_distributed(2, pretrain_here, [options])
    return folder / "run"


@pytest.mark.full
def test_thirty_selections_beside_the_router_and_chance(trained: Path, start: RunTool) -> None:
    run = partial(start, "probe_autonomy.py")
    result = run("--load", trained)
    assert (result.returncode, result.stderr) == (0, "")
    head, router, random, equal, *probed = result.stdout.splitlines()
    assert head.split() == ["selected", "by", "norm", "probs", "cycle", "noise", "all", "kept"]
    assert len(probed) == len(set(probed)) == 30
    assert probed[0].split()[:4] == ["x", "W_g", "L1", "softmax"]
    *_, last = (json.loads(line) for line in (trained / "metrics.jsonl").open())
    losses = [last["validation"][domain]["loss"] for domain in ("cycle", "noise")]
    assert [float(word) for word in router.split()[3:5]] == pytest.approx(losses, abs=1e-4)
    assert router.split()[-1] == "100%"
    assert random.startswith("random") and random.split()[-1] == "0%"
    assert equal.split()[:2] == ["router", "uniform"]


@pytest.mark.parametrize(
    ("flags", "file", "message"),
    [
        ([], None, "--load is not set"),
        (["--load", "nowhere"], None, "--load nowhere: there is no such folder"),
        (["--load", "x", "--topk", "5"], "num-experts: 4", "--topk is 5: choose from 1 to the 4"),
        (["--load", "x"], "num-layers: 2", "the model is dense"),
        (["--load", "x"], "num-experts: 4\nexpert-selection: top_p", "--topk is not set"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    flags: list[str],
    file: str | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file is not None:
        (tmp_path / "config.yaml").write_text(file)
        flags = [*flags, "--config", str(tmp_path / "config.yaml")]
    assert main(flags) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("probe_autonomy.py: ")
    assert message in line
