"""A goal is compared with the row that it names, and only with values measured in that row."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.bench_rows import result, row
from tools.bench.contender import BACKWARD, BOTH, FORWARD
from tools.bench.goal import (
    BEST,
    PEAK,
    SAVED,
    SHARE,
    SPEED,
    TOKEN_SAVED,
    TOKEN_TIME,
    Goal,
    GrowthGoal,
    format_verdicts,
    judge,
)
from tools.bench.goals import goals_of
from tools.bench.results import BenchResult
from tools.bench.rows import layers
from tools.bench.sizes import BenchSize
from tools.bench.whole_models.goals import model_goals
from tools.bench.whole_models.sizes import SIZES

SHARE_GOAL = Goal("permute", FORWARD, "T=8 d=4", "float32", SHARE, 0.9)
SPEED_GOAL = replace(SHARE_GOAL, figure=SPEED, bound=2.0, other="loop")
SAVED_GOAL = replace(SHARE_GOAL, figure=SAVED, bound=0.75, other="loop")


@pytest.mark.parametrize(
    ("goal", "ours", "met", "said"),
    [
        (SHARE_GOAL, 1.0, True, "met           ours: 100.0% of the ceiling (goal >= 90.0%)"),
        (SHARE_GOAL, 2.0, False, "missed        ours: 50.0% of the ceiling (goal >= 90.0%: 44.4"),
        (SPEED_GOAL, 2.0, True, "met           ours: 2.000x as fast as loop (goal >= 2.000x)"),
        (SPEED_GOAL, 5.0, False, "0.800x as fast as loop (goal >= 2.000x: 60.0% short)"),
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
    assert ("1.3% over" in str(verdict)) is not met


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
        "met           ours: 100.0% of ",
        "met           ours: 4.000x as ",
        "swiglu forward, T=8 d=4, float",
        "not measured  ours: of the cei",
    ]


def test_the_fastest_peer_is_one_that_is_not_ours_and_computes_the_same() -> None:
    goal = replace(SPEED_GOAL, bound=1.0, other=BEST)
    rows = [
        row(
            result("ours", 2, 2, 2),
            result("ours, op by op", 1, 1, 1),
            result("slow", 9, 9, 9),
            result("good", 3, 3, 3),
            result("wrong", 1, 1, 1, differs="x"),
            result("gone", absent="no GPU"),
        )
    ]
    verdict = judge(goal, rows)
    assert verdict.met and verdict.value == pytest.approx(1.5)
    assert "1.500x as fast as the fastest peer (good) (goal >= 1.000x)" in str(verdict)
    alone = judge(goal, [row(result("ours", 1))])
    assert alone.met is None and alone.reason == "the fastest peer took no part"


@pytest.mark.parametrize(("peak", "met"), [(100, True), (101, False)])
def test_peak_memory_is_at_most(peak: int, met: bool) -> None:
    goal = replace(SPEED_GOAL, figure=PEAK, bound=1.0)
    ours, loop = result("ours", 1, peak_bytes=peak), result("loop", 1, peak_bytes=100)
    assert judge(goal, [row(ours, loop)]).met is met


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_goals(dtype: str) -> None:
    """The table of the project's goals, as numbers."""
    goals = [goal for goal in goals_of("cpu") if goal.dtype == dtype]
    coarse, fine = "T=4096 d=768 n=8 K=2 f=3072", "T=2048 d=768 n=64 K=8 f=384"
    wanted = {(g.op, g.timed, g.size, g.contender, g.figure, g.other): g.bound for g in goals}
    assert len(wanted) == len(goals)
    moved = "T=16384 d=768 n=8 K=2"
    for timed in (FORWARD, BACKWARD):
        assert wanted[("permute", timed, moved, "ours", SHARE, "")] == 0.9
        assert wanted[("unpermute", timed, moved, "ours", SHARE, "")] == 0.8
    for size, hugging_face, share in ((coarse, "HF Mixtral", 0.85), (fine, "HF Qwen3-MoE", 0.70)):
        routed = ("routed_layer", BOTH, size, "ours")
        assert wanted[(*routed, SPEED, BEST)] == 1.0
        assert wanted[(*routed, SPEED, f"{hugging_face} grouped_mm")] == 1.15
        of_dense = wanted.get((*routed, SHARE, ""))
        assert of_dense == (share if dtype == "bfloat16" else None)
    own = {"float32": 0.96, "bfloat16": 0.85}[dtype]
    for low, full, selected in ((64, 97, 99), (128, 95.5, 98), (256, 92, 97), (512, 85, 94)):
        aoe = ("aoe_layer", BOTH, f"{coarse} l={low}")
        twin = (SPEED, "our routed layer")
        assert wanted[(*aoe, layers.FULL_KEPT, *twin)] == pytest.approx(full / 100)
        assert wanted[(*aoe, layers.SELECTED, *twin)] == pytest.approx(selected / 100)
        assert {wanted[(*aoe, name, SHARE, "")] for name in layers.AUTONOMOUS} == {own}
    saved = [goal for goal in goals if goal.figure == SAVED]
    assert {(goal.size, goal.bound) for goal in saved} == {(f"{coarse} l=256", 0.75)}


