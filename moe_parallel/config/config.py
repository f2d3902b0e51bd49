"""The whole configuration of a run, read from YAML and flags and written back as YAML."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.model import ModelConfig, MoEConfig, moe_layer_pattern
from moe_parallel.config.option import Option, as_typed, build, flag, options
from moe_parallel.config.run import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
)
from moe_parallel.config.selection import (
    SELECTIONS,
    Selection,
    TopKSelection,
    selection_name,
)
from moe_parallel.errors import InputError


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on. Each section is a frozen dataclass of options."""

    model: ModelConfig = ModelConfig()
    moe: MoEConfig = MoEConfig()
    selection: Selection = TopKSelection()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    fp8: Fp8Config = Fp8Config()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Which layers hold experts, first to last."""
        if self.moe.num_experts is None:
            return (False,) * self.model.num_layers
        return moe_layer_pattern(self.moe.moe_layer_freq, self.model.num_layers)

    @property
    def expert_width(self) -> int:
        """d_ffn of one expert; for AoE its d_wide (Eq. 5 unless set)."""
        width = self.moe.moe_ffn_hidden_size or self.model.ffn_hidden_size
        return self.selection.expert_width(self.model.hidden_size, width)

    @property
    def first_part(self) -> int | None:
        """Tokens at the start of sequences that a second loss of evaluations leaves out.

        None: there is no such loss. A sequence of a single segment would leave nothing for it.
        """
        first = self.logging.eval_first_part or self.selection.first_part
        return None if first is None or first >= self.training.seq_length else first

    @property
    def cautions(self) -> list[str]:
        """What a user has to know of the losses that a run will report."""
        found = [self.selection.caution] if self.selection.caution is not None else []
        segment, length = self.selection.first_part, self.training.seq_length
        if segment is not None and segment >= length:
            found.append(
                f"sequences of --seq-length {length} are a single segment of --lory-segment-length "
                f"{segment}: there is no loss after it, and the router learns nothing"
            )
        if self.moe.moe_expert_capacity_factor is not None:
            found.append(
                "which choices an over-full expert drops depends on the whole micro-batch, later "
                "tokens too: where choices are dropped, losses are not the likelihood of the text"
            )
        return found

    @property
    def virtual_stages(self) -> int | None:
        """Virtual pipeline stages on each pipeline rank; None: the plain schedule."""
        layers = self.parallel.num_layers_per_virtual_pipeline_stage
        if layers is None:
            return None
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size // layers

    def padded_vocab_size(self, vocab_size: int) -> int:
        """The vocabulary as the model holds it: a multiple that no layout changes."""
        multiple = self.model.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple

    def values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(section, {option: value}) in the order in which `config.yaml` lists them."""
        for section in dataclasses.fields(self):
            part = getattr(self, section.name)
            values = {o.name: getattr(part, o.name) for o in options(type(part))}
            if section.name == "selection":
                values = {"expert_selection": selection_name(part)} | values
            yield section.name, values

    def to_yaml(self) -> str:
        """All values, as a file that `read_config` reads back to an equal configuration."""
        parts = []
        for section, values in self.values():
            flat = {name.replace("_", "-"): _plain(value) for name, value in values.items()}
            parts.append(f"# {section}\n" + yaml.safe_dump(flat, sort_keys=False))
        return "\n".join(parts)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def sections() -> dict[str, type]:
    """The sections without alternatives, by name."""
    fields = dataclasses.fields(Config)
    return {f.name: type(f.default) for f in fields if f.name != "selection"}


def common_options() -> dict[str, Option]:
    """The options that every configuration has, by name."""
    return {o.name: o for section in sections().values() for o in options(section)}


def selection_options() -> dict[str, dict[str, Option]]:
    """The options of each expert-selection system: {system: {name: option}}."""
    return {name: {o.name: o for o in options(kind)} for name, kind in SELECTIONS.items()}


EXPERT_SELECTION = Option(
    name="expert_selection",
    kind=str,
    optional=False,
    many=False,
    default="topk",
    help="who decides which expert computes",
    choices=tuple(SELECTIONS),
)


def make_config(raw: Mapping[str, Any]) -> Config:
    """A configuration from raw values by option name; what is not named keeps its default.

    Raises InputError for an unknown name (with the nearest), a value of the wrong type, or an
    option of another expert-selection system than the one chosen.
    """
    raw = dict(raw)
    system = EXPERT_SELECTION.parse(raw.pop("expert_selection", EXPERT_SELECTION.default))
    common, by_system = common_options(), selection_options()
    known = common | by_system[system]
    for name in raw:
        if name not in known:
            raise _unknown(name, system, known, by_system)
    values = {name: known[name].parse(value) for name, value in raw.items()}
    parts = {name: build(section, values) for name, section in sections().items()}
    return Config(selection=build(SELECTIONS[system], values), **parts)


def _unknown(
    name: str, system: str, known: Mapping[str, Option], by_system: dict[str, dict[str, Option]]
) -> InputError:
    owners = [other for other, its_options in by_system.items() if name in its_options]
    if owners:
        return InputError(
            f"{flag(name)} belongs to --expert-selection {' or '.join(owners)}, but "
            f"{system} is selected: remove it or change --expert-selection"
        )
    near = difflib.get_close_matches(name, [*known, "expert_selection"], n=1)
    hint = f"did you mean {flag(near[0])}?" if near else "--help lists all flags"
    return InputError(f"{as_typed(flag(name))} is no flag or YAML key of this program: {hint}")
