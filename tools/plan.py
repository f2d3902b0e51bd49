"""Predict what a configuration needs on a cluster: memory, messages, time, and the best layouts.

    python tools/plan.py --config FILE.yaml --cluster h100x8:64 [--flag value ...]

h100x8:64 is 64 nodes of 8 H100, 512 GPUs. Known nodes: a100x8, h100x8, h200x8, b200x8.

Without --own-layout, the tool tries every layout and micro-batch size, lists the fastest that fit,
and says why the others do not. --beside FILE.yaml plans a second model in the same layouts, for
example a traditional MoE beside AoE. --json prints everything as one JSON object.

--published FILE.json plans published runs instead, and prints how far off the plan is.

Nothing is built or measured: docs/scaling.md has the formulas and the errors. Besides its own flags
the tool accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_parallel.config import Config, parse_command_line
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster, Efficiency, measured, parse_cluster
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.memory import activations_by_part, memory_of_stage, weights_by_part
from moe_parallel.plan.messages import messages_of_stage
from moe_parallel.plan.published import read_published
from moe_parallel.plan.search import RESERVE, Plan, Refused, plan_layout, reasons, search
from moe_parallel.plan.shape import Shape, shape_of, target_of
from moe_parallel.tool import Tool, check_positive

GIB = 2**30


def main(arguments: list[str]) -> int:
    usage = "python tools/plan.py --config FILE.yaml --cluster NODE:NUMBER [--flag value ...]"
    tool = Tool(__file__, __doc__, usage=usage)
    tool.add_argument("--cluster", metavar="NODE:NUMBER", help="kind and number of nodes")
    tool.add_argument(
        "--own-layout",
        action="store_true",
        help="plan only the layout and the micro-batch of the configuration",
    )
    tool.add_argument(
        "--beside",
        metavar="FILE",
        help="a second configuration, planned in the layouts of the first",
    )
    tool.add_argument(
        "--top", metavar="N", type=int, default=10, help="number of layouts to list (10)"
    )
    tool.add_argument(
        "--reserve-gib",
        metavar="X",
        type=float,
        default=RESERVE / GIB,
        help=f"memory of a GPU that a plan leaves free ({RESERVE // GIB})",
    )
    tool.add_argument(
        "--mean-choices",
        metavar="X",
        type=float,
        help="the mean number of experts of a token, as measured in a run: for top_p and "
        "aoe_top_p, and in place of the target of a system that has one",
    )
    tool.add_argument(
        "--measured",
        metavar="FILE",
        help="JSON with measured shares of the peaks, by the names in docs/scaling.md; they "
        "replace the published ones",
    )
    tool.add_argument(
        "--published",
        metavar="FILE",
        help="plan the runs of docs/results/planner/published_runs.json, or of such a file",
    )
    tool.add_argument("--json", action="store_true", help="print one JSON object")
    return tool.run_with_training_flags(arguments, _plan)


def _plan(own: argparse.Namespace, flags: list[str]) -> None:
    if own.published is not None:
        _print_published(own)
        return
    if own.cluster is None:
        raise InputError("--cluster is not set: give nodes and their number, as in h100x8:64")
    check_positive(own, "top")
    if not 0 <= own.reserve_gib < 1000:
        raise InputError(f"--reserve-gib is {own.reserve_gib}: it must be from 0 to below 1000")
    cluster, reserve = parse_cluster(own.cluster), round(own.reserve_gib * GIB)
    cluster = replace(cluster, efficiency=_efficiency(own))
    config = parse_command_line(flags)
    beside = None if own.beside is None else _beside_config(own.beside)
    _check_mean_choices(config, own.mean_choices)
    plans: list[Plan] = []
    refused: list[Refused] = []
    if own.own_layout:
        found = plan_layout(config, _vocabulary(config), cluster, reserve, own.mean_choices)
        if isinstance(found, Refused):
            raise InputError(f"the layout is not possible: {found.reason}")
        plans = [found]
    else:
        plans, refused = search(config, _vocabulary(config), cluster, reserve, own.mean_choices)
    shown = plans[: own.top]
    others = [_beside(beside, plan, cluster, reserve, own.mean_choices) for plan in shown]
    if own.json:
        shape = shape_of(config, _vocabulary(config), own.mean_choices)
        found_json = _as_json(shape, cluster, shown, others, refused)
        print(json.dumps(found_json | {"experts_per_token": _mean_json(shape, config, own)}))
    else:
        print(_mean(config, own.mean_choices), end="")
        _print(config, cluster, shown, others, refused, len(plans))


def _efficiency(own: argparse.Namespace) -> Efficiency:
    published = Efficiency()
    return published if own.measured is None else measured(Path(own.measured), published)


def _print_published(own: argparse.Namespace) -> None:
    efficiency = _efficiency(own)
    rows = []
    for run in read_published(Path(own.published)):
        time = run.planned(efficiency)
        rows.append(
            {
                "name": run.name,
                "published_tokens_per_second_and_gpu": run.tokens_per_gpu,
                "planned_tokens_per_second_and_gpu": time.tokens_per_gpu,
                "error": time.tokens_per_gpu / run.tokens_per_gpu - 1,
                "seconds_by_part": time.parts,
                "source": run.source,
                "differs": run.differs,
            }
        )
    if own.json:
        print(json.dumps(rows))
        return
    print(f"{'run':40}{'published':>10}{'planned':>9}{'error':>9}   tokens/s/GPU")
    for row in rows:
        print(
            f"{row['name']:40}{row['published_tokens_per_second_and_gpu']:10,.0f}"
            f"{row['planned_tokens_per_second_and_gpu']:9,.0f}{row['error']:+9.1%}"
        )


def _vocabulary(config: Config) -> int:
    if config.data.vocab_size is None:
        raise InputError("--vocab-size is not set: give the size of the tokenizer")
    return config.data.vocab_size


def _check_mean_choices(config: Config, mean_choices: float | None) -> None:
    if mean_choices is None:
        return
    dense = config.moe.num_experts is None
    if dense or (config.selection.mean_choices is not None and target_of(config) is None):
        raise InputError(
            f"--mean-choices is {mean_choices}, but the configuration says how many experts a "
            "token has: leave it out"
        )
    if not 0 < mean_choices <= config.num_experts:
        raise InputError(
            f"--mean-choices is {mean_choices}: it must be above 0 and at most --num-experts "
            f"{config.num_experts}"
        )


def _mean(config: Config, mean_choices: float | None) -> str:
    """A line on the mean number of experts per token, if training decides it."""
    target = target_of(config)
    if target is None:
        return "" if mean_choices is None else f"--mean-choices: {mean_choices:g} a token\n"
    if mean_choices is not None:
        return f"--mean-choices: {mean_choices:g} a token, in place of {target.flags}\n"
    first = f"; {target.at_first}" if target.at_first else ""
    return (
        f"training decides the number of experts per token: the plan is for {target.mean:g}, the "
        f"target of {target.flags}{first} (--mean-choices plans another number)\n"
    )


def _mean_json(shape: Shape, config: Config, own: argparse.Namespace) -> dict[str, Any] | None:
    """The mean number of experts per token, and what says it."""
    if shape.experts is None:
        return None
    target = target_of(config)
    source = None if target is None else target.flags
    source = source if own.mean_choices is None else "--mean-choices"
    return {"mean": shape.experts.per_token, "target_of": source}


def _beside_config(file: str) -> Config:
    if not Path(file).is_file():
        raise InputError(f"--beside {file} does not exist: name a YAML file")
    return parse_command_line(["--config", file])


def _beside(
    beside: Config | None, plan: Plan, cluster: Cluster, reserve: int, mean_choices: float | None
) -> Plan | Refused | None:
    """The plan of the second configuration in the layout of a plan of the first."""
    if beside is None:
        return None
    layout = plan.layout
    parallel = replace(
        beside.parallel,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pp,
        num_layers_per_virtual_pipeline_stage=(
            None if layout.virtual == 1 else beside.model.num_layers // layout.pp // layout.virtual
        ),
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        ddp_bucket_size=layout.bucket_size,
    )
    training = replace(
        beside.training,
        micro_batch_size=layout.micro_batch,
        global_batch_size=layout.global_batch,
        recompute_granularity=_recompute(layout),
        recompute_modules=layout.recompute_modules or None,
    )
    same = replace(beside, parallel=parallel, training=training)
    return plan_layout(same, _vocabulary(same), cluster, reserve, mean_choices)


def _recompute(layout: Layout) -> str | None:
    """The value of --recompute-granularity."""
    if layout.recompute:
        return "full"
    return "selective" if layout.recompute_modules else None


def _as_json(
    shape: Shape,
    cluster: Cluster,
    plans: list[Plan],
    others: list[Plan | Refused | None],
    refused: list[Refused],
) -> dict[str, Any]:
    return {
        "cluster": asdict(cluster) | {"gpus": cluster.ranks},
        "plans": [
            _plan_json(shape, cluster, plan) | ({} if other is None else {"beside": _other(other)})
            for plan, other in zip(plans, others, strict=True)
        ],
        "refused": [asdict(each) for each in refused],
    }


def _plan_json(shape: Shape, cluster: Cluster, plan: Plan) -> dict[str, Any]:
    messages = messages_of_stage(shape, plan.layout, plan.stage)
    return _summary(plan) | {
        "stages": [_stage_json(shape, plan.layout, stage) for stage in range(plan.layout.pp)],
        "messages": [
            asdict(each) | {"wire": asdict(each.wire(cluster.node.gpus))} for each in messages
        ],
    }


def _stage_json(shape: Shape, layout: Layout, stage: int) -> dict[str, Any]:
    """The memory of each GPU of a pipeline stage."""
    return asdict(memory_of_stage(shape, layout, stage)) | {
        "weights_by_part": weights_by_part(shape, layout, stage),
        "activations_of_a_micro_batch_by_part": activations_by_part(shape, layout, stage),
    }


def _summary(plan: Plan) -> dict[str, Any]:
    return {
        "layout": asdict(plan.layout) | {"dp": plan.layout.dp, "edp": plan.layout.edp},
        "memory": asdict(plan.memory) | {"total": plan.memory.total, "stage": plan.stage},
        "seconds": plan.time.seconds,
        "seconds_by_part": plan.time.parts,
        "tokens_per_second_and_gpu": plan.time.tokens_per_gpu,
        "model_tflops_per_gpu": plan.time.flops_per_gpu / 1e12,
    }


def _other(other: Plan | Refused) -> dict[str, Any]:
    return asdict(other) if isinstance(other, Refused) else _summary(other)


HEADER = (
    "   tp cp pp vpp  ep etp   dp  mb recompute  tokens/s/GPU  TFLOP/s  step s    GiB"
    "  weights grads  optim   kept"
)


def _print(
    config: Config,
    cluster: Cluster,
    plans: list[Plan],
    others: list[Plan | Refused | None],
    refused: list[Refused],
    fitting: int,
) -> None:
    print(f"{cluster.text}; {config.training.global_batch_size} sequences of "
          f"{config.training.seq_length} tokens a step\n")  # fmt: skip
    if plans:
        print(HEADER + ("" if others[0] is None else "   beside: tokens/s/GPU    GiB"))
    for plan, other in zip(plans, others, strict=True):
        print(_line(plan) + _line_beside(plan, other))
    if plans:
        print("\nthe first, share of the step: " + _shares(plans[0]))
    print(f"\n{fitting} of {fitting + len(refused)} layouts fit")
    for kind, (count, reason) in reasons(refused).items():
        print(f"{count:6,} need {kind}" if "memory" in kind else f"{count:6,} have {kind}")
        print(f"       for example {_name(refused, kind)}: {reason}")


def _name(refused: list[Refused], kind: str) -> str:
    layout: Layout = [each.layout for each in refused if each.kind == kind][-1]
    return (
        f"tp {layout.tp}, cp {layout.cp}, pp {layout.pp}, vpp {layout.virtual}, ep {layout.ep}, "
        f"etp {layout.etp}, micro-batch {layout.micro_batch}"
        + (f", {recompute} recomputation" if (recompute := _recompute(layout)) else "")
    )


def _line(plan: Plan) -> str:
    at, memory, time = plan.layout, plan.memory, plan.time
    return (
        f"  {at.tp:3}{at.cp:3}{at.pp:3}{at.virtual:4}{at.ep:4}{at.etp:4}{at.dp:5}"
        f"{at.micro_batch:4} {_recompute(at) or 'none':>9}{time.tokens_per_gpu:14,.0f}"
        f"{time.flops_per_gpu / 1e12:9.0f}{time.seconds:8.2f}{memory.total / GIB:7.1f}"
        f"{memory.weights / GIB:9.1f}{memory.gradients / GIB:6.1f}{memory.optimizer / GIB:7.1f}"
        f"{memory.activations / GIB:7.1f}"
    )


def _line_beside(plan: Plan, other: Plan | Refused | None) -> str:
    if other is None:
        return ""
    if isinstance(other, Refused):
        return f"   {other.reason}"
    speed = other.time.tokens_per_gpu
    share = plan.time.tokens_per_gpu / speed - 1
    return f"   {speed:12,.0f} ({share:+.1%}){other.memory.total / GIB:7.1f}"


def _shares(plan: Plan) -> str:
    parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / plan.time.seconds:.1%}" for name, seconds in parts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
