"""Experts in FP8 compared with the same experts in bf16, and the errors if FP8 is unavailable.

On a CPU a replacement for Transformer Engine is used; the tests marked gpu run the real one.
"""

import sys

import pytest
import torch

from moe_parallel.config import Fp8Config
from moe_parallel.errors import InputError
from moe_parallel.experts.fp8 import Fp8Engine, low_rank_experts, swiglu_experts
from moe_parallel.ops import extension, select_backend
from moe_parallel.optional import INSTALL
from moe_parallel.parallel import groups_of_one
from tests.experts import fp8_stand_in

E, D, F, R, TOKENS, K = 4, 128, 256, 128, 50, 2
RECIPES = ("delayed", "tensorwise", "blockwise")
BACKENDS = ["reference"] + ["native"] * extension.is_built()
KINDS = ("swiglu", "low_rank", "low_rank with C")
# Rounding to e4m3 moves values by about 3% (root mean square), to e5m2 by 5%. The gradient with
# the longest path contains a dozen roundings. Wrong matrices would be off by 100%.
ROUNDED, CLOSE = 1e-3, 0.05 * 12**0.5


@pytest.fixture
def stand_in(monkeypatch):
    for name, module in fp8_stand_in.stand_in_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield
    fp8_stand_in.forget()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine_of(request):
    """A function of the options; on a GPU of the real Transformer Engine."""
    name = "transformer_engine"
    if request.param == "cpu":
        request.getfixturevalue("stand_in")
    real = pytest.importorskip(f"{name}.pytorch", reason=f"Transformer Engine: {INSTALL[name]}")

    def make(**options):
        config = Fp8Config(fp8_format="hybrid", **options)
        by_block = config.fp8_recipe == "blockwise"
        can = real.is_fp8_block_scaling_available if by_block else real.is_fp8_available
        able, reason = can(return_reason=True)
        if not able:
            pytest.skip(f"this GPU cannot: {reason}")
        return Fp8Engine(config, None)

    make.device = request.param
    return make


