"""The comparison of every example system on a GPU with the CPU, with runs that are stand-ins."""

import json
from pathlib import Path

import pytest

from tools.gpu import systems

CPU, NEAR, FAR = [8.3, 8.2, 8.1], [8.3, 8.2001, 8.1], [8.3, 8.2, 8.2]
LEARNING, DIVERGING = [8.3, 7.0], [8.3, 9.0]


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch):
    """A function that sets the losses of the four runs of a system."""

    def set_losses(gpu: list[float], bf16: list[float], fails: str = "") -> None:
        def train(system: str, save: Path, *flags: str, **environment: str) -> list[float]:
            name = save.name.removeprefix(f"{system}-")
            assert (environment == systems.ON_CPU) == (name in ("begin", "cpu"))
            if name == fails:
                raise systems.RunFailed(f"{name}: error: it failed")
            return {"begin": [], "cpu": CPU, "gpu": gpu, "bf16": bf16}[name]

        monkeypatch.setattr(systems, "check_device", lambda device: None)
        monkeypatch.setattr(systems, "_train", train)

    return set_losses


@pytest.mark.parametrize(
    ("gpu", "bf16", "fails", "code", "verdict"),
    [
        (NEAR, LEARNING, "", 0, "| 3 | 1.2e-05 | 8.300 to 7.000 | agrees |"),
        (FAR, LEARNING, "", 1, "| 3 | 1.2e-02 | 8.300 to 7.000 | DIFFERS |"),
        (NEAR, DIVERGING, "", 1, "| 3 | 1.2e-05 | 8.300 to 9.000 | DIFFERS |"),
        (NEAR, LEARNING, "gpu", 1, "| 3 | inf |  | gpu: error: it failed |"),
    ],
)
def test_verdicts(trains, capsys, tmp_path, gpu, bf16, fails, code, verdict):
    trains(gpu, bf16, fails)
    file = tmp_path / "systems.json"
    assert systems.main(["--only", "topk", "--json", str(file)]) == code
    assert f"| topk {verdict}" in capsys.readouterr().out
    (row,) = json.loads(file.read_text())
    assert row["system"] == "topk" and bool(row["error"]) == bool(fails)


def test_a_run_that_fails_says_why(tmp_path):
    with pytest.raises(systems.RunFailed, match="x: error: --no-such-flag is not a flag"):
        systems._train("topk", tmp_path / "topk-x", "--no-such-flag", "1")
