"""What vLLM's transformers backend asks of a model with custom code, and does with it.

vLLM is not installed here, so this file takes the steps that its documentation ("Writing custom
models") and its source (vllm/model_executor/models/transformers of 0.33.0) describe: it builds the
base model of `auto_map` without storage, replaces modules by its own, finds the attention of each
layer in the text of the code, fills the parameters by name from the safetensors, and computes
tokens of several requests in one row, with attention of its own that holds the keys and values.
The stand-ins here compute the same as vLLM's layers, in plain torch.
"""

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import moe_parallel.hf as hf
from tests.distributed import run_distributed
from tests.huggingface.exporting import PROMPT, STEPS, export_run, save_runs
from tests.systems import options

OTHER = PROMPT[::-1]


class Attention(nn.Module):
    """One layer's keys and values of every request; `batch` says whose the tokens of a row are."""

    batch: list[int] = []  # the request of each token of the row

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.held: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def forward(self, q_THC, k_TGC, v_TGC):
        rows = []
        for request, q_HC, k_GC, v_GC in zip(self.batch, q_THC, k_TGC, v_TGC, strict=True):
            self.held[request].append((k_GC, v_GC))
            k_SGC, v_SGC = (torch.stack(each) for each in zip(*self.held[request], strict=True))
            group = len(q_HC) // k_SGC.shape[1]
            k_SHC, v_SHC = (x.repeat_interleave(group, dim=1) for x in (k_SGC, v_SGC))
            weights_HS = (torch.einsum("hc,shc->hs", q_HC, k_SHC) * self.scale).softmax(-1)
            rows.append(torch.einsum("hs,shc->hc", weights_HS, v_SHC).flatten())
        return torch.stack(rows)


def vllm_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return module.attn(q, k, v), None


