"""The cells of a scaling study: numbers of nodes times values of flags."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from moe_parallel.config import Config, make_config, validate
from moe_parallel.errors import InputError


@dataclass(frozen=True)
class ScalingCell:
    """One run: a number of nodes and the options of its training."""

    nodes: int
    ranks: int
    varied: Mapping[str, Any]  # values of --vary by option name
    options: Mapping[str, Any]  # raw values by option name

    @property
    def name(self) -> str:
        parts = [f"{name}={value}" for name, value in self.varied.items()]
        return "_".join([f"nodes={self.nodes}", *parts])

    @property
    def config(self) -> Config:
        """Raises InputError if the options are wrong."""
        return make_config({**self.options, "save": "unused"})

    def why_not(self) -> str | None:
        """Why this number of ranks cannot train the cell; None if it can.

        Raises InputError if the options are wrong on any number of ranks.
        """
        config = self.config
        try:
            validate(config, self.ranks)
        except InputError as error:
            return str(error)
        return None


def parse_vary(words: Sequence[str]) -> dict[str, list[Any]]:
    """`name=1,2` as {option name: values}. Raises InputError."""
    varied: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        texts = values.split(",")
        if not key or not all(texts):
            raise InputError(f"--vary {word}: write flag=value,value, as in micro-batch-size=1,2")
        if key in varied:
            raise InputError(f"--vary names {name} twice: give all its values in one word")
        if any("/" in text for text in texts):
            raise InputError(f"--vary {word}: a value names a folder of the study; leave out /")
        try:
            varied[key] = [yaml.safe_load(text) for text in texts]
        except (yaml.YAMLError, LookupError, RecursionError, TypeError, ValueError):
            raise InputError(f"--vary {word[:200]}: a value is not YAML") from None
    return varied


def cells(
    options: Mapping[str, Any],
    nodes: Sequence[int],
    varied: Mapping[str, Sequence[Any]],
    *,
    ranks_per_node: int,
    weak: bool,
) -> Iterator[ScalingCell]:
    """Every number of nodes with every combination of values.

    Args:
        options: raw values by option name, of the file that all cells share.
        weak: the global batch is that of one node, times the nodes. Otherwise all cells have it.

    Raises InputError if weak scaling has no global batch to multiply.
    """
    for count in nodes:
        for values in itertools.product(*varied.values()):
            chosen = dict(zip(varied, values, strict=True))
            its_own = {**options, **chosen}
            if weak:
                batch = its_own.get("global_batch_size")
                if not isinstance(batch, int):
                    raise InputError("--weak: --config has no global-batch-size: give one node's")
                its_own["global_batch_size"] = batch * count
            yield ScalingCell(count, count * ranks_per_node, chosen, its_own)
