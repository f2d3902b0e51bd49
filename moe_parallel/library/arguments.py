"""Converts the arguments of a layer to a training configuration, and checks it by its rules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from moe_parallel.config import Config, Selection, make_config, validate_layer
from moe_parallel.errors import InputError
from moe_parallel.systems import SELECTIONS

#: The names of arguments in the configuration, where they differ.
OPTIONS = {
    "top_k": "moe_router_topk",
    "low_rank_size": "aoe_low_rank_size",
    "wide_size": "aoe_wide_size",
    "up_init_method": "aoe_up_init_method",
    "aux_loss_coeff": "moe_aux_loss_coeff",
    "expert_bias": "moe_router_enable_expert_bias",
    "capacity_factor": "moe_expert_capacity_factor",
    "backend": "moe_backend",
}
ARGUMENTS = {option: argument for argument, option in OPTIONS.items()}


def layer_config(sizes: Mapping[str, Any], others: Mapping[str, Any]) -> Config:
    """Return the checked configuration of a single layer.

    Args:
        sizes: arguments that must have a value.
        others: arguments and options by name; None: training's default.

    Raises InputError. Its message names arguments where training's would name flags.
    """
    for name, value in sizes.items():
        if value is None:
            raise InputError(f"{name} is None: give it an integer")
    given = dict(sizes) | {name: value for name, value in others.items() if value is not None}
    if isinstance(sizes["hidden_size"], int):
        given = {"ffn_hidden_size": 4 * sizes["hidden_size"]} | given
    raw = {OPTIONS.get(name, name): value for name, value in given.items()}
    try:
        config = make_config({"num_layers": 1, "num_attention_heads": 1, **raw})
        validate_layer(config)
    except InputError as error:
        raise InputError(_by_argument(str(error), given)) from None
    return config


def options_of_layer(
    layer: str,
    default: type[Selection],
    family: type[Selection],
    selection: Selection | None,
    shortcuts: Mapping[str, Any],
) -> dict[str, Any]:
    """The options of the selection: those of `selection`, or the shortcuts for the default system.

    Args:
        layer: the name of the layer's class.
        default: the system to which the shortcuts belong.
        family: the common base class of the systems that the layer accepts.
        shortcuts: arguments that stand for options of the default; None: not given.

    Raises InputError for a selection of another family or by token id, or if both are given.
    """
    if selection is None:
        return {"expert_selection": default.system, **shortcuts}
    # A layer alone has no token ids.
    if not isinstance(selection, family) or selection.reads_token_ids:
        kinds = (kind for kind in SELECTIONS.values() if issubclass(kind, family))
        names = ", ".join(kind.__name__ for kind in kinds if not kind().reads_token_ids)
        raise InputError(
            f"selection is of type {type(selection).__name__}: {layer} takes one of {names}"
        )
    for name, value in shortcuts.items():
        if value is not None:
            raise InputError(
                f"{name} and selection are both given: leave {name} out, and set {OPTIONS[name]} "
                f"of {type(selection).__name__}"
            )
    fields = dataclasses.fields(selection)
    options = {field.name: getattr(selection, field.name) for field in fields}
    return {"expert_selection": selection.system, **options}


def _by_argument(message: str, given: Mapping[str, Any]) -> str:
    """`message` with the names of arguments, or of fields of a given selection, instead of
    flags."""

    def name(flag: re.Match[str]) -> str:
        option = flag[1].replace("-", "_")
        return option if option in given else ARGUMENTS.get(option, option)

    return re.sub(r"--([a-z0-9][a-z0-9-]*)", name, message)
