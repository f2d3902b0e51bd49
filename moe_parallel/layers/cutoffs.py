"""The cutoffs that belong to the options of a system."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig

from moe_parallel.balancing.bias import ExpertBias
from moe_parallel.balancing.cutoffs import QuantileCutoffs, SignCutoffs
from moe_parallel.config import Cutoffs, DispatchedSelection


def build_cutoffs(
    selection: DispatchedSelection, config: TransformerConfig, train_iters: int | None
) -> ExpertBias | None:
    """The cutoffs of a layer. None: the system has none.

    `train_iters`: of the run; None: no run trains the layer.
    """
    if not isinstance(selection, Cutoffs):
        return None
    n, k = config.num_moe_experts, selection.mean_choices
    assert n is not None
    start = selection.first_cutoff(config.hidden_size, n, config.init_method_std)
    if selection.moe_threshold_update == "sign":
        return SignCutoffs(n, start, k, selection.moe_threshold_update_rate)
    return QuantileCutoffs(n, start, k, selection.ema(train_iters))
