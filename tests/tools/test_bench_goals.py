"""A goal is compared with the row that it names, and only with values measured in that row."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.bench_rows import result, row
from tools.bench.contender import BACKWARD, BOTH, FORWARD
from tools.bench.goals import SAVED, SHARE, SPEED, Goal, format_verdicts, goals_of, judge
from tools.bench.rows import layers
from tools.bench.sizes import Size

SHARE_GOAL = Goal("permute", FORWARD, "T=8 d=4", "float32", SHARE, 0.9)
SPEED_GOAL = replace(SHARE_GOAL, figure=SPEED, bound=2.0, other="loop")
SAVED_GOAL = replace(SHARE_GOAL, figure=SAVED, bound=0.75, other="loop")


@pytest.mark.parametrize(
    ("goal", "ours", "met", "said"),
    [
        (SHARE_GOAL, 1.0, True, "met           ours: 100.0 % of the ceiling (goal >= 90.0 %)"),
        (SHARE_GOAL, 2.0, False, "missed        ours: 50.0 % of the ceiling (goal >= 90.0 %: 44.4"),
        (SPEED_GOAL, 2.0, True, "met           ours: 2.000x as fast as loop (goal >= 2.000x)"),
        (SPEED_GOAL, 5.0, False, "0.800x as fast as loop (goal >= 2.000x: 60.0 % short)"),
    ],
)
def test_speed(goal: Goal, ours: float, met: bool, said: str) -> None:
    verdict = judge(goal, [row(result("ours", *[ours] * 3), result("loop", 4, 4, 4))])
    assert verdict.met is met
    assert said in str(verdict)


@pytest.mark.parametrize(("saved", "met"), [(75, True), (76, False)])
def test_saved_bytes_are_at_most(saved: int, met: bool) -> None:
    ours, loop = result("ours", 1, saved_bytes=saved), result("loop", 1, saved_bytes=100)
    verdict = judge(SAVED_GOAL, [row(ours, loop)])
    assert verdict.met is met
    assert ("1.3 % over" in str(verdict)) is not met


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "the row was not part of this run"),
        ([row(result("ours", 1), dtype="bfloat16")], "the row was not part of this run"),
        ([row(result("ours", 1))], "loop took no part"),
        ([row(result("ours", 1), result("loop", absent="no GPU"))], "loop is absent: no GPU"),
        ([row(result("ours", 1), result("loop", 1, differs="x"))], "loop DIFFERS: x"),
    ],
)
def test_nothing_is_claimed_without_a_measurement(rows: list, reason: str) -> None:
    verdict = judge(SPEED_GOAL, rows)
    assert verdict.met is None
    assert str(verdict) == f"not measured  ours: as fast as loop >= 2.000x: {reason}"


def test_verdicts_stand_under_their_row() -> None:
    rows = [row(result("ours", 1, 1, 1), result("loop", 4, 4, 4))]
    other = replace(SHARE_GOAL, op="swiglu")
    text = format_verdicts(judge(goal, rows) for goal in (SHARE_GOAL, SPEED_GOAL, other))
    assert [line.strip()[:30] for line in text.splitlines()] == [
        "permute forward, T=8 d=4, floa",
        "met           ours: 100.0 % of",
        "met           ours: 4.000x as ",
        "swiglu forward, T=8 d=4, float",
        "not measured  ours: of the cei",
    ]


def test_the_cpu_goals() -> None:
    """The table of the project's goals, as numbers."""
    goals = [goal for goal in goals_of("cpu") if goal.dtype == "bfloat16"]
    assert len(goals) * 2 == len(goals_of("cpu"))
    coarse = "T=4096 d=768 n=8 K=2 f=3072"
    wanted = {(g.op, g.timed, g.size, g.contender, g.figure, g.other): g.bound for g in goals}
    moved = "T=16384 d=768 n=8 K=2"
    assert wanted[("permute", FORWARD, moved, "ours", SHARE, "")] == 0.9
    assert wanted[("unpermute", BACKWARD, moved, "ours", SHARE, "")] == 0.8
    assert wanted[("unpermute", BACKWARD, moved, "ours", SPEED, "torch index_add")] == 10
    routed = ("routed_layer", BOTH, coarse, "ours", SPEED)
    assert wanted[(*routed, "list of experts")] == 1.0
    assert wanted[(*routed, "HF Mixtral grouped_mm")] == 1.15
    fine = ("routed_layer", BOTH, "T=2048 d=768 n=64 K=8 f=384", "ours", SPEED)
    assert wanted[(*fine, "HF Qwen3-MoE grouped_mm")] == 1.3
    for low, full, selected in ((64, 97, 99), (128, 95.5, 98), (256, 92, 97), (512, 85, 94)):
        aoe = ("aoe_layer", BOTH, f"{coarse} l={low}")
        twin = (SPEED, "our routed layer")
        assert wanted[(*aoe, layers.FULL_KEPT, *twin)] == pytest.approx(full / 100)
        assert wanted[(*aoe, layers.SELECTED, *twin)] == pytest.approx(selected / 100)
    saved = [goal for goal in goals if goal.figure == SAVED]
    assert {(goal.size, goal.bound) for goal in saved} == {(f"{coarse} l=256", 0.75)}


def test_every_goal_names_a_row_that_is_measured() -> None:
    from tools.bench.sizes import GOALS, sizes_of

    for device in ("cpu", "cuda"):
        sizes = sizes_of(GOALS, device)
        for goal in goals_of(device):
            assert goal.size in map(str, sizes[goal.op]), goal.title


def test_equal_parameters() -> None:
    """d_wide of the AoE paper's sizes: 3 d f = d l + w (2 d + l), within half of 64 columns."""
    for low in (64, 128, 256, 512):
        size = Size(d=768, f=3072, l=low)
        autonomous = 768 * low + size.wide * (2 * 768 + low)
        assert abs(autonomous - 3 * 768 * 3072) <= 32 * (2 * 768 + low)
        assert size.wide % 64 == 0


def test_the_layer_of_the_coupling_paper_is_that_of_its_model() -> None:
    from moe_parallel.config import parse_command_line
    from tools.bench.sizes import ERC, sizes_of

    (size,) = sizes_of(ERC, "cpu")["aoe_layer"]
    file = Path(__file__).parents[2] / "examples" / "papers" / "erc" / "aoe_3b.yaml"
    model = parse_command_line(["--config", str(file)])
    selection = model.selection
    assert (size.d, size.n, size.K) == (1536, 64, 8)
    assert (size.d, size.n) == (model.model.hidden_size, model.num_experts)
    assert (size.K, size.l) == (selection.choices_per_token, selection.aoe_low_rank_size)
    assert size.f == model.model.ffn_hidden_size and size.wide == model.expert_width
