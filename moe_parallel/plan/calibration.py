"""What one node tells about a kind of GPU, fitted to published runs of a single node.

A run of one node calibrates one constant: the constant is set so that the plan of that run comes
out right. All other runs are checks. Three constants suffice, because their runs differ in what
they wait for:

    fp8           a dense model, whose products take nearly all of its time
    kernel_time   a model of many experts, all of it in CUDA graphs, without the host
    call_time     a model of many experts, launched by the host
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Efficiency, Node
from moe_parallel.plan.published import KernelTimes, PublishedRun

FP8, KERNEL_TIME, CALL_TIME = "fp8", "kernel_time", "call_time"
#: What the constants may be: shares of the peak, and seconds.
BOUNDS = {FP8: (0.01, 1.0), KERNEL_TIME: (0.0, 1e-3), CALL_TIME: (0.0, 1e-3)}
#: Each fit moves the others a little. After so many rounds no speed of a fitted run is off by 1e-4.
ROUNDS = 5


@dataclass(frozen=True)
class NodeCalibration:
    """The constants of a kind of node, each with the run to which it was fitted."""

    efficiency: Efficiency
    times: KernelTimes
    runs: dict[str, str]  # by constant

    def with_value(self, name: str, value: float) -> NodeCalibration:
        if name == FP8:
            return replace(self, efficiency=replace(self.efficiency, fp8=value))
        return replace(self, times=replace(self.times, **{name: value}))

    def error(self, run: PublishedRun) -> float:
        """Of the planned speed, as a share of the published one."""
        planned = run.planned(self.efficiency, self.times)
        return planned.tokens_per_gpu / run.tokens_per_gpu - 1


def calibrations(
    runs: Iterable[PublishedRun], efficiency: Efficiency
) -> dict[str, NodeCalibration]:
    """By name of the node.

    A node without a run for a constant has that of another kind of node, if there is one: the
    newest in the file. `NodeCalibration.runs` tells.

    Raises InputError if a run that calibrates is not of one node, or cannot be matched.
    """
    runs = list(runs)
    fitting = [run for run in runs if run.calibrates is not None]
    for run in fitting:
        if run.calibrates not in BOUNDS or run.cluster.nodes != 1:
            raise InputError(
                f"--published: {run.name} calibrates {run.calibrates!r} on {run.cluster.nodes} "
                f"nodes; a run of one node can calibrate {', '.join(BOUNDS)}"
            )
    nodes = {run.cluster.node.name: run.cluster.node for run in runs}
    fitted = {
        name: _fit(node, [run for run in fitting if run.cluster.node == node], efficiency)
        for name, node in nodes.items()
    }
    return {name: _with_others(node, fitting, fitted, efficiency) for name, node in nodes.items()}


def _fit(node: Node, runs: list[PublishedRun], efficiency: Efficiency) -> NodeCalibration:
    return _solve(NodeCalibration(efficiency, _times(node), {}), runs)


def _with_others(
    node: Node,
    runs: list[PublishedRun],
    fitted: dict[str, NodeCalibration],
    efficiency: Efficiency,
) -> NodeCalibration:
    """A node's own constants, and the seconds of other nodes where it has none."""
    own = [run for run in runs if run.cluster.node == node]
    found = NodeCalibration(efficiency, _times(node), {})
    missing = {KERNEL_TIME, CALL_TIME} - {run.calibrates for run in own}
    for run in runs:
        if run.calibrates in missing:
            value = getattr(fitted[run.cluster.node.name].times, run.calibrates)
            found = found.with_value(run.calibrates, value)
            found = replace(found, runs=found.runs | {run.calibrates: run.name})
    return _solve(found, own)


def _solve(found: NodeCalibration, runs: list[PublishedRun]) -> NodeCalibration:
    for _ in range(ROUNDS):
        for run in runs:
            assert run.calibrates is not None
            found = _solve_one(found, run, run.calibrates)
    return replace(found, runs=found.runs | {str(run.calibrates): run.name for run in runs})


def _solve_one(found: NodeCalibration, run: PublishedRun, name: str) -> NodeCalibration:
    low, high = BOUNDS[name]

    def error(value: float) -> float:
        return found.with_value(name, value).error(run)

    if error(low) * error(high) > 0:
        raise InputError(
            f"--published: no {name} from {low:g} to {high:g} gives the speed of {run.name}; "
            'remove its "calibrates"'
        )
    return found.with_value(name, _root(error, low, high))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a monotonic function is zero, by halving."""
    rising = function(high) > 0
    for _ in range(32):
        middle = (low + high) / 2
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _times(node: Node) -> KernelTimes:
    return KernelTimes(node.call_time, node.kernel_time)
