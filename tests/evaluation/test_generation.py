"""Generated tokens are those the model finds probable, and Lory merges once per prompt."""

import itertools

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.evaluation.generation import generate
from moe_parallel.experts.merged import MergedExperts
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.standalone import standalone_config, standalone_model
from tests.distributed import run_distributed
from tests.program import SMALL, flags

VOCABULARY = 20
PROMPT = [3, 7, 1, 19, 4]
LORY = {"expert_selection": "lory", "init_method_std": 0.3}


def _model(options):
    config = standalone_config(flags(SMALL | {"init_method_std": 0.3} | options))
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(config.training.seed)
    model, _ = standalone_model(config, VOCABULARY, groups)
    return model


def _go_on(model, temperature, count, seed=0):
    tokens = generate(model, PROMPT, VOCABULARY, temperature, torch.Generator().manual_seed(seed))
    return list(itertools.islice(tokens, count))


def _greedy(options):
    """The generated tokens, and the most probable token after each prefix of the result."""
    model = _model(options)
    written = _go_on(model, 0.0, 6)
    whole = torch.tensor([PROMPT + written])
    with torch.no_grad():
        logits = model(whole, torch.arange(whole.shape[1])[None], None)[0, :, :VOCABULARY]
    destroy_groups()
    return written, logits.argmax(dim=1)[len(PROMPT) - 1 : -1].tolist()


@pytest.mark.parametrize("options", [{}, {"expert_selection": "aoe", "aoe_low_rank_size": 8}])
def test_without_temperature_the_most_probable_token_follows(options):
    # Both systems are causal, so one pass over the result shows every prefix.
    ((written, expected),) = run_distributed(1, _greedy, options)
    assert written == expected


def _drawn():
    model = _model({})
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]), torch.arange(len(PROMPT))[None], None)[0, -1]
    wanted = torch.softmax(logits[:VOCABULARY] / 2.0, dim=0)
    firsts = [_go_on(model, 2.0, 1, seed)[0] for seed in range(300)]
    again = _go_on(model, 2.0, 5, 7), _go_on(model, 2.0, 5, 7)
    destroy_groups()
    return firsts, wanted.tolist(), again


def test_tokens_are_drawn_by_their_probabilities():
    ((firsts, wanted, again),) = run_distributed(1, _drawn)
    assert again[0] == again[1]
    assert max(firsts) < VOCABULARY  # padding tokens are never generated
    for token, probability in enumerate(wanted):
        spread = (300 * probability * (1 - probability)) ** 0.5
        assert abs(firsts.count(token) - 300 * probability) < 5 * spread + 1


def _merges(options):
    """For each generated token, the weights with which the first layer merged its experts."""
    model = _model(LORY | options)
    seen = []
    (layer, *_) = (each for each in model.modules() if isinstance(each, MergedExperts))
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1].detach()))
    steps = []
    for _ in itertools.islice(generate(model, PROMPT, VOCABULARY, 0.0, torch.Generator()), 4):
        steps.append(torch.cat(seen))
        seen.clear()
    destroy_groups()
    return [step.tolist() for step in steps]


def test_lory_merges_by_the_prompt_for_all_that_follows():
    by_prompt = {"lory_segment_length": len(PROMPT), "lory_inference": "prompt"}
    (steps,) = run_distributed(1, _merges, by_prompt)
    (first,) = steps[0]
    assert len(steps) == 4
    for step in steps:
        for weights in step:
            assert weights == pytest.approx(first, rel=1e-5)
    ((*_, last),) = run_distributed(1, _merges, {"lory_segment_length": 2})
    assert len(last) > 2 and last[-1] != pytest.approx(last[1], rel=1e-3)
