"""The modeling file as transformers uses it: caches, padding, kernels, gradients, files."""

import ast
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import moe_parallel.hf as hf
from moe_parallel.config import make_config
from moe_parallel.hf import modeling_moe_parallel as modeling
from moe_parallel.hf.modeling_moe_parallel import MoeParallelMergedExperts
from moe_parallel.huggingface.own_model import CODE, rule_fields
from moe_parallel.layers.system import system_of
from moe_parallel.selection.tokens import Tokens
from tests.tiers import rest_in_full

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
VARIANTS = {
    "router": {"n_group": 2, "topk_group": 1, "scoring_func": "sigmoid", "expert_bias": True},
    "norms": {"scores": "norms", "low_rank_size": 6},
    "norms, folded": {"scores": "norms", "low_rank_size": 6, "folded": True},
    "top-p": {"rule": "top_p", "moe_top_p": 0.7, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "factorized": {
        "low_rank_size": 6,
        "router_hidden_size": 10,
        "shared_expert_intermediate_size": 8,
        "shared_expert_gate": True,
        "qk_norm": "all",
        "attention_bias": True,
        "moe_layers": [True, False],
    },
    "merge": {"rule": "merge"},
    "relu": {"rule": "relu", "num_experts_per_tok": 4, "norm_topk_prob": False},
    "norms, margins": {
        "rule": "threshold",
        "scores": "norms",
        "low_rank_size": 6,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "scoring_func": "raw_value",
        "expert_bias": True,
        "threshold": 3.5,
    },
    "hash": {"rule": "hash"},
    "neurons": {"scores": "neurons", "routing_neurons": 3, "expert_bias": True},
    "free": {
        "num_experts_per_tok": 3,  # so that a token of each layer takes the constant expert
        "zero_experts": 1,
        "copy_experts": 1,
        "constant_experts": 1,
        "zero_expert_gate": "renormalize",
    },
    "norms, free": {"scores": "norms", "low_rank_size": 6, "copy_experts": 2, "expert_bias": True},
}
TOKENS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])


