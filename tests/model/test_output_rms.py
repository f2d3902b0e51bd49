"""The size of the outputs of MoE layers in the first step: by hand, and in every layout."""

from typing import Any

import pytest

from moe_parallel.config import make_config
from moe_parallel.layers import ExpertLayer
from moe_parallel.parallel import destroy_groups
from tests.distributed import run_distributed
from tests.model.small_gpt import SIZES, Options, build, micro_batches
from tests.model.test_layouts import ONE, layout, model

CASES: dict[str, tuple[str, Options]] = {
    "recompute": ("topk", layout(recompute=True)),
    "tp2": ("topk", layout(tp=2, etp=2)),
    "tp2, sp, ep2": ("aoe", layout(tp=2, ep=2, sp=True)),
    "pp2": ("topk", layout(pp=2)),
    "merged, tp2, sp": ("lory", layout(tp=2, etp=2, sp=True)),
}


def sizes(cases: list[Options]) -> list[tuple[list[float], list[Any]]]:
    """Of each: `output_rms` of the layers after two steps, and the outputs of the first step."""
    found = []
    for options in cases:
        config = make_config(SIZES | options)
        engine = build(config)
        outputs: dict[int, list[Any]] = {}

        def keep(layer: Any, _: Any, output: Any, outputs: Any = outputs) -> None:
            if layer.routes:
                outputs.setdefault(layer.layer_number, []).append(output[0].detach().double())

        layers = [
            m for chunk in engine.chunks for m in chunk.modules() if isinstance(m, ExpertLayer)
        ]
        hooks = [layer.register_forward_hook(keep) for layer in layers]
        engine.step(micro_batches(config, 0, engine))
        for hook in hooks:
            hook.remove()
        engine.step(micro_batches(config, 4, engine))
        means = [
            (sum((y**2).sum() for y in ys) / sum(y.numel() for y in ys)).sqrt().item()
            for _, ys in sorted(outputs.items())
        ]
        summaries = engine.statistics.training.reduced([None]).summaries()
        found.append(([layer["output_rms"] for layer in summaries], means))
        destroy_groups()
    return found


@pytest.mark.full
def test_it_is_the_root_of_the_mean_square_in_every_layout() -> None:
    systems = sorted({system for system, _ in CASES.values()})
    (alone,) = run_distributed(1, sizes, [model(system) | ONE for system in systems])
    for found, by_hand in alone:
        assert found == pytest.approx(by_hand, rel=1e-9)
    wanted = {system: found for system, (found, _) in zip(systems, alone, strict=True)}
    ranks = run_distributed(2, sizes, [model(system) | spread for system, spread in CASES.values()])
    for (name, (system, _)), *found in zip(CASES.items(), *ranks, strict=True):
        for rms, _ in found:
            assert rms == pytest.approx(wanted[system], rel=1e-5), name
