"""Megatron-Core's Muon, for weights that stack the matrices of experts.

Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982) replaces the momentum U S V^T of a matrix by
about U V^T, with the iterations of Newton and Schulz. Megatron-Core does this to each weight of two
axes outside the vocabulary's tables, and leaves all others to Adam. A weight [L, I, ...] of L
experts would be among the others. Here the matrix [I, O] of each expert is one of its own, with all
axes from the third in O, as Megatron-Core has it: the gate and up projections of a SwiGLU expert
are one matrix.

Needs Megatron-Core 0.19 and emerging-optimizers (`megatron.check_muon`), also to be imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.optimizer import emerging_optimizers as registry
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from moe_parallel.errors import InputError


class StackedMuon(registry.TensorParallelMuon):  # type: ignore[misc]
    """Orthogonalizes each matrix of a stack. Weights of two axes are Megatron-Core's own."""

    def orthogonalize(self, p: Any, grad: torch.Tensor, **group: Any) -> torch.Tensor:
        """The update of the weight `p` from its momentum `grad`, fp32, of the same shape.

        If etp divides the matrices, they are gathered, so that the result does not depend on it;
        with --muon-tp-mode blockwise the parts are matrices of their own.
        """
        if grad.ndim == 2:
            return super().orthogonalize(p, grad, **group)  # type: ignore[no-any-return]
        momentum_LOI = grad.flatten(2).mT  # outputs first: the scale of some modes is not symmetric
        etp, axis = self.pg_collection.expt_tp, getattr(p, "partition_dim", -1)
        divided = None
        if axis > 0 and etp.size() > 1 and self.tp_mode != "blockwise":
            divided = -1 if axis == 1 else -2
            momentum_LOI = momentum_LOI.contiguous()
        update_LOI = self.scaled_orthogonalize_fn(momentum_LOI, etp, divided)
        return update_LOI.mT.reshape(grad.shape)  # type: ignore[no-any-return]


def _is_for_adam(weight: Any) -> bool:
    return weight.ndim < 2 or getattr(weight, "is_embedding_or_output_parameter", False)


def _arguments(config: Any, chunks: list[Any], groups: Any) -> dict[str, Any]:
    """Of the optimizer. Raises InputError for what stacks do not support."""
    if config.use_layer_wise_distributed_optimizer:
        raise InputError(
            "--use-distributed-optimizer with --optimizer muon gives each rank whole weights, and "
            "moe_parallel stacks those of all its experts: leave it out"
        )
    if config.muon_tp_mode == "distributed":
        raise InputError(
            "--muon-tp-mode is distributed, which Newton and Schulz's iterations on stacked "
            "experts do not have: choose duplicated or blockwise"
        )
    arguments: dict[str, Any] = registry._muon_config_to_kwargs(config, chunks, groups)
    return arguments


def orthogonalize_stacks() -> None:
    """Make this the class behind Megatron-Core's `optimizer="muon"`; a second call does nothing."""
    to_adam = ParamKey(predicate=ParamPredicate(name="vector_or_table", fn=_is_for_adam))
    registry._EMERGING_OPTIMIZERS["muon"] = replace(
        registry._EMERGING_OPTIMIZERS["muon"],
        optimizer_cls=StackedMuon,
        config_to_kwargs=_arguments,
        default_param_overrides={to_adam: {"optimizer": "adam"}},
    )
