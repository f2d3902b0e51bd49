"""The parts of a layer that --recompute-granularity selective computes again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_parallel.config.message import shown
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

CORE_ATTENTION, NORM, DENSE, EXPERTS, SHARED = (
    "core_attn", "layernorm", "mlp", "moe", "shared_experts",
)  # fmt: skip
MODULES = (CORE_ATTENTION, NORM, DENSE, EXPERTS, SHARED)

#: Modules of Megatron-Core that these layers do not have, and why.
_NOT_HERE = {
    "moe_act": "the experts never keep their activation, so there is nothing to recompute",
    "mla_up_proj": "this model has no latent attention",
}


def recomputed_modules(granularity: str | None, modules: tuple[str, ...] | None) -> frozenset[str]:
    """The modules that are computed again one by one; none with another granularity."""
    if granularity != "selective":
        return frozenset()
    return frozenset((CORE_ATTENTION,) if modules is None else modules)


def check_recompute(config: Config) -> None:
    """Raise InputError for a module that the model does not have or that is recomputed anyway."""
    granularity, modules = config.training.recompute_granularity, config.training.recompute_modules
    if modules is None:
        return
    told = f"--recompute-modules {' '.join(modules)}"
    if granularity != "selective":
        raise InputError(
            f"{told} is for --recompute-granularity selective, which is {granularity or 'none'}: "
            "set it to selective or leave the modules out"
        )
    for module in modules:
        if module in _NOT_HERE:
            raise InputError(f"--recompute-modules {module}: {_NOT_HERE[module]}; leave it out")
        if module not in MODULES:
            raise InputError(
                f"--recompute-modules {shown(module)} is unknown: choose from {', '.join(MODULES)}"
            )
    layers = config.moe_layers
    if DENSE in modules and all(layers):
        raise InputError(
            f"--recompute-modules {DENSE} is for dense layers, and all have experts; leave it out"
        )
    if EXPERTS in modules and not any(layers):
        raise InputError(
            f"--recompute-modules {EXPERTS} is for experts, and the model is dense; leave it out"
        )
    if SHARED in modules:
        _check_shared(config, modules)


def _check_shared(config: Config, modules: tuple[str, ...]) -> None:
    asked = f"--recompute-modules {SHARED}"
    if config.selection.shared_expert is None or not any(config.moe_layers):
        raise InputError(
            f"{asked}: there is no shared expert; set --moe-shared-expert-intermediate-size or "
            "leave it out"
        )
    if config.selection.moe_shared_expert_overlap:  # type: ignore[attr-defined]
        raise InputError(
            f"{asked} cannot run during the dispatch as --moe-shared-expert-overlap does; leave "
            "one of them out"
        )
    if EXPERTS in modules:
        raise InputError(f"{asked}: {EXPERTS} recomputes shared experts, too; leave one out")
