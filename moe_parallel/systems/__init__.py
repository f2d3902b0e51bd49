"""The systems of expert selection. Each has one record, in the file with the name of its rule.

A new system is a configuration (a `Selection` with its own name), a rule, and a record:

    register(System(MySelection, layer=RoutedLayer, rules=my_rules))

The record may be in any module that is imported before the configuration is read.
"""

from moe_parallel.layers.system import Rules, System
from moe_parallel.systems import (  # each registers its records
    aoe,
    expert_choice,
    hash_routing,
    lory,
    relu,
    routing_free,
    smear,
    threshold,
    top_p,
    topk,
    uoe,
)
from moe_parallel.systems.registry import register, system_of

__all__ = [
    "Rules",
    "System",
    "aoe",
    "expert_choice",
    "hash_routing",
    "lory",
    "register",
    "routing_free",
    "relu",
    "smear",
    "system_of",
    "threshold",
    "top_p",
    "topk",
    "uoe",
]
