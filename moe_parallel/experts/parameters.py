"""Expert weights: the part that this rank holds, the reduction of gradients, and checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe_parallel.experts.main_gradients import AddsToMainGradients, gradient_in_main_grad
from moe_parallel.parallel import Groups

ShardedStateDict = dict[str, Any]
#: The weights of some experts as operators take them, and their main gradients (None: not used).
Matrices = tuple[list[torch.Tensor], Any]


class ShardedModule(nn.Module):
    """A module whose checkpoints are those of a Megatron-Core module."""

    def sharded_state_dict(self, *arguments: Any, **named: Any) -> ShardedStateDict:
        """The weights here, and what each submodule says of its own."""
        from megatron.core.transformer.module import MegatronModule

        return MegatronModule.sharded_state_dict(self, *arguments, **named)


class ExpertParameters(AddsToMainGradients, nn.Module):
    """The stacked weights of this rank's experts. Axis 0 counts experts; another axis is sharded.

    A subclass declares its weights with `add_weight` and computes with them. The weights are not
    initialized here. `model.initialization` fills them with values that do not depend on the
    layout.
    """

    def __init__(self, num_experts: int, groups: Groups, dtype: torch.dtype) -> None:
        """
        Args:
            num_experts: E, over all ranks; ep divides it.
            groups: ep splits the experts; etp splits the sharded axis of each weight.
            dtype: the dtype of the weights.
        """
        super().__init__()
        self.groups = groups
        self.num_local_experts = num_experts // groups.ep.size()
        self.dtype = dtype
        self._sharded_axis: dict[str, int] = {}

    def add_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        sharded_axis: int,
        init_std: float | None = None,
    ) -> None:
        """Register the weight `name`, [L, *shape], with `sharded_axis` (L is 0) split over etp.

        `init_std`: the standard deviation of its initial values. None: that of the other weights.
        """
        full = (self.num_local_experts, *shape)
        shards = self.groups.etp.size()
        assert full[sharded_axis] % shards == 0, (name, full, shards)
        local = list(full)
        local[sharded_axis] //= shards
        weight = nn.Parameter(torch.empty(local, dtype=self.dtype))
        mark_expert_weight(weight, self.groups, sharded_axis)
        weight.init_std = init_std  # type: ignore[attr-defined]
        self.register_parameter(name, weight)
        self._sharded_axis[name] = sharded_axis

    def local(self, weight: torch.Tensor) -> torch.Tensor:
        """The part [L, ...], for this rank's experts, of a weight [E, ...] of all experts."""
        first = self.groups.ep.rank() * self.num_local_experts
        return weight[first : first + self.num_local_experts]

    def matrices(self, *weights: torch.Tensor) -> Matrices:
        """The weights as [L, I, O], for operators, and their main gradients (None: not used)."""
        if not self.adds_to_main_gradients:
            return [weight.flatten(2) for weight in weights], None
        main_gradients = [w.main_grad for w in weights]  # type: ignore[attr-defined]
        return (
            [gradient_in_main_grad(weight).flatten(2) for weight in weights],
            tuple(main.view(*main.shape[:2], -1) for main in main_gradients),
        )

    def matrices_of_parts(self, parts: int, *weights: torch.Tensor) -> list[Matrices]:
        """`matrices` of each of `parts` parts of the experts. Each has L / parts of them.

        All parts are views of one split. Their gradients are joined once, when all are there.
        """
        whole, main = self.matrices(*weights)
        splits = [split_experts(weight, parts) for weight in whole]
        if main is None:
            return [(list(of_part), None) for of_part in zip(*splits, strict=True)]
        mains = zip(*(split_experts(each, parts) for each in main), strict=True)
        return [(list(ws), of_part) for *ws, of_part in zip(*splits, mains, strict=True)]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> ShardedStateDict:
        """Each weight as a shard of a tensor [E, *shape] of all experts."""
        return {
            prefix + name: shard_of_experts(
                prefix + name, weight, self._sharded_axis[name], self.groups, sharded_offsets
            )
            for name, weight in self.named_parameters()
        }


def split_experts(weight_LX: torch.Tensor, parts: int) -> tuple[torch.Tensor, ...]:
    """The weights of each part of the experts, as views of one split."""
    return weight_LX.split(len(weight_LX) // parts)


def shard_of_experts(
    key: str,
    weight: torch.Tensor,
    sharded_axis: int,
    groups: Groups,
    sharded_offsets: tuple[tuple[int, int, int], ...],
) -> Any:
    """This rank's part [L, ...] of a tensor [E, ...] with one axis split over etp: Megatron-Core's
    ShardedTensor."""
    from megatron.core.dist_checkpointing import ShardedTensor

    before = len(sharded_offsets)
    return ShardedTensor.from_rank_offsets(
        key,
        weight,
        *sharded_offsets,
        (before, groups.ep.rank(), groups.ep.size()),
        (before + sharded_axis, groups.etp.rank(), groups.etp.size()),
        replica_id=(0, 0, groups.edp.rank()),
        prepend_axis_num=before,
    )


def mark_expert_weight(weight: nn.Parameter, groups: Groups, sharded_axis: int) -> None:
    """Sets the attributes by which Megatron-Core reduces, counts and saves an expert weight.

    The gradient is reduced over expert-data-parallel ranks instead of data-parallel ranks if the
    two differ, that is, with ep > 1 or etp != tp. In the gradient norm the weight is never a
    tensor-parallel duplicate: etp ranks hold different shards, and ranks with equal shards are in
    edp.
    """
    same_as_dense = groups.ep.size() == 1 and groups.etp.size() == groups.tp.size()
    weight.allreduce = same_as_dense  # type: ignore[attr-defined]
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight.partition_dim = sharded_axis  # type: ignore[attr-defined]
    weight.partition_stride = 1  # type: ignore[attr-defined]
