"""MoE layers for any torch model: the same code that pretraining runs, on one process.

    from moe_parallel import AoE

    moe = AoE(hidden_size=512, num_experts=8, top_k=2, low_rank_size=64)
    y = moe(x)                    # [..., 512] -> [..., 512]
    loss = task_loss(y) + moe.aux_loss

A layer needs no process group and no Megatron-Core. docs/library.md has a complete
training loop.
"""

from moe_parallel.library.layers import AoE, MixtureOfExperts, RoutedMoE
from moe_parallel.library.recording import record_routing
from moe_parallel.library.transformers_experts import register_experts

__all__ = ["AoE", "MixtureOfExperts", "RoutedMoE", "record_routing", "register_experts"]
