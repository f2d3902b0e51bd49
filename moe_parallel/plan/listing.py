"""The plans of a configuration on a cluster, for a user to choose from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.plan.cluster import Cluster
from moe_parallel.plan.layout import Layout
from moe_parallel.plan.mean_choices import check_mean_choices
from moe_parallel.plan.search import Plan, Refused, plan_layout, search
from moe_parallel.plan.shape import vocabulary_of


@dataclass(frozen=True)
class Listing:
    """The plans of a configuration, and those of a second one in the same layouts."""

    config: Config
    cluster: Cluster
    mean_choices: float | None  # see `plan.mean_choices`
    plans: list[Plan]  # fastest first
    beside: list[Plan | Refused | None]  # for each plan, that of the second; None: there is none
    refused: list[Refused]
    fitting: int  # the number of layouts that fit, of which `plans` may be the first

    @classmethod
    def of(
        cls,
        config: Config,
        cluster: Cluster,
        reserve: int,
        mean_choices: float | None = None,
        *,
        beside: Config | None = None,
        own_layout: bool = False,
        most: int,
    ) -> Listing:
        """Plans a configuration.

        Args:
            reserve: bytes of a GPU that stay free.
            beside: the second configuration.
            own_layout: only the layout of the configuration; otherwise every layout is tried.
            most: the number of plans in the listing.

        Raises InputError if a configuration cannot be planned.
        """
        check_mean_choices(config, mean_choices)
        vocabulary = vocabulary_of(config)
        refused: list[Refused] = []
        if own_layout:
            plans = [_own_plan(config, vocabulary, cluster, reserve, mean_choices)]
        else:
            plans, refused = search(config, vocabulary, cluster, reserve, mean_choices)
        shown = plans[:most]
        others: list[Plan | Refused | None] = [None] * len(shown)
        if beside is not None:
            same = [in_layout(beside, plan.layout) for plan in shown]
            others = [
                plan_layout(each, vocabulary_of(each), cluster, reserve, mean_choices)
                for each in same
            ]
        return cls(config, cluster, mean_choices, shown, others, refused, len(plans))


def _own_plan(
    config: Config, vocabulary: int, cluster: Cluster, reserve: int, mean_choices: float | None
) -> Plan:
    found = plan_layout(config, vocabulary, cluster, reserve, mean_choices)
    if isinstance(found, Refused):
        raise InputError(f"the layout is not possible: {found.reason}")
    return found


def in_layout(config: Config, layout: Layout) -> Config:
    """The configuration with the sizes of `layout`, which another configuration has.

    The number of virtual stages is the same, not the number of layers of each.
    """
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        sequence_parallel=layout.sequence_parallel,
        pipeline_model_parallel_size=layout.pp,
        num_layers_per_virtual_pipeline_stage=(
            None if layout.virtual == 1 else config.model.num_layers // layout.pp // layout.virtual
        ),
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        ddp_bucket_size=layout.bucket_size,
    )
    training = replace(
        config.training,
        micro_batch_size=layout.micro_batch,
        global_batch_size=layout.global_batch,
        recompute_granularity=layout.recompute_granularity,
        recompute_modules=layout.recompute_modules or None,
    )
    return replace(config, parallel=parallel, training=training)