def calls_of_the_interface(module: nn.Module) -> list[ast.Call]:
    """The calls, in a forward, of names that were read from ALL_ATTENTION_FUNCTIONS."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(type(module).forward)))
    names = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and ast.unparse(node.value or node).startswith("ALL_ATTENTION_FUNCTIONS")
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in names]


def states_are_not_all(gate: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    """vLLM replaces a block whose gate takes the hidden states alone, its selection included."""
    assert len(given) > 1


class Linear(nn.Module):
    """In place of every nn.Linear; has the weight alone, and perhaps a bias."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class FusedExperts(nn.Module):
    """In place of `experts`: SwiGLU of the sizes in the configuration, whatever was there."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        e, d = config.num_experts, config.hidden_size
        f = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.top_k = config.num_experts_per_tok
        self.w13_weight = nn.Parameter(torch.empty(e, 2 * f, d, device="meta"))
        self.w2_weight = nn.Parameter(torch.empty(e, d, f, device="meta"))

    def forward(self, hidden_states, topk_ids, topk_weights, **kwargs):
        assert topk_ids.shape == topk_weights.shape == (len(hidden_states), self.top_k)
        assert ((topk_ids >= 0) & (topk_ids < len(self.w2_weight))).all()
        y = torch.zeros_like(hidden_states)
        for token, (x, ids, weights) in enumerate(
            zip(hidden_states, topk_ids.to(torch.int32).tolist(), topk_weights.float(), strict=True)
        ):
            for expert, weight in zip(ids, weights, strict=True):
                gate, up = (self.w13_weight[expert] @ x).chunk(2)
                y[token] += weight * (self.w2_weight[expert] @ (F.silu(gate) * up))
        return y


class Server:
    """The steps of vLLM for an exported folder."""

    def __init__(self, folder: Path) -> None:
        ALL_ATTENTION_FUNCTIONS.register("vllm", vllm_attention)
        config_json = json.loads((folder / "config.json").read_text())
        code = config_json["auto_map"]["AutoModel"]
        assert get_class_from_dynamic_module(code, folder).is_backend_compatible()
        self.config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        self.config._attn_implementation = "vllm"
        with torch.device("meta"):
            self.model = AutoModel.from_config(
                self.config, dtype=torch.float32, trust_remote_code=True
            )
        self._fill_buffers()
        self.replaced: list[str] = []
        self._replace(self.model, "model")
        self._attach_attention()
        self._load(folder)

    def _attach_attention(self) -> None:
        """To the module of each layer that calls the interface once, with a scale of its own."""
        layers = []
        for module in list(self.model.modules()):
            if len(calls := calls_of_the_interface(module)) != 1:
                continue
            (scaling,) = (each.value for each in calls[0].keywords if each.arg == "scaling")
            name = ast.unparse(scaling).removeprefix("self.")
            module.attn = Attention(float(getattr(module, name)))
            layers.append(module.layer_idx)
        assert layers == list(range(self.config.num_hidden_layers))

    def _fill_buffers(self) -> None:
        """vLLM makes buffers as the class does, and leaves the parameters without storage."""
        real = AutoModel.from_config(self.config, trust_remote_code=True)
        for name, buffer in real.named_buffers():
            owner, _, last = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[last] = buffer

    def _replace(self, module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            parameters = list(child.parameters())
            all_3d = bool(parameters) and all(each.dim() == 3 for each in parameters)
            if name == "experts" and (isinstance(child, nn.ModuleList) or all_3d):
                setattr(module, name, FusedExperts(self.config))
                module.gate.register_forward_pre_hook(states_are_not_all)
                self.replaced.append(f"{prefix}.{name}")
            elif isinstance(child, nn.Linear):
                setattr(module, name, Linear(child))
            else:
                self._replace(child, f"{prefix}.{name}")

    def _load(self, folder: Path) -> None:
        """Every stored tensor has a parameter, and the other way round; buffers are not loaded."""
        wanted = {f"model.{name}": parameter for name, parameter in self.model.named_parameters()}
        stored = load_file(folder / "model.safetensors")
        self.head = stored.pop("lm_head.weight", stored["model.embed_tokens.weight"])
        for name, tensor in stored.items():
            name = re.sub(r"experts\.gate_up_proj$", "experts.w13_weight", name)
            if any(name.startswith(place) for place in self.replaced):
                name = re.sub(r"experts\.down_proj$", "experts.w2_weight", name)
            parameter = wanted.pop(name)
            assert parameter.shape == tensor.shape, name
            owner, _, last = name.removeprefix("model.").rpartition(".")
            # vLLM gives each parameter the dtype of the model, also a table of integers.
            parameter = nn.Parameter(tensor.to(torch.float32), False)
            self.model.get_submodule(owner)._parameters[last] = parameter
        assert not wanted, f"no values for {sorted(wanted)}"

    @torch.no_grad()
    def step(self, requests: dict[int, list[int]], done: dict[int, int]) -> dict[int, int]:
        """The next token of each request, from its new tokens; all requests are in one row."""
        ids, positions, batch = [], [], []
        for request, tokens in requests.items():
            ids += tokens
            positions += range(done[request], done[request] + len(tokens))
            batch += [request] * len(tokens)
            done[request] += len(tokens)
        Attention.batch = batch
        outputs = self.model(
            input_ids=torch.tensor([ids]),
            inputs_embeds=None,
            use_cache=False,
            position_ids=torch.tensor([positions]),
            return_dict=False,
        )
        logits = outputs[0][0] @ self.head.T
        last = {request: row for row, request in enumerate(batch)}
        return {request: int(logits[row].argmax()) for request, row in last.items()}


#: Options of the run, whether W_g is folded, and in how many layers vLLM computes the experts.
RUNS = {
    "aoe, folded": (options("aoe, by bias"), True, 2),
    "aoe": (options("aoe, by bias"), False, 0),
    "top_p": (options("top_p") | {"moe_inference_max_experts": 3}, False, 2),
    "topk, sigmoid": (options("topk, sigmoid, groups, bias, shared expert"), False, 2),
    "hash": (options("hash"), False, 2),
    "uoe": (options("uoe"), False, 2),
    "topk, free": (options("topk, free experts"), False, 2),
}
MORE = {
    "relu": (options("relu"), False, 2),
    "threshold": (options("threshold"), False, 2),
    "aoe_threshold, folded": (options("aoe_threshold"), True, 2),
    "routing_free": (options("routing_free"), False, 0),
    "aoe, free": (options("aoe, free experts"), False, 0),
    "aoe, free, folded": (options("aoe, free experts"), True, 2),
    "top_p, free": (options("top_p") | {"moe_copy_experts": 1}, False, 2),
}


@pytest.mark.parametrize("cases", [RUNS, pytest.param(MORE, marks=pytest.mark.full)])
def test_requests_in_one_row_get_the_runs_tokens(cases, tmp_path):
    runs = [(tmp_path / name, of_run) for name, (of_run, _, _) in cases.items()]
    (results,) = run_distributed(1, save_runs, runs)
    for (name, (_, fold, fused)), (_, tokens) in zip(cases.items(), results, strict=True):
        export_run(tmp_path / name, tmp_path / name / "out", architecture="own", fold=fold)
        server = Server(tmp_path / name / "out")
        assert len(server.replaced) == fused, name
        written, done = [], {0: 0, 1: 0}
        found = server.step({0: PROMPT}, done)
        for step in range(STEPS - 1):
            written.append(found[0])
            # Another request arrives, and from then on both have one row of tokens.
            other = {1: OTHER} if step == 1 else {1: [found[1]]} if step > 1 else {}
            found = server.step({0: [found[0]], **other}, done)
        assert [*written, found[0]] == tokens, name


def test_the_configuration_has_the_names_that_vllm_reads(tmp_path):
    run_distributed(1, save_runs, [(tmp_path / "run", options("aoe"))])
    export_run(tmp_path / "run", tmp_path / "out", fold=True)
    config = hf.MoeParallelConfig.from_pretrained(tmp_path / "out")
    (experts,) = {
        (len(t), t.shape[2])
        for name, t in load_file(tmp_path / "out/model.safetensors").items()
        if name.endswith("down_proj")
    }
    assert (config.num_experts, config.moe_intermediate_size) == experts
    assert config.num_experts_per_tok == 2
    assert config.rope_parameters["rope_type"] == "default"
    assert set(config.base_model_pp_plan) == {"embed_tokens", "layers", "norm"}
    plan = config.base_model_tp_plan  # some versions of transformers add embed_tokens to it
    styles = {style for name, style in plan.items() if name != "embed_tokens"}
    assert styles == {"colwise", "rowwise"}  # the only ones that it knows
    assert not any("experts" in name for name in config.base_model_tp_plan)


def test_vllm_divides_heads_only_where_no_norm_spans_them(tmp_path):
    """With several ranks, q_proj is a layer of vLLM that knows how many they are."""
    qk = {"qk_layernorm": True, "qk_layernorm_all_heads": True}
    run_distributed(1, save_runs, [(tmp_path / "run", options("aoe") | qk)])
    export_run(tmp_path / "run", tmp_path / "out", fold=True)
    server = Server(tmp_path / "out")
    server.model.layers[1].self_attn.q_proj.tp_size = 2
    with pytest.raises(ValueError, match="spans all heads.* set tensor_parallel_size to 1 instead"):
        server.step({0: PROMPT}, {0: 0})


WITH_VLLM = """
import json, sys
import vllm
folders, prompts, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
sampling = vllm.SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
for folder in folders:
    server = vllm.LLM(model=folder, trust_remote_code=True, dtype="float32",
                      model_impl="transformers", enforce_eager=True, max_model_len=32,
                      max_num_batched_tokens=32)
    written = server.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    print("TOKENS", json.dumps([list(each.outputs[0].token_ids) for each in written]))
    del server
