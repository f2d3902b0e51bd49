"""Generated tokens are those of the whole text, with a cache as without, in batches and alone."""

import pytest
import torch

from moe_parallel.experts.merged import MergedExperts
from moe_parallel.generation.decode import Generation, Reuse
from moe_parallel.generation.sampling import Sampler, Sampling
from moe_parallel.parallel import destroy_groups
from tests import systems
from tests.distributed import run_distributed
from tests.generation.small_models import PROMPTS, VOCABULARY, small_model
from tests.tiers import rest_in_full, selected_values

NEW = 6
GREEDY = Sampling(temperature=0)
SAMPLED = Sampling(temperature=1.5, top_k=12, repetition_penalty=1.2)

LORY = {"expert_selection": "lory", "lory_segment_length": 4}
#: Models besides those of tests/systems.py.
MORE = {
    "dense": {"num_experts": None, "moe_ffn_hidden_size": None},
    "lory, by the prompt": LORY | {"lory_inference": "prompt"},
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    "forced": {"moe_router_force_routing": "hot:0.5"},
    "multi-head attention": {"num_query_groups": 4, "untie_embeddings_and_output_weights": True},
}
MODELS = {name: systems.options(name) for name in systems.SYSTEMS} | MORE

#: One of each kind; the quick tier leaves the other variants out.
QUICK = [
    "topk, sigmoid, groups, bias, shared expert",
    "top_p",
    "expert_choice",
    "aoe",
    "segment_expert_choice",
    "lory",
    "lory, uniform first segment",
    "lory, by the prompt",
    "lory_prefix",
    "smear",
    "capacity",
]


