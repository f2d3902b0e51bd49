"""Time whole models against those that a user would take instead, on the same tokens and in turns.

    make bench ARGS="--models"                                  # a look, in about a minute
    make bench ARGS="--models --sizes goals --json models.json" # the project's goals
    python tools/bench/models.py --sizes sequence,experts,micro-batch

On a CPU, with one thread and process CPU time. Each model has as many layers, widths and
parameters; forward pass, forward and backward pass, and a step of the optimizer are timed apart.
docs/performance/README.md explains the columns. Exit codes: 0 done, whatever was measured; 2 a
wrong flag; 130 interrupted, after the measurements so far have been written.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.platform.suppress_warnings import suppress_warnings

suppress_warnings()  # before Megatron-Core is imported

import torch  # noqa: E402

from moe_parallel.errors import InputError  # noqa: E402
from moe_parallel.ops import extension  # noqa: E402
from moe_parallel.parallel import Groups  # noqa: E402
from moe_parallel.tool import Tool  # noqa: E402
from moe_parallel.training.exit_codes import EXIT_CTRL_C  # noqa: E402
from tools.bench.about import about  # noqa: E402
from tools.bench.clock import clock_of, keep_freed_memory  # noqa: E402
from tools.bench.command_line import (  # noqa: E402
    check_writable,
    chosen,
    load_of,
    print_about,
    words,
)
from tools.bench.contender import (  # noqa: E402
    BOTH,
    FORWARD,
    STEP,
    Absent,
    Bench,
    Contender,
    Measure,
    Moved,
    invite,
)
from tools.bench.measurement import Patience, measure  # noqa: E402
from tools.bench.peers.megatron import one_rank  # noqa: E402
from tools.bench.results import Row, write_json  # noqa: E402
from tools.bench.table import format_absent, format_model_row, format_row  # noqa: E402
from tools.bench.whole_models import huggingface, stock  # noqa: E402
from tools.bench.whole_models.model import Terms, number_of_weights  # noqa: E402
from tools.bench.whole_models.ours import BY_BIAS, NO_LOSSES, aoe, lory, our_model, top_p, topk  # noqa: E402
from tools.bench.whole_models.sizes import GOALS, SIZES, SMALL, ModelSize  # noqa: E402

SECONDS_OF_A_ROW = 20.0
DTYPES = ["float32", "bfloat16"]


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--sizes", type=words, metavar="A,B,...", default=[SMALL],
        help=f"of {', '.join(SIZES)}; the last three are curves (default: {SMALL})")  # fmt: skip
    add("--dtype", type=words, metavar="A,B,...", help="float32, bfloat16 (default: both)")
    add("--turns", type=int, metavar="N",
        help="turns per row (default: as many as fit into its time)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the samples of every row too")
    return tool.run(arguments, lambda own: _time(arguments, _checked(own)))


def _checked(options: argparse.Namespace) -> argparse.Namespace:
    if not extension.is_built():
        raise InputError("the C++ extension is not built: run `make set-up`")
    options.sizes = chosen("--sizes", options.sizes, list(SIZES), [SMALL])
    options.dtype = chosen("--dtype", options.dtype, DTYPES, DTYPES)
    if options.turns is not None and options.turns < 1:
        raise InputError(f"--turns {options.turns}: must be at least 1")
    check_writable(options.json)
    return options


def _time(arguments: list[str], options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    keep_freed_memory()
    facts = about("models.py", arguments) | {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": 1,
    }
    rows: list[Row] = []
    interrupted = False
    try:
        print_about(facts)
        with one_rank() as groups:
            for bench, size in _benches(options, groups):
                _measure(bench, size, Patience(SECONDS_OF_A_ROW, options.turns), rows)
    except KeyboardInterrupt:
        interrupted = True
        print(f"\ninterrupted after {len(rows)} rows", file=sys.stderr)
    if absent := format_absent(rows):
        print(f"\n{absent}")
    facts |= {"load_after": os.getloadavg(), "interrupted": interrupted}
    print(f"\nload {load_of(facts['load_after'])} after")
    if options.json is not None:
        write_json(options.json, facts, rows)
    return EXIT_CTRL_C if interrupted else 0


def _measure(bench: Bench, size: ModelSize, patience: Patience, rows: list[Row]) -> None:
    """Append each row as soon as it is measured, so that an interruption keeps it."""
    present = [one for one in (*bench.ours, *bench.peers) if isinstance(one, Contender)]
    weights = {one.name: number_of_weights(one) for one in present}
    for row in measure(bench, clock_of("cpu"), "cpu", patience):
        rows.append(row)
        of_step = row.timed == STEP
        text = format_row(row) if of_step else format_model_row(row, size.tokens, weights)
        print(f"\n{text}", flush=True)


def _benches(options: argparse.Namespace, groups: Groups) -> Iterator[tuple[Bench, ModelSize]]:
    """One at a time, because the models of a bench take memory."""
    for name in options.sizes:
        for dtype in (getattr(torch, dtype) for dtype in options.dtype):
            for size in SIZES[name]:
                for build in BENCHES[name]:
                    yield build(Terms(size, dtype, groups)), size
                    gc.collect()


def against_others(terms: Terms) -> Bench:
    """Our systems, Megatron-Core's stock model, and Hugging Face's; no auxiliary losses."""
    size = terms.size
    systems = {
        "ours, topk": topk(size, *NO_LOSSES),
        "ours, aoe": aoe(size, *NO_LOSSES),
        "ours, top_p": top_p(*NO_LOSSES),
        "ours, lory": lory(size),
    }
    ours = [our_model(name, flags, terms) for name, flags in systems.items()]
    peers = [invite(stock.NAME, partial(stock.stock_model, terms))]
    peers += _hugging_face(terms, huggingface.IMPLEMENTATIONS)
    return _bench("model", terms, ours, peers)


def curve(terms: Terms) -> Bench:
    """Ours beside the fastest peer."""
    ours = [
        our_model("ours, topk", topk(terms.size, *NO_LOSSES), terms),
        our_model("ours, aoe", aoe(terms.size, *NO_LOSSES), terms),
    ]
    peers = _hugging_face(terms, huggingface.IMPLEMENTATIONS[:1])
    return _bench("model", terms, ours, peers)


def aoe_with_losses(terms: Terms) -> Bench:
    """AoE beside topk of as many parameters, both with the auxiliary loss."""
    loss = ("--moe-aux-loss-coeff", "0.01")
    ours = [
        our_model("topk, aux loss", topk(terms.size, *loss), terms),
        our_model("aoe, aux loss, full gradient", aoe(terms.size, *loss), terms),
    ]
    return _bench("model with aux loss", terms, ours, [])


def aoe_by_bias(terms: Terms) -> Bench:
    """The same balanced by bias, where the selected gradient is exact."""
    selected = aoe(terms.size, *BY_BIAS, "--aoe-gradient", "selected")
    ours = [
        our_model("topk, by bias", topk(terms.size, *BY_BIAS), terms),
        our_model("aoe, by bias, selected gradient", selected, terms),
    ]
    return _bench("model balanced by bias", terms, ours, [])


BENCHES: dict[str, list[Callable[[Terms], Bench]]] = {
    SMALL: [against_others, aoe_with_losses, aoe_by_bias],
    GOALS: [against_others, aoe_with_losses, aoe_by_bias],
    "sequence": [curve],
    "experts": [curve],
    "micro-batch": [curve],
}


def _hugging_face(terms: Terms, implementations: tuple[str, ...]) -> list[Contender | Absent]:
    return [
        invite(
            huggingface.name_of(terms, implementation),
            partial(huggingface.hugging_face_model, terms, implementation),
        )
        for implementation in implementations
    ]


def _bench(
    op: str,
    terms: Terms,
    ours: list[Contender],
    peers: list[Contender | Absent],
) -> Bench:
    products = terms.size.products()
    measures = [Measure(FORWARD, products), Measure(BOTH, products.with_gradients())]
    if terms.dtype == torch.float32:
        # In bf16 Hugging Face's optimizer has no fp32 weights, so its work is another.
        # Adam reads and writes weights and two moments, and reads gradients: 7 values of 4 bytes.
        measures.append(Measure(STEP, Moved(7 * 4 * number_of_weights(ours[0]))))
    return Bench(op, terms.size, terms.dtype, ours, peers, tuple(measures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
