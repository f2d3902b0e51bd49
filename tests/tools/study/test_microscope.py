import math
from collections import Counter
from statistics import fmean
from types import ModuleType

import pytest
import torch

from tests.tools.study.fake_runs import TOOL


@pytest.fixture
def microscope(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOL.parent)
    import microscope

    return microscope


NOISY = {"functions": 5, "noise": 0.3, "skew": 1.0}


@pytest.mark.parametrize("condition", [{}, {"noise": 0.2}, NOISY], ids=str)
def test_the_least_loss_is_the_entropy_of_the_answers(
    microscope: ModuleType, condition: dict[str, float]
) -> None:
    """By counting every function, cue and argument."""
    meant = microscope.Condition(**condition)
    maps = microscope.Task(meant, seed=3).maps_AFV.tolist()
    weights = [1 / place**meant.skew for place in range(1, meant.functions + 1)]
    least = 0.0
    for images in maps:
        joint: Counter[tuple[int, int, int]] = Counter()
        for true, weight in enumerate(weights):
            for cue in range(meant.functions):
                told = (1 - meant.noise) * (cue == true) + meant.noise / meant.functions
                for argument in range(24):
                    place = cue, argument, images[true][argument]
                    joint[place] += weight / sum(weights) * told / 24
        known: Counter[tuple[int, int]] = Counter()
        for (cue, argument, _), p in joint.items():
            known[cue, argument] += p
        least -= sum(p * math.log(p / known[place[:2]]) for place, p in joint.items() if p) / 2
    assert microscope.Task(meant, seed=3).bayes_loss() == pytest.approx(least, abs=1e-9)


def test_the_cue_names_the_function_of_its_block(microscope: ModuleType) -> None:
    task = microscope.Task(microscope.Condition(), seed=1)
    batch = task.batch(5)
    labels = batch.labels_ABS.view(2, -1, 8).tolist()
    maps = task.maps_AFV.tolist()
    for block, (cue, *arguments) in enumerate(batch.ids_BS.view(-1, 8).tolist()):
        for answer, back in enumerate((1, 2)):
            images = [maps[answer][cue - 24][argument] for argument in arguments]
            assert labels[answer][block] == [-100] * 3 + images[2 - back : 7 - back]


def test_labels_are_drawn_from_the_distribution_by_which_they_are_judged(
    microscope: ModuleType,
) -> None:
    task = microscope.Task(microscope.Condition(**NOISY), seed=2)
    batch = task.batch(3000)
    answered_ABS = batch.labels_ABS >= 0
    p = batch.answers_ABSV.gather(3, batch.labels_ABS.clamp(min=0)[..., None])[..., 0][answered_ABS]
    assert -p.log().mean().item() == pytest.approx(task.bayes_loss(), abs=0.015)
    shown = torch.bincount(batch.cues_BS.flatten(), minlength=5) / batch.cues_BS.numel()
    weights = [1 / place for place in range(1, 6)]
    wanted = [0.7 * weight / sum(weights) + 0.3 / 5 for weight in weights]
    assert shown.tolist() == pytest.approx(wanted, abs=0.02)


def test_controls_divide_the_functions_as_they_are_forced(
    microscope: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microscope, "EVERY", 1)

    def information(contender: str, **condition: float) -> float:
        meant = microscope.Condition(steps=1, **condition)
        found: float = microscope.train(meant, contender, 1, 0.01)["information"]
        return found

    assert information("oracle") == 1
    assert information("pairs") == pytest.approx(2 * math.log(4) / math.log(4 * 8), abs=0.01)
    assert information("oracle", functions=16) == pytest.approx(6 / 7, abs=0.01)
    assert information("hash") < 0.05


@pytest.mark.parametrize("contender", ["routing_free", "lory", "smear", "corm"])
def test_a_cell_of_a_system(microscope: ModuleType, contender: str) -> None:
    found = microscope.train(microscope.Condition(steps=20), contender, 1, 0.02)
    assert found["losses"][-1] < found["losses"][0]
    assert found["experts"] > 0 and 0 <= found["information"] <= 1


def test_half_way(microscope: ModuleType) -> None:
    """Half of ln 24 is 1.589; it is passed between two measurements, which are 20 steps apart."""
    assert microscope.steps_to_half([3.2, 1.689, 1.489, 0.2]) == pytest.approx(30, abs=0.1)
    assert microscope.steps_to_half([3.2, 2.0]) == math.inf


def test_the_page_is_that_of_the_cells_and_the_controls_behave(microscope: ModuleType) -> None:
    cells = microscope.read_cells()
    planned = {name for name in microscope.plan() if name.startswith(("rate-", "main/"))}
    assert not planned - cells.keys()
    page = (microscope.FOLDER / microscope.PAGE).read_text()
    for name, table in microscope.tables(cells).items():
        assert f"<!-- {name} -->\n{table}<!-- end of {name} -->" in page

    def excess(contender: str) -> list[float]:
        found: list[float] = microscope.values(cells, contender, "excess")
        return found

    assert max(excess("oracle")) <= 0.02
    assert all(p > o for p, o in zip(excess("pairs"), excess("oracle"), strict=True))
    assert fmean(excess("pairs")) >= 0.05
    assert min(excess("dense")) >= 0.3
    assert min(excess("hash")) >= 1


@pytest.mark.full
def test_a_cell_again(microscope: ModuleType) -> None:
    """To the digit on one processor, and nearly on others, which round differently."""
    cells = microscope.read_cells()
    first, second = (microscope.compute("main/oracle/11", cells) for _ in range(2))
    assert first == second
    committed = cells["main/oracle/11"]
    assert first["rate"] == committed["rate"] and first["bayes"] == committed["bayes"]
    assert first["excess"] == pytest.approx(committed["excess"], abs=0.01)
    assert first["information"] == 1