def go_on(model, prompts, sampling, *, cache, numbers=None, count=NEW):
    """`count` tokens for each prompt; the last text gets only half of them."""
    reuse = Reuse.of(model.config, cache=cache)
    sampler = Sampler(sampling, seed=1, numbers=numbers or range(len(prompts)))
    places = max(map(len, prompts)) + count
    generation = Generation(model, prompts, sampler, reuse, places)
    written = [[] for _ in prompts]
    while generation:
        for number, token in generation.step():
            written[number].append(token)
        last = len(prompts) - 1
        most = [count // 2 if number == last else count for number in range(len(prompts))]
        generation.finish([n for n, text in enumerate(written) if len(text) >= most[n]])
    return written


def directly(model, prompt, count=NEW):
    """The most probable tokens, from the logits of the whole text each time."""
    tokens = list(prompt)
    for _ in range(count):
        whole = torch.tensor([tokens])
        with torch.no_grad():
            logits = model.chunk(whole, torch.arange(len(tokens))[None], None)
        tokens.append(int(logits[0, -1, :VOCABULARY].argmax()))
    return tokens[len(prompt) :]


def _computed_tokens(model, work):
    """The result of `work()`, and the number of tokens that the model computed for it."""
    counts = []
    hook = model.chunk.embedding.register_forward_hook(
        lambda module, inputs, output: counts.append(output.shape[0] * output.shape[1])
    )
    result = work()
    hook.remove()
    return result, sum(counts)


def _every_way(names):
    found = {}
    for name in names:
        model = small_model(MODELS[name])
        cached, tokens = _computed_tokens(
            model, lambda model=model: go_on(model, PROMPTS, GREEDY, cache=True)
        )
        alone = [
            go_on(model, [prompt, prompt], SAMPLED, cache=False, numbers=[number, number])[0]
            for number, prompt in enumerate(PROMPTS)
        ]
        found[name] = {
            "cached": cached,
            "uncached": go_on(model, PROMPTS, GREEDY, cache=False),
            "sampled": go_on(model, PROMPTS, SAMPLED, cache=True),
            "sampled alone": alone,
            "directly": [directly(model, prompt) for prompt in PROMPTS],
            "computed": tokens,
        }
        destroy_groups()
    return found


@pytest.fixture(scope="module")
def ways(request):
    """By model; models of the full tier are left out if none of their tests runs."""
    names = sorted({*QUICK, *selected_values(request, "name", MODELS)})
    (found,) = run_distributed(1, _every_way, names)
    return found


every_model = pytest.mark.parametrize("name", rest_in_full(MODELS, *QUICK))


@every_model
def test_the_cache_changes_no_token(ways, name):
    assert ways[name]["cached"] == ways[name]["uncached"]
    assert [len(text) for text in ways[name]["cached"]] == [NEW, NEW, NEW, NEW // 2]


@every_model
def test_what_is_drawn_for_a_text_depends_on_no_other(ways, name):
    half = NEW // 2
    *whole, last = ways[name]["sampled"]
    assert whole == ways[name]["sampled alone"][:-1]
    assert last == ways[name]["sampled alone"][-1][:half]
    assert ways[name]["sampled"] != ways[name]["cached"]


@every_model
def test_tokens_are_the_most_probable_after_the_whole_text(ways, by_the_prompt, name):
    *whole, last = ways[name]["cached"]
    directly = by_the_prompt if name == "lory, by the prompt" else ways[name]["directly"]
    assert whole == directly[:-1]
    assert last == directly[-1][: NEW // 2]


@every_model
def test_a_settled_text_costs_a_token_per_step(ways, name):
    prompts = sum(map(len, PROMPTS))
    once_each = prompts + 3 * (NEW - 1) + NEW // 2 - 1
    segments = MODELS[name].get("lory_segment_length")
    if name in ("smear", "capacity", "forced"):
        assert ways[name]["computed"] > 2 * once_each
    elif segments and "uniform" not in name and "by the prompt" not in name:
        # The shortest prompt is computed whole until the first segment is complete.
        again = sum(range(len(PROMPTS[0]) + 1, segments + 1)) - max(segments - len(PROMPTS[0]), 0)
        assert ways[name]["computed"] == once_each + again
    else:
        assert ways[name]["computed"] == once_each


def _by_the_prompt():
    """For each prompt: what is generated, and by a model whose first segment is the prompt."""
    found = []
    for prompt in PROMPTS:
        by_config = LORY | {"lory_segment_length": len(prompt), "lory_inference": "prompt"}
        model = small_model(by_config)
        found.append(directly(model, prompt))
        destroy_groups()
    return found


@pytest.fixture(scope="module")
def by_the_prompt():
    (found,) = run_distributed(1, _by_the_prompt)
    return found


def test_lory_by_the_prompt_is_not_lory_by_the_segment(ways):
    assert ways["lory, by the prompt"]["cached"] != ways["lory"]["cached"]


def _merges():
    """For each merge whose matrices are kept, its weights; and the tokens of two batches."""
    model = small_model(MODELS["lory, by the prompt"])
    seen = []
    layer = next(each for each in model.chunk.modules() if isinstance(each, MergedExperts))
    merged = layer.merged
    layer.merged = lambda weights: (seen.append(weights.tolist()), merged(weights))[1]
    small = go_on(model, PROMPTS[:2], GREEDY, cache=True)
    large = go_on(model, [*PROMPTS[:2]] * 5, GREEDY, cache=True)
    destroy_groups()
    return seen, small, large


def test_experts_are_merged_once_while_the_texts_of_a_batch_stay_the_same():
    ((seen, small, large),) = run_distributed(1, _merges)
    # Once for both texts, and once more when the second is complete; never for ten texts.
    (first, second), (again,) = seen
    assert again == pytest.approx(first, rel=1e-6) and first != pytest.approx(second, rel=1e-3)
    assert large[0] == small[0] and large[1][: NEW // 2] == small[1]


LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "tp, ep": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "etp": {"expert_tensor_parallel_size": 2},
}
#: Models with each kind of layer; merged experts are divided by tp and pp alone.
IN_LAYOUTS = ["topk, sigmoid, groups, bias, shared expert", "aoe", "segment_expert_choice", "lory"]


def in_layout(layout, name):
    merged = "expert" in str(LAYOUTS[layout]) and systems.merges(name)
    return not merged


def _in_layouts(cases):
    found = []
    for name, layout in cases:
        model = small_model(MODELS[name] | LAYOUTS.get(layout, {}))
        found.append(go_on(model, PROMPTS, GREEDY, cache=True))
        destroy_groups()
    return found


CASES = [(name, layout) for name in IN_LAYOUTS for layout in LAYOUTS if in_layout(layout, name)]


@pytest.fixture(scope="module")
def on_two_ranks():
    ranks = run_distributed(2, _in_layouts, CASES)
    assert ranks[0] == ranks[1]
    return dict(zip(CASES, ranks[0], strict=True))


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_layout_changes_no_token(ways, on_two_ranks, name, layout):
    assert on_two_ranks[name, layout] == ways[name]["cached"]