def test_the_goals_of_models() -> None:
    """Of a pair of bounds, the first is for sequences of 1,024 tokens, the second for 4,096."""
    goals = model_goals("float32")
    wanted: dict[tuple[str, ...], list[float]] = {}
    for goal in goals:
        assert goal.timed == BOTH
        wanted.setdefault((goal.contender, goal.figure, goal.other), []).append(goal.bound)
    topk, aoe = "ours, topk", ("aoe, aux loss, full gradient", "aoe, by bias, selected gradient")
    assert wanted == {
        (topk, SPEED, "HF Mixtral grouped_mm"): [1.2, 1.2],
        (topk, SPEED, "Megatron GPTModel"): [1.6, 4.0],
        (topk, SAVED, "HF Mixtral grouped_mm"): [0.7, 0.7],
        (aoe[0], SPEED, "topk, aux loss"): [0.97, 0.97],
        (aoe[0], PEAK, "topk, aux loss"): [1.0, 1.0],
        (aoe[1], SPEED, "topk, by bias"): [0.99, 0.99],
        (aoe[1], PEAK, "topk, by bias"): [1.0, 1.0],
    }


GROWTH = GrowthGoal(
    op="permute",
    timed=FORWARD,
    size="T=8 d=4",
    dtype="float32",
    figure=TOKEN_TIME,
    bound=1.3,
    other="ours",
    before="T=2 d=4",
    tokens=8,
    before_tokens=2,
)


@pytest.mark.parametrize(
    ("figure", "long", "met", "said"),
    [
        (TOKEN_TIME, result("ours", 5), True, "ours: 1.250x the time of a token at T=2 d=4 (goal"),
        (TOKEN_TIME, result("ours", 6), False, "1.500x the time of a token at T=2 d=4 (goal <= 1."),
        (TOKEN_SAVED, result("ours", 9, saved_bytes=96), True, "1.200x the saved bytes of a token"),
        (TOKEN_SAVED, result("ours", 9, saved_bytes=112), False, "(goal <= 1.300x: 7.7% over)"),
        (TOKEN_TIME, result("ours", absent="no GPU"), None, "ours is absent: no GPU"),
    ],
)
def test_what_a_token_takes_in_two_rows(
    figure: str, long: BenchResult, met: bool | None, said: str
) -> None:
    short = row(result("ours", 1, saved_bytes=20), size="T=2 d=4")
    verdict = judge(replace(GROWTH, figure=figure), [short, row(long)])
    assert verdict.met is met and said in str(verdict)


def test_of_two_rows_at_one_place_the_first_counts() -> None:
    first = row(result("ours", 1, 1, 1), result("loop", 4, 4, 4))
    of_curve = row(result("ours", 3, 3, 3))
    assert judge(SPEED_GOAL, [first, of_curve]).value == pytest.approx(4)


def test_growth_needs_both_rows() -> None:
    verdict = judge(GROWTH, [row(result("ours", 5))])
    assert verdict.met is None and verdict.reason == "the other row was not part of this run"


@pytest.mark.parametrize(
    ("curve", "figure", "bound", "before_tokens", "tokens"),
    [("sequence", TOKEN_SAVED, 1.05, 1024, 8192), ("experts", TOKEN_TIME, 1.3, 2048, 2048)],
)
def test_the_goals_of_curves(
    curve: str, figure: str, bound: float, before_tokens: int, tokens: int
) -> None:
    (goal,) = model_goals("float32", [curve])
    assert isinstance(goal, GrowthGoal)
    assert {goal.before, goal.size} < set(map(str, SIZES[curve]))
    assert (goal.before_tokens, goal.tokens) == (before_tokens, tokens)
    assert (goal.figure, goal.bound, goal.other) == (figure, bound, goal.contender)
    short = row(result(goal.contender, 1, saved_bytes=10), op="model", timed=BOTH, size=goal.before)
    long = row(result(goal.contender, 9, saved_bytes=60), op="model", timed=BOTH, size=goal.size)
    grown = 6 if figure == TOKEN_SAVED else 9
    assert judge(goal, [short, long]).value == pytest.approx(grown * before_tokens / tokens)


def test_every_goal_names_a_row_that_is_measured() -> None:
    from tools.bench.sizes import GOALS, sizes_of

    for device in ("cpu", "cuda"):
        sizes = sizes_of(GOALS, device)
        for goal in goals_of(device):
            assert goal.size in map(str, sizes[goal.op]), goal.title


def test_equal_parameters() -> None:
    """d_wide of the AoE paper's sizes: 3 d f = d l + w (2 d + l), within half of 64 columns."""
    for low in (64, 128, 256, 512):
        size = BenchSize(d=768, f=3072, l=low)
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