"""


#: This one where vLLM imports; otherwise that of an environment of its own, if there is one.
PYTHON_WITH_VLLM = (
    sys.executable if importlib.util.find_spec("vllm") else os.environ.get("VLLM_PYTHON")
)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    PYTHON_WITH_VLLM is None,
    reason="vLLM is not installed, and VLLM_PYTHON names no Python of an environment that has it",
)
def test_vllm_itself(tmp_path):
    cases = RUNS | MORE
    wide = {"kv_channels": 32}  # attention of vLLM on a CPU has kernels for heads of 32 and more
    runs = [(tmp_path / name, of_run | wide) for name, (of_run, _, _) in cases.items()]
    (results,) = run_distributed(1, save_runs, runs)
    for name, (_, fold, _) in cases.items():
        export_run(tmp_path / name, tmp_path / name / "out", architecture="own", fold=fold)
    folders = json.dumps([str(tmp_path / name / "out") for name in cases])
    line = [str(PYTHON_WITH_VLLM), "-c", WITH_VLLM, folders]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [*line, json.dumps([PROMPT, PROMPT]), str(STEPS)],
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")} | variables,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    lines = [each for each in done.stdout.splitlines() if each.startswith("TOKENS ")]
    written = [json.loads(each.removeprefix("TOKENS ")) for each in lines]
    assert dict(zip(cases, written, strict=True)) == {
        name: [tokens, tokens] for name, (_, tokens) in zip(cases, results, strict=True)
    }