def experts(kind, engine, backend="reference", device="cpu"):
    groups = groups_of_one()
    ops = select_backend(backend)
    with torch.device(device):
        if kind == "swiglu":
            made = swiglu_experts(engine)(E, D, F, groups, ops, torch.bfloat16)
        else:
            made = low_rank_experts(engine)(E, D, R, F, groups, ops, torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return made


def compute(kind, made, engine, device="cpu"):
    """The output and gradients of a batch in which expert 2 has no tokens."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, D, generator=generator).bfloat16()
    w_down = (torch.randn(E, D, R, generator=generator) * 0.1).bfloat16()
    probs = torch.rand(TOKENS, K, generator=generator)
    chosen = torch.tensor([0, 1, 3])[torch.randint(0, 3, (TOKENS, K), generator=generator)]
    chosen[0] = -1  # dropped
    leaves = [t.to(device).requires_grad_() for t in (x, probs, w_down)]
    x, probs, w_down = leaves
    row_map = made.ops.routing_map(chosen.to(device), E)
    given = [x, probs, row_map]
    if kind != "swiglu":
        given.append(w_down)
    if kind == "low_rank with C":
        c = torch.einsum("td,edr->ter", x, w_down)
        index = chosen.to(device).clamp(min=0).unsqueeze(-1).expand(-1, -1, R)
        given.append(c.gather(1, index))
    if engine is None:
        y = made(*given)
    else:
        with engine.model_region():
            y = made(*given)
    y.float().square().sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [y.detach(), *gradients, *(weight.grad for weight in made.parameters())]


def relative_error(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_is_bf16_up_to_the_rounding(engine_of, recipe, kind, backend):
    engine, device = engine_of(fp8_recipe=recipe), engine_of.device
    made, plain = (experts(kind, each, backend, device) for each in (engine, None))
    compute(kind, made, engine, device)  # delayed scaling computes its scales
    made.zero_grad()
    found, expected = compute(kind, made, engine, device), compute(kind, plain, None, device)
    assert len(found) == len(expected)
    for mine, its in zip(found, expected, strict=True):
        assert mine.shape == its.shape and mine.dtype == its.dtype
        assert ROUNDED < relative_error(mine, its) < CLOSE


@pytest.mark.parametrize("kind", ["swiglu", "low_rank"])
def test_weights_are_those_of_bf16(stand_in, kind):
    engine = Fp8Engine(Fp8Config(fp8_format="e4m3"), None)
    made, plain = experts(kind, engine), experts(kind, None)
    shapes = [
        {name: (p.shape, p.dtype, p.is_contiguous()) for name, p in e.named_parameters()}
        for e in (made, plain)
    ]
    assert shapes[0] == shapes[1]
    assert not list(made.buffers()) and not list(made.children())
    saved, expected = made.sharded_state_dict("x."), plain.sharded_state_dict("x.")
    assert saved.keys() == expected.keys()
    for name in saved:
        assert saved[name].key == expected[name].key
        assert saved[name].global_shape == expected[name].global_shape


def test_state_of_delayed_scaling_goes_into_a_new_engine(engine_of):
    options = {"fp8_amax_history_len": 3, "fp8_amax_compute_algo": "max", "fp8_margin": 1}
    first, device = engine_of(**options), engine_of.device
    made = experts("swiglu", first, device=device)
    compute("swiglu", made, first, device)
    state = first.state()
    made.zero_grad()
    expected = compute("swiglu", made, first, device)

    fp8_stand_in.forget()
    second = engine_of(**options)
    again = experts("swiglu", second, device=device)
    second.load_state(state)
    for mine, its in zip(compute("swiglu", again, second, device), expected, strict=True):
        assert torch.equal(mine, its)
    assert second.state_facts == {"recipe": "delayed", "amax_history_len": 3}
    assert all(torch.equal(t, first.state()[name]) for name, t in second.state().items())
    if device == "cpu":
        # The layer of W_o of expert 1: its weight's slot has the maximum, halved by the margin.
        weight = again.w_out_LFD[1].abs().max().float()
        assert state["1.scaling_fwd.scale"][4] == 448 / weight / 2


def test_an_evaluation_leaves_the_state_alone(stand_in):
    engine = Fp8Engine(Fp8Config(fp8_format="hybrid", fp8_amax_history_len=2), None)
    made = experts("swiglu", engine)
    compute("swiglu", made, engine)
    before = engine.state()
    row_map = made.ops.routing_map(torch.randint(0, E, (TOKENS, K)), E)
    with torch.no_grad(), engine.model_region():
        made(100 * torch.randn(TOKENS, D).bfloat16(), torch.ones(TOKENS, K), row_map)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state().items())


FORMAT = Fp8Config(fp8_format="hybrid")


def test_where_it_is_missing_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(InputError) as raised:
        Fp8Engine(FORMAT, None)
    assert str(raised.value).startswith("--fp8-format hybrid needs transformer_engine, which is ")
    assert str(raised.value).endswith(INSTALL["transformer_engine"])


@pytest.mark.parametrize(
    ("recipe", "asked"),
    [("delayed", "is_fp8_available"), ("blockwise", "is_fp8_block_scaling_available")],
)
@pytest.mark.parametrize("raises", [False, True])
def test_a_gpu_that_cannot_is_refused_in_its_own_words(
    stand_in, monkeypatch, recipe, asked, raises
):
    def answer(return_reason):
        if raises:
            raise RuntimeError("no device")
        return False, "no device"

    monkeypatch.setattr(fp8_stand_in, asked, answer)
    with pytest.raises(
        InputError, match=f"^--fp8-format hybrid --fp8-recipe {recipe} .*no device.*: use a GPU"
    ):
        Fp8Engine(Fp8Config(fp8_format="hybrid", fp8_recipe=recipe), None)
