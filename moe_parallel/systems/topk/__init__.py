"""topk: a linear router selects the K most probable experts. The options; `rule` has the record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.option import option
from moe_parallel.config.selection.kinds import RoutedSelection
from moe_parallel.config.selection.parts import TopKChoices
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class TopKSelection(TopKChoices, RoutedSelection, system="topk"):
    """A linear router selects the K most probable experts (Shazeer 2017; Switch for K = 1)."""

    moe_router_score_function: str = option(
        "softmax",
        "function from router logits to probabilities: softmax, or sigmoid divided by the sum "
        "over the chosen experts (DeepSeek-V3)",
        choices=("softmax", "sigmoid"),
        weights=True,
    )
    moe_router_pre_softmax: bool = option(
        False,
        "weight the chosen experts by their softmax over all experts, as it is; false: renormalize "
        "it over the chosen ones. Needs softmax scores. With one expert per token it is always on",
        weights=True,
    )
    moe_router_num_groups: int | None = option(
        None, "number of groups that divide the experts; none: no groups", weights=True, least=1
    )
    moe_router_group_topk: int | None = option(
        None,
        "number of groups, those with the highest scores, from which a token may choose experts",
        weights=True,
        least=1,
    )

    @property
    def renormalizes(self) -> bool:
        return self.moe_router_topk > 1 and not self.moe_router_pre_softmax

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_pre_softmax and self.moe_router_score_function != "softmax":
            raise InputError(
                "--moe-router-pre-softmax is true, but --moe-router-score-function is "
                f"{self.moe_router_score_function}: remove one of them"
            )
        num_groups, topk = self.moe_router_num_groups, self.moe_router_group_topk
        n = config.num_experts
        if (num_groups is None) != (topk is None):
            missing = "--moe-router-group-topk" if topk is None else "--moe-router-num-groups"
            raise InputError(
                f"{missing} is not set: group-limited routing takes --moe-router-num-groups and "
                "--moe-router-group-topk together"
            )
        if num_groups is None or topk is None:
            return
        if n % num_groups:
            raise InputError(
                f"--moe-router-num-groups is {num_groups}, which does not divide --num-experts "
                f"{n}: choose a divisor"
            )
        if topk > num_groups:
            raise InputError(
                f"--moe-router-group-topk is {topk}, above --moe-router-num-groups {num_groups}: "
                f"choose at most {num_groups}"
            )
        left = topk * (n // num_groups)
        if self.moe_router_topk > left:
            raise InputError(
                f"--moe-router-topk is {self.moe_router_topk}, but --moe-router-group-topk {topk} "
                f"of --moe-router-num-groups {num_groups} leaves {left} experts to choose from: "
                "lower it or allow more groups"
            )
