"""Published runs become plans of the same sizes."""

from pathlib import Path

import pytest

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Efficiency
from moe_parallel.plan.published import read_published
from moe_parallel.plan.weights import weights_of_chunk

FILE = Path(__file__).parents[2] / "docs/results/planner/published_runs.json"

#: Billions of parameters by their model cards. Qwen3-235B is planned with two layers more.
BILLIONS = {
    "Mixtral 8x7B": 46.7,
    "Mixtral 8x22B": 140.6,
    "Qwen3-30B-A3B, EP 8": 30.5,
    "Qwen3-30B-A3B, EP 8, choices dropped": 30.5,
    "Qwen3-30B-A3B, EP 16": 30.5,
    "Qwen3-235B-A22B": 235.1 * 96 / 94,
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
                    whole = weight.name == "w_router" or "layernorm" in weight.name
                    copies = 1 if whole else experts if weight.expert else layout.tp
                    parameters += weight.size * copies
        assert parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.005), name
        assert run.cluster.ranks == layout.dp * layout.tp * layout.pp
        assert layout.global_batch % (layout.micro_batch * layout.dp) == 0
        assert run.source and run.planned(Efficiency()).tokens_per_gpu > 0


def test_megatrons_tflops_become_tokens() -> None:
    run = read_published(FILE)[0]
    # 12 L d^2 (1 + 8 / 32 + 4096 / 4096 + 3 x 14336 / 4096) + 6 d V, as in Megatron-LM.
    flops = 12 * 32 * 4096**2 * (1 + 8 / 32 + 1 + 3 * 14336 / 4096) + 6 * 4096 * 32000
    assert run.tokens_per_gpu == pytest.approx(468e12 / flops)


def test_a_wrong_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text('[{"name": "x"}]')
    with pytest.raises(InputError, match="^--published .*runs.json cannot be read: KeyError"):
        read_published(path)
