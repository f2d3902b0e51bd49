"""Traced selections, compared with a numpy search on the inputs of the layers."""

from types import SimpleNamespace

import numpy
import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.evaluation.model import ReadingModel
from moe_parallel.evaluation.selection_trace import batches_of_rank, expert_layers, selections_of
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.standalone import standalone_config, standalone_model
from tests.distributed import run_distributed
from tests.oracles import routing as oracle
from tests.program import AOE, SMALL, flags

VOCABULARY = 12
LENGTH, SEQUENCES = 8, 2
LARGE = {"init_method_std": 0.5}
SYSTEMS = {
    "topk": LARGE,
    "bias": LARGE | {"moe_router_enable_expert_bias": True},
    "a capacity": LARGE | {"moe_expert_capacity_factor": 0.5},
    "aoe": LARGE | AOE,
    "top_p": LARGE | {"expert_selection": "top_p", "moe_top_p": 0.5, "moe_layer_freq": "[0,1]"},
    "lory": LARGE | {"expert_selection": "lory", "lory_segment_length": 3},
    "smear": LARGE | {"expert_selection": "smear", "smear_sees_the_future": True},
}


def _batches():
    """Two batches; the second sequence of each has 5 tokens, the last batch one sequence."""
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
        mask = torch.ones(SEQUENCES, LENGTH)
        mask[1, 0 if number else 5 :] = 0
        positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
        yield {"tokens": tokens, "position_ids": positions, "loss_mask": mask}


def _traced(name):
    """What a search finds, what was traced, and whether the model is as before."""
    options = SMALL | SYSTEMS[name]
    config = standalone_config(flags(options))
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(config.training.seed)
    model, _ = standalone_model(config, VOCABULARY, groups)
    layers = expert_layers(model)
    for layer in layers:
        if getattr(layer, "bias", None) is not None:
            layer.bias.bias_E.copy_(torch.tensor([0.0, 10.0, 0.0, 0.0]))
    model.eval()
    before = {key: value.clone() for key, value in model.state_dict().items() if value is not None}
    outputs = _outputs(model)
    rules = [layer.evaluation_rule for layer in layers]

    whole = ReadingModel(model, groups, config, VOCABULARY)
    numbered = ((SEQUENCES * number, batch) for number, batch in enumerate(_batches()))
    found = list(selections_of(whole, numbered, "a text"))

    after = model.state_dict()
    same = all(torch.equal(value, after[key]) for key, value in before.items())
    same &= torch.equal(outputs, _outputs(model))
    same &= all(a.evaluation_rule is rule for a, rule in zip(layers, rules, strict=True))
    same &= not any("merges" in layer.__dict__ for layer in layers)
    given: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach()))
    _outputs(model)
    weights = [_weights(layer) for layer in layers]
    destroy_groups()
    return [x.numpy() for x in given], weights, found, same, options


def _outputs(model):
    with torch.no_grad():
        outputs = [model(each["tokens"], each["position_ids"], None) for each in _batches()]
    return torch.stack(outputs)


def _weights(layer):
    name = "w_router_ED" if hasattr(layer, "w_router_ED") else "w_down_ERD"
    found = dict(layer.named_parameters())
    match = [value for key, value in found.items() if name.rsplit("_", 1)[0] in key]
    return match[0].detach().numpy()


def _scores(x_D, weight):
    if weight.ndim == 2:
        return weight @ x_D
    axis = weight.shape.index(len(x_D), 1)
    return numpy.linalg.norm(numpy.tensordot(weight, x_D, (axis, 0)), axis=1)


def _traced_all():
    return {name: _traced(name) for name in SYSTEMS}


@pytest.fixture(scope="module")
def traced():
    (found,) = run_distributed(1, _traced_all)
    return found


@pytest.fixture(params=["topk", "aoe", "top_p", "bias", "a capacity"])
def dispatched(request, traced):
    return request.param, *traced[request.param]


