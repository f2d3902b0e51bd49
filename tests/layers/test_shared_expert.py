"""Layers with a shared expert equal their per-token oracles."""

import torch

from moe_parallel.ops import extension
from tests.distributed import run_distributed
from tests.layers.cases import SHARED_CASES, close, direction
from tests.layers.expected import expected_output, expected_slopes
from tests.layers.single import build, run, values
from tests.oracles.layers import slopes


def _run_all(backends, dtypes):
    """The output and gradients of every case, by name, backend and type."""
    found = {}
    for name, case in SHARED_CASES.items():
        given = values(case)
        for backend in backends:
            for dtype in dtypes:
                layer = build(case, given, dtype, backend)
                found[name, backend, dtype] = run(layer, given, direction(case))
    return found


def test_equals_the_transcription():
    backends = ["reference"] + ["native"] * extension.is_built()
    tolerances = {torch.float64: 1e-6, torch.float32: 1e-5}
    (found,) = run_distributed(1, _run_all, backends, list(tolerances))
    for name, case in SHARED_CASES.items():
        given = values(case)
        wanted_output = expected_output(case, given)
        wanted = expected_slopes(case, given, direction(case))
        for backend in backends:
            for dtype, tolerance in tolerances.items():
                label = f"{name}, {backend}, {dtype}"
                output, gradients = found[name, backend, dtype]
                close(output, wanted_output, tolerance, label)
                assert gradients.keys() == wanted.keys()
                for key, slope in wanted.items():
                    close(slopes(gradients[key]), slope, 3 * tolerance, f"{key} of {label}")


def _in_both_types(names):
    pairs = []
    for name in names:
        case = SHARED_CASES[name]
        given = {
            key: torch.from_numpy(value).bfloat16().double().numpy()
            for key, value in values(case).items()
        }
        weights = torch.from_numpy(direction(case)).bfloat16().double().numpy()
        pairs.append(
            [
                run(build(case, given, dtype, "reference"), given, weights)
                for dtype in (torch.bfloat16, torch.float32)
            ]
        )
    return pairs


def test_bf16_is_close_to_fp32():
    names = ["topk", "topk, gated", "expert_choice, gated"]
    (pairs,) = run_distributed(1, _in_both_types, names)
    for name, ((output, gradients), (exact, exact_gradients)) in zip(names, pairs, strict=True):
        close(output, exact, 2e-2, name)
        for key, gradient in exact_gradients.items():
            close(gradients[key], gradient, 3e-2, f"{key} of {name}")