def build(variant: str, **more: object) -> hf.MoeParallelForCausalLM:
    torch.manual_seed(1)
    config = hf.MoeParallelConfig(**SHAPE | VARIANTS[variant] | more)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("expert_bias"):
                parameter.copy_(torch.linspace(-0.2, 0.2, len(parameter)))
            if name.endswith("expert_table"):  # another one than that of a new model
                parameter.copy_((3 * parameter + torch.arange(len(parameter))[:, None] // 3) % 4)
    return model


@pytest.mark.parametrize(
    "variant", rest_in_full(VARIANTS, "norms", "merge", "relu", "hash", "neurons", "free")
)
@torch.no_grad()
def test_a_cache_gives_what_one_pass_gives(variant):
    model = build(variant)
    prompt = TOKENS[:, :6]
    whole = model(TOKENS).logits[0] if variant != "merge" else None
    for cache in (
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=16),
    ):
        logits = [model(prompt, past_key_values=cache).logits[0]]
        for position in range(6, 10):
            token = TOKENS[:, position : position + 1]
            logits.append(model(token, past_key_values=cache).logits[0])
        stepwise = torch.cat(logits)
        # A merged model has no pass that equals it: the prompt ends after 6 tokens.
        whole = stepwise if whole is None else whole
        torch.testing.assert_close(stepwise, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", rest_in_full(VARIANTS, "norms", "merge", "hash"))
def test_padding_on_the_left_changes_nothing(variant):
    model = build(variant)
    short = TOKENS[:, :4]
    padded = F.pad(short, (6, 0))
    batch = torch.cat([TOKENS, padded])
    mask = torch.cat([torch.ones_like(TOKENS), F.pad(torch.ones_like(short), (6, 0))])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for cache in ("dynamic", "static"):
        both = model.generate(batch, attention_mask=mask, cache_implementation=cache, **options)
        for row, alone in ((0, TOKENS), (1, short)):
            written = model.generate(alone, **options)
            assert both[row, 10:].tolist() == written[0, alone.shape[1] :].tolist()


@pytest.mark.parametrize("uniform", [False, True])
@torch.no_grad()
def test_a_merge_of_each_segment(uniform):
    """The segment before it merges, for padded rows too; the first one by itself or equally."""
    sizes = {"segment_length": 2, "uniform_first_segment": uniform}
    experts = MoeParallelMergedExperts(hf.MoeParallelConfig(**SHAPE, rule="merge", **sizes))
    torch.manual_seed(0)
    for parameter in experts.double().parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 5, 16).double()
    is_token = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    y = experts.by_segments(x, is_token)
    for row, begin in ((0, 0), (1, 2)):
        for first in range(begin, 5, 2):
            before = slice(first - 2, first) if first > begin else slice(first, first + 2)
            e = torch.softmax(experts.router_out @ x[row, before].mean(0), dim=0)
            if uniform and first == begin:
                e = torch.full_like(e, 1 / 4)
            gate_up = sum(e[i] * experts.gate_up_proj[i] for i in range(4))
            down = sum(e[i] * experts.down_proj[i] for i in range(4))
            segment = x[row, first : first + 2]
            gate, up = segment @ gate_up[:16].T, segment @ gate_up[16:].T
            expected = (F.silu(gate) * up) @ down.T
            torch.testing.assert_close(y[row, first : first + 2], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_the_kernels_of_transformers_compute_the_same():
    for variant in ("norms, folded", "top-p", "neurons", "free"):
        model = build(variant)
        assert model.config._experts_implementation == "grouped_mm"
        expected = model(TOKENS).logits
        for kernel in ("batched_mm", "eager"):
            model.set_experts_implementation(kernel)
            torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    odd = hf.MoeParallelConfig(**SHAPE | {"moe_intermediate_size": 13})
    assert AutoModelForCausalLM.from_config(odd).config._experts_implementation == "eager"


@pytest.mark.full
@pytest.mark.parametrize("variant", ["norms", "norms, folded", "hash", "neurons", "free"])
@torch.no_grad()
def test_the_base_model_compiles_as_one_graph(variant):
    model = build(variant).model
    positions = torch.arange(10)[None]
    expected = model(TOKENS, position_ids=positions, use_cache=False).last_hidden_state
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    found = compiled(TOKENS, position_ids=positions, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """The model with weights in memory of their own: products by MKL round by the alignment of
    their operands, and weights that were loaded begin anywhere in the file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("variant", rest_in_full(VARIANTS, "norms", "router", "hash"))
def test_saved_and_loaded(variant, tmp_path):
    model = build(variant)
    model.save_pretrained(tmp_path)
    again = aligned(AutoModelForCausalLM.from_pretrained(tmp_path))
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
        # Not only the buffers of positions are the same: they are filled although none is stored.
        base = aligned(AutoModel.from_pretrained(tmp_path))
        assert torch.equal(base(TOKENS)[0], model.model(TOKENS)[0])
    # DDP stops where a parameter asks for a gradient and gets none.
    again.train()(TOKENS, labels=TOKENS).loss.backward()
    assert all((each.grad is not None) == each.requires_grad for each in again.parameters())
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is hf.MoeParallelConfig
    values, known = config.to_dict(), hf.MoeParallelConfig(**SHAPE | VARIANTS[variant]).to_dict()
    assert all(values[name] == known[name] for name in SHAPE | VARIANTS[variant])


def test_a_merged_model_refuses_what_has_no_prompt():
    model = build("merge")
    with pytest.raises(ValueError, match="leave out use_cache=False"):
        model.generate(TOKENS, max_new_tokens=2, use_cache=False)
    model.config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match="merges the experts for each prompt"):
        model.model(TOKENS)


def test_a_table_refuses_what_has_no_ids():
    model = build("hash")
    embedded = model.model.embed_tokens(TOKENS)
    with pytest.raises(ValueError, match="inputs_embeds has no ids: give input_ids, or serve"):
        model(inputs_embeds=embedded)


def imports(file: Path) -> tuple[set[str], set[str]]:
    """The packages, and the files next to it, that a file of the model imports."""
    packages, beside = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level in (0, 1)
            (beside if node.level else packages).add(node.module.partition(".")[0])
    return packages - sys.stdlib_module_names, beside


def test_the_files_need_torch_and_transformers_alone():
    """The modeling file names the others itself: transformers may copy no further ones."""
    others = {name.removesuffix(".py") for name in CODE} - {"modeling_moe_parallel"}
    for name, path in CODE.items():
        packages, beside = imports(path)
        assert packages <= {"torch", "transformers"}
        assert beside == (others if name == "modeling_moe_parallel.py" else set())


#: Of tokens whose sigmoids or probabilities round to the same numbers, and of exact ties.
HOSTILE = torch.tensor([[18.0, 20, 22, 25], [50, 40, 60, 45], [0, -200, -120, -150], [7, 3, 7, 7]])
GROUPS = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = {"moe_router_enable_expert_bias": True}


@pytest.mark.parametrize("bias", [0.0, 1e-3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        BIAS,
        SIGMOID,
        SIGMOID | BIAS | GROUPS,
        {"expert_selection": "uoe"} | BIAS,
        {"expert_selection": "top_p", "moe_top_p": 0.9},
        {"expert_selection": "expert_choice"},
        {"expert_selection": "relu"},
    ],
    ids=str,
)
def test_an_export_chooses_as_the_run(options, bias):
    """The lists of experts are equal, and not only the sets."""
    selection = make_config(options).selection
    rule, bias_E = system_of(selection).rules(selection).evaluation, None
    if BIAS.items() <= options.items():
        bias_E = bias * torch.tensor([1.0, 0, 0, 1])
        rule = rule.with_bias(bias_E)
    scores = "neurons" if options.get("expert_selection") == "uoe" else "router"
    config = hf.MoeParallelConfig(**SHAPE | rule_fields(selection, 4) | {"scores": scores})
    weights, index = modeling.RULES[config.rule](config, HOSTILE, bias_E)
    choices = rule(HOSTILE, Tokens(1))
    chosen = choices.experts_TK >= 0
    assert torch.equal(index.masked_fill(~chosen, -1), choices.experts_TK)
    torch.testing.assert_close(weights, choices.probs_TK.masked_fill(~chosen, 0))