def test_choices_of_each_token(dispatched):
    name, given, weights, found, same, options = dispatched
    assert same
    layers = len(weights)
    for number, (batch, selections) in enumerate(zip(_batches(), found, strict=True)):
        read = [(0, s) for s in range(8)] + ([] if number else [(1, s) for s in range(5)])
        assert selections.text == "a text" and len(selections) == len(read)
        assert selections.sample_T.tolist() == [2 * number + b for b, _ in read]
        assert selections.position_T.tolist() == [s for _, s in read]
        assert selections.token_T.tolist() == [int(batch["tokens"][b, s]) for b, s in read]
        assert [each.layer for each in selections.layers] == ([2] if name == "top_p" else [1, 2])
        for place, layer in enumerate(selections.layers):
            x_SBD = given[number * layers + place]
            for row, (b, s) in enumerate(read):
                scores = _scores(x_SBD[s, b].astype(float), weights[place].astype(float))
                wanted = _choice(scores, name, options)
                experts = layer.experts_TK[row]
                assert [e for e in experts.tolist() if e >= 0] == wanted
                p = numpy.exp(scores - scores.max()) / numpy.exp(scores - scores.max()).sum()
                entropy = -(p * numpy.log(numpy.maximum(p, 1e-300))).sum()
                assert layer.entropy_T[row] == pytest.approx(entropy, rel=1e-3, abs=1e-5)


def _choice(scores, name, options):
    if name == "top_p":
        return oracle.top_p(scores[None], options["moe_top_p"]).experts[0]
    bias = numpy.array([0.0, 10, 0, 0]) if name == "bias" else None
    rank_by = "probabilities" if name == "bias" else "scores"
    return oracle.top_k(scores[None], 2, bias=bias, rank_by=rank_by).experts[0]


def test_drops(dispatched):
    name, _, _, found, _, _ = dispatched
    for layer in found[0].layers:
        if name != "a capacity":
            assert not layer.dropped_T.any()
            continue
        # 16 tokens, of which 3 are not read, and 4 experts with ceil(16 * 2 / 4 * 0.5) = 4 rows
        counts = layer.shares_E()
        kept = (layer.experts_TK >= 0).sum() - layer.dropped_T.sum()
        assert kept <= 16 and layer.dropped_T.sum() >= max(0, (counts - 4).max())
        assert set(layer.dropped_T.tolist()) <= {0, 1, 2} and layer.dropped_T.any()


@pytest.mark.parametrize("name", ["lory", "smear"])
def test_weights_of_merged_experts(name, traced):
    given, weights, found, same, _ = traced[name]
    assert same
    for number, selections in enumerate(found):
        for place, layer in enumerate(selections.layers):
            x_SBD = given[2 * number + place].astype(float)
            for row in range(8):  # the tokens of the first sequence
                weight_E = layer.weights_PE[layer.merge_T[row]]
                expected = _merge_weights(name, x_SBD[:, 0], weights[place].astype(float), row)
                assert weight_E == pytest.approx(expected, rel=1e-4)
                assert layer.best_T()[row] == expected.argmax()


def _merge_weights(name, x_SD, w_ED, token):
    """Lory's segments have 3 tokens, and each uses the mean of the one before."""
    if name == "smear":
        mean_D = _normed(x_SD.mean(axis=0))
        logits = _normed(w_ED) @ mean_D / len(mean_D) ** 0.5
    else:
        first = 3 * max(0, token // 3 - 1)
        logits = w_ED @ x_SD[first : first + 3].mean(axis=0)
    weights = numpy.exp(logits - logits.max())
    return weights / weights.sum()


def _normed(x_XD):
    centered = x_XD - x_XD.mean(axis=-1, keepdims=True)
    return centered / numpy.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5)


def test_ranks_take_turns_and_read_as_many() -> None:
    batches = [
        {"tokens": torch.full((3, 2), number), "loss_mask": torch.ones(3, 2)} for number in range(5)
    ]

    def read(rank: int, ranks: int) -> list[tuple[int, int, bool]]:
        """(first sequence, batch, whether it counts) of each pass."""
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
        return [
            (first, int(batch["tokens"][0, 0]), bool(batch["loss_mask"].all()))
            for first, batch in batches_of_rank(iter(batches), group)  # type: ignore[arg-type]
        ]

    assert read(0, 2) == [(0, 0, True), (6, 2, True), (12, 4, True)]
    assert read(1, 2) == [(3, 1, True), (9, 3, True), (12, 4, False)]
    assert read(5, 8) == [(12, 4, False)]
