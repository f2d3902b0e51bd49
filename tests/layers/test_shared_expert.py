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
