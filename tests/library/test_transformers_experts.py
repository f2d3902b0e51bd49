"""experts_implementation="moe_parallel" equals "eager", transformers' own loop over the experts."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_parallel import register_experts
from moe_parallel.errors import InputError
from moe_parallel.ops import extension
from tests.tiers import rest_in_full

T, K, E, D, F = 19, 3, 7, 16, 24
OURS = "moe_parallel"
transformers = pytest.importorskip(
    "transformers", reason="transformers: pip install -e '.[huggingface]'"
)
MODELS = Path(transformers.__file__).parent / "models"
FAMILIES = sorted(
    path.parent.name
    for path in MODELS.glob("*/modeling_*.py")
    if "\n@use_experts_implementation" in path.read_text()
)
#: Halves and interleaved columns, both layouts, biases, no gate, a norm, other activations.
QUICK = ("mixtral", "qwen3_moe", "gpt_oss", "aria", "nemotron_h", "muse_spark", "deepseek_v4")


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_experts()


class Sizes:
    """A configuration of the experts of any family: small numbers, whatever their names."""

    _experts_implementation = "eager"

    def __init__(self, activation: str = "silu") -> None:
        self.activation = activation

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        by_part = {"experts": E, "intermediate": F, "act": self.activation, "hidden": D}
        by_part |= {"latent": None}
        return next((size for part, size in by_part.items() if part in name), 0.5)


def experts_of(family: str, activation: str = "silu") -> list[Any]:
    """Each class of experts that the family has, with weights."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    kinds = [
        kind
        for kind in vars(module).values()
        if hasattr(kind, "_apply_gate") and kind.__module__ == module.__name__
    ]
    torch.manual_seed(0)
    found = [kind(Sizes(activation)) for kind in kinds]
    for weight in nn.ModuleList(found).parameters():
        nn.init.normal_(weight, std=0.3)
    return found


def choices(tokens: int = T, k: int = K) -> tuple[Tensor, Tensor]:
    """Experts, of which the last two are not chosen, and their probs."""
    probs, experts = torch.rand(tokens, E - 2).softmax(-1).topk(k)
    return experts, probs


def passes(experts: Any, implementation: str, *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of x, the probs and the weights, for x, experts and probs."""
    experts.config._experts_implementation = implementation
    x, chosen, probs = inputs
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    y = experts(x, chosen, probs)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return [y, *torch.autograd.grad(y, (x, probs, *experts.parameters()), dy)]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for actual, expected in zip(found, wanted, strict=True):
        scale = float(expected.detach().abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("family", rest_in_full(FAMILIES, *QUICK))
def test_every_family(family: str) -> None:
    found = experts_of(family)
    assert found
    for experts in found:
        inputs = torch.randn(T, D), *choices()
        ours = passes(experts, OURS, *inputs)
        assert_equal(ours, passes(experts, "eager", *inputs))
        # A gradient in another layout would be copied to that of the weight.
        assert all(gradient.is_contiguous() for gradient in ours[3:])


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_choices_of_other_ranks(family: str) -> None:
    """With expert parallelism they have the number of experts here, and no weight."""
    (experts,) = experts_of(family)
    experts._is_expert_parallel = True
    chosen, probs = choices()
    elsewhere = torch.rand(T, K) < 0.4
    elsewhere[3] = True
    inputs = (torch.randn(T, D), chosen.masked_fill(elsewhere, E), probs.masked_fill(elsewhere, 0))
    found = passes(experts, OURS, *inputs)
    assert_equal(found, passes(experts, "grouped_mm", *inputs))
    assert not found[0][3].any()


@pytest.mark.parametrize(
    ("family", "autocast"), [("gpt_oss", False), ("mixtral", True), ("nemotron_h", True)]
)
def test_bf16_is_no_worse_than_eager(family: str, autocast: bool) -> None:
    """The error is at most twice that of eager; the exact values are eager's in fp32."""
    (experts,) = experts_of(family)
    x, chosen, probs = (torch.randn(200, D), *choices(200))
    if not autocast:
        experts, x = experts.bfloat16(), x.bfloat16()
    found, eager = (_under(autocast, experts, each, x, chosen, probs) for each in (OURS, "eager"))
    exact = passes(experts.float(), "eager", x.float(), chosen, probs)
    for actual, of_eager, wanted in zip(found, eager, exact, strict=True):
        assert actual.dtype == of_eager.dtype
        assert (actual - wanted).norm() <= 2 * (of_eager - wanted).norm()


def _under(autocast: bool, *arguments: Any) -> list[Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return passes(*arguments)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_frozen_weights(family: str) -> None:
    """The gradients of x and the probs, as an adapter beside frozen experts needs them."""
    (experts,) = experts_of(family)
    inputs = torch.randn(T, D), *choices()
    wanted = passes(experts, "eager", *inputs)[:3]
    experts.requires_grad_(False)
    experts.config._experts_implementation = OURS
    x, chosen, probs = inputs[0].requires_grad_(), inputs[1], inputs[2].requires_grad_()
    y = experts(x, chosen, probs)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
    assert_equal([y, *torch.autograd.grad(y, (x, probs), dy)], wanted)


def small_model(kind: str) -> Any:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_local_experts": 6,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def logits_and_gradients(model: Any, run: Any, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    found = run(input_ids=tokens, labels=tokens)
    found.loss.backward()
    return [found.logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_models(kind: str) -> None:
    """Training, with gradient checkpointing too, and generation."""
    model = small_model(kind)
    tokens = torch.randint(64, (2, 11))
    model.set_experts_implementation("eager")
    wanted = logits_and_gradients(model, model, tokens)
    text = model.generate(tokens, max_new_tokens=5, do_sample=False)
    model.set_experts_implementation(OURS)
    assert_equal(logits_and_gradients(model, model, tokens), wanted)
    assert model.generate(tokens, max_new_tokens=5, do_sample=False).equal(text)
    model.train()
    model.activation_checkpointing_enable()
    assert_equal(logits_and_gradients(model, model, tokens), wanted)


@pytest.mark.parametrize("backend", rest_in_full(["aot_eager", "inductor"], "aot_eager"))
def test_one_graph(backend: str) -> None:
    model = small_model("Qwen3Moe")
    tokens = torch.randint(64, (2, 11))
    model.set_experts_implementation(OURS)
    wanted = logits_and_gradients(model, model, tokens)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_equal(logits_and_gradients(model, compiled, tokens), wanted)


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "is_built", lambda: False)
    with pytest.raises(InputError, match=r"needs the C\+\+ extension, .* build it with `make"):
        register_experts()
