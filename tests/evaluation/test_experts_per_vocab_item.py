"""Experts per vocabulary item, compared with a numpy search on the layers' inputs."""

import collections
import math

import numpy
import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.evaluation.experts_per_vocab_item import ItemCounts, experts_per_vocab_item
from moe_parallel.layers import DispatchedLayer
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.standalone import standalone_config, standalone_model
from tests.distributed import run_distributed
from tests.oracles import routing as oracle
from tests.program import SMALL, flags

VOCABULARY = 12
TOP_P = {"expert_selection": "top_p", "moe_top_p": 0.5, "init_method_std": 0.5}
SYSTEMS = {
    "top_p": TOP_P,
    "a dense layer, another p": TOP_P | {"moe_layer_freq": "[0,1]", "moe_inference_top_p": 0.8},
    "topk": {},
    "a balancing bias": {"moe_router_enable_expert_bias": True},
    "dense": {"num_experts": None, "moe_ffn_hidden_size": None},
}


def _batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        tokens = torch.randint(VOCABULARY - 1, (2, 8), generator=generator)  # one item never occurs
        mask = torch.ones(2, 8)
        mask[1, 5:] = 0
        yield {"tokens": tokens, "position_ids": torch.arange(8).expand(2, 8), "loss_mask": mask}


def _both(name):
    """(tokens, experts) per item, as counted, and as computed from the inputs of the layers."""
    options = SMALL | SYSTEMS[name]
    config = standalone_config(flags(options))
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(config.training.seed)
    model, _ = standalone_model(config, VOCABULARY, groups)
    counted = experts_per_vocab_item(model, _batches(), VOCABULARY)
    layers = [layer for layer in model.modules() if isinstance(layer, DispatchedLayer)]

    given: list[torch.Tensor] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].detach()))
    tokens, experts = collections.Counter(), collections.Counter()
    for batch in _batches():
        given.clear()
        with torch.no_grad():
            model(batch["tokens"], batch["position_ids"], None)
        for s in range(8):
            for b in range(2):
                if layers and batch["loss_mask"][b, s]:
                    item = int(batch["tokens"][b, s])
                    tokens[item] += 1
                    pairs = zip(layers, given, strict=True)
                    chosen = [_chosen(layer, x[s, b], options) for layer, x in pairs]
                    experts[item] += sum(chosen) / len(chosen)
    destroy_groups()
    items = range(VOCABULARY)
    found = [tokens[item] for item in items], [experts[item] for item in items]
    return (counted.tokens_V.tolist(), counted.experts_V.tolist()), found


def _chosen(layer, x_D, options) -> int:
    p = options.get("moe_inference_top_p") or options.get("moe_top_p")
    if p is None:
        return 2
    logits = numpy.array([[row @ x_D.numpy() for row in layer.w_router_ED.detach().numpy()]])
    return len(oracle.top_p(logits, p).experts[0])


@pytest.mark.parametrize("name", SYSTEMS)
def test_counts_equal_a_search(name):
    ((tokens, experts), (expected_tokens, expected_experts)) = run_distributed(1, _both, name)[0]
    assert tokens == expected_tokens
    assert experts == pytest.approx(expected_experts)
    assert tokens[-1] == 0 and math.fsum(tokens) == (0 if name == "dense" else 3 * 13)
    if "p" in SYSTEMS[name].get("expert_selection", ""):
        assert len({e / t for e, t in zip(experts, tokens, strict=True) if t}) > 2  # items differ


def test_items_are_ranked_and_rare_ones_left_out():
    counts = ItemCounts(torch.tensor([4, 0, 10, 3, 4]), torch.tensor([8.0, 0, 30, 9, 12]))
    assert counts.experts_per_token(4) == [(2, 10, 3.0), (4, 4, 3.0), (0, 4, 2.0)]
    assert counts.experts_per_token(0)[-1] == (0, 4, 2.0)
    assert counts.experts_per_token(11) == []
