"""Options of a file for a system of expert selection that the command line replaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_parallel.config.config import EXPERT_SELECTION, expert_selection, selection_options
from moe_parallel.config.message import as_typed, flag
from moe_parallel.config.moe import MoEConfig
from moe_parallel.config.option import options
from moe_parallel.config.selection import selection_of
from moe_parallel.errors import InputError

_LAYOUT_OF_EXPERTS = {"expert_model_parallel_size", "expert_tensor_parallel_size"}


def foreign_options(system: str) -> set[str]:
    """The options of other systems that `system` does not have."""
    by_system = selection_options()
    everywhere = {name for its_options in by_system.values() for name in its_options}
    return everywhere - by_system[system].keys()


def expert_options() -> set[str]:
    """The options that a dense model does not have."""
    of_systems = {name for its_options in selection_options().values() for name in its_options}
    of_experts = {each.name for each in options(MoEConfig)} - {"moe_backend"}
    return {EXPERT_SELECTION} | of_systems | of_experts | _LAYOUT_OF_EXPERTS


def without_replaced(
    file: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], str | None]:
    """The options of a file that are compatible with those of the command line.

    Left out are the options of the file's system that the system on the command line does not have.
    With `--num-experts none`, all options for experts are left out. An option that does not belong
    to the file's own system stays, and is refused later.

    Args:
        file: raw values by option name.
        given: those of the command line.

    Returns (options, one line that lists the options left out, or None).
    """
    which = expert_selection()
    old = str(file.get(which.name, which.default))
    new = str(given.get(which.name, old))
    replaced, by = expert_options() - {"num_experts"}, "--num-experts none"
    if given.get("num_experts") != "none":
        try:
            its, others = ({o.name for o in options(selection_of(name))} for name in (old, new))
        except InputError:
            return dict(file), None  # refused later
        replaced, by = its - others, f"{which.flag} {new}"
    gone = {name: value for name, value in file.items() if name in replaced}
    if not gone:
        return dict(file), None
    listed = ", ".join(as_typed(f"{flag(name)} {value}") for name, value in gone.items())
    return {n: v for n, v in file.items() if n not in gone}, f"{by} leaves out {listed}"
