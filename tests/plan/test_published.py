"""Published runs become plans of the same sizes."""

from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Efficiency
from moe_parallel.plan.published import read_published
from moe_parallel.plan.weights import weights_of_chunk

FILE = Path(__file__).parents[2] / "docs/results/planner/published_runs.json"

#: Billions of parameters by their model cards; of DeepSeek-V3 with the layer that predicts a
#: further token (its report: 671 and 14, of which 2 are copies of the embedding and the head).
BILLIONS = {
    "Llama 3 8B, 8 H100": 8.03,
    "Llama 3 8B, 8 H100, later": 8.03,
    "Llama 3 8B, 8 B200": 8.03,
    "Qwen3-30B-A3B, 8 B200": 30.5,
    "Qwen3-30B-A3B, 8 B200, earlier": 30.5,
    "Qwen3-30B-A3B, 8 B200, choices dropped": 30.5,
    "Qwen3-30B-A3B, 8 B200, MBS 4": 30.5,
    "Qwen3-235B-A22B, 64 B200": 235.1,
    "Qwen3-235B-A22B, 64 B200, dropped": 235.1,
    "Qwen3-235B-A22B, 64 B200, dropped, MXFP8": 235.1,
    "Qwen3-235B-A22B, 256 B200": 235.1,
    "GPT-OSS-120B, 64 B200, EP 64": 116.8,
    "GPT-OSS-120B, 64 B200, EP 8": 116.8,
    "Mixtral 8x7B": 46.7,
    "Mixtral 8x22B": 140.6,
    "Qwen3-30B-A3B, EP 8": 30.5,
    "Qwen3-30B-A3B, EP 8, choices dropped": 30.5,
    "Qwen3-30B-A3B, EP 16": 30.5,
    "Qwen3-30B-A3B, EP 16, later": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "DeepSeek-V3": 671 + 14 - 2,
    "GPT-OSS-120B": 116.8,
    "Llama 3 70B": 70.6,
}


def test_the_runs_have_the_sizes_of_their_models() -> None:
    runs = {run.name: run for run in read_published(FILE)}
    assert set(runs) == set(BILLIONS)
    for name, run in runs.items():
        layout = run.layout
        parameters = 0
        for stage in range(layout.pp):
            for chunk in range(layout.virtual):
                for weight in weights_of_chunk(run.shape, layout, stage, chunk):
                    experts = layout.ep * layout.etp
                    whole = weight.name in ("w_router", "linear_down")
                    whole = whole or "layernorm" in weight.name
                    copies = 1 if whole else experts if weight.expert else layout.tp
                    parameters += weight.size * copies
        assert parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.005), name
        assert run.cluster.ranks == layout.dp * layout.tp * layout.pp
        assert layout.global_batch % (layout.micro_batch * layout.dp) == 0
        assert run.source and run.planned(Efficiency()).tokens_per_gpu > 0


def test_every_layer_of_a_run_is_on_one_chunk() -> None:
    for run in read_published(FILE):
        layout, layers = run.layout, run.shape.moe_layers
        found = [
            layer
            for chunk in range(layout.virtual)
            for stage in range(layout.pp)
            for layer in layout.chunk_layers(len(layers), stage, chunk)
        ]
        assert found == list(range(len(layers))), run.name


def test_windows_leave_a_share_of_the_scores() -> None:
    """Every second layer sees 128 tokens: the pairs of both kinds of layer, counted."""
    (gpt_oss,) = [run for run in read_published(FILE) if run.name == "GPT-OSS-120B"]
    pairs = [sum(min(token + 1, window) for token in range(4096)) for window in (4096, 128)]
    assert gpt_oss.shape.seen == pytest.approx(sum(pairs) / (2 * pairs[0]), rel=0.001)


def test_megatrons_tflops_become_tokens() -> None:
    (run,) = [run for run in read_published(FILE) if run.name == "Mixtral 8x7B"]
    # 12 L d^2 (1 + 8 / 32 + 4096 / 4096 + 3 x 14336 / 4096) + 6 d V, as in Megatron-LM.
    flops = 12 * 32 * 4096**2 * (1 + 8 / 32 + 1 + 3 * 14336 / 4096) + 6 * 4096 * 32000
    assert run.tokens_per_gpu == pytest.approx(468e12 / flops)


def test_a_wrong_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text('[{"name": "x"}]')
    with pytest.raises(InputError, match="^--published .*runs.json cannot be read: KeyError"):
        read_published(path)
