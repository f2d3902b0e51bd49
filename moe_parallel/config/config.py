"""The whole configuration of a run, read from YAML and flags, checked, and written back as YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.message import as_typed, did_you_mean, flag, shown
from moe_parallel.config.model import ModelConfig, moe_layer_pattern
from moe_parallel.config.moe import MoEConfig
from moe_parallel.config.option import Option, Section, build, options
from moe_parallel.config.parallel import ParallelConfig
from moe_parallel.config.parser import GONE, launching_flags
from moe_parallel.config.run import CheckpointConfig, DataConfig, LoggingConfig
from moe_parallel.config.selection import Selection, recorded_name, selection_of, selections
from moe_parallel.config.selection.selection import TimeConstant
from moe_parallel.config.training import OptimizerConfig, TrainingConfig
from moe_parallel.errors import InputError

EXPERT_SELECTION = "expert_selection"
_DEFAULT = "topk"
#: That of libyaml is ten times as fast; PyYAML may be built without it.
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


@dataclass(frozen=True)
class Config:
    """All options of a run. Each section is a frozen dataclass of options."""

    model: ModelConfig = ModelConfig()
    moe: MoEConfig = MoEConfig()
    selection: Selection = dataclasses.field(default_factory=lambda: selections()[_DEFAULT]())
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    fp8: Fp8Config = Fp8Config()
    optimizer: OptimizerConfig = OptimizerConfig()
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def sections(self) -> Iterator[tuple[str, Section]]:
        """Each section by its name, in the order in which `config.yaml` lists them."""
        return ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))

    @property
    def num_experts(self) -> int:
        """n, the number of experts; only for a model with experts."""
        assert self.moe.num_experts is not None
        return self.moe.num_experts

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, first to last, whether it is an MoE layer."""
        if self.moe.num_experts is None:
            return (False,) * self.model.num_layers
        return moe_layer_pattern(self.moe.moe_layer_freq, self.model.num_layers)

    @property
    def expert_width(self) -> int:
        """d_ffn of one expert; for AoE, d_wide (by Eq. 5 unless it is set)."""
        return self.selection.expert_width(self.model.hidden_size, self.moe_ffn_size)

    @property
    def moe_ffn_size(self) -> int:
        """--moe-ffn-hidden-size, or its default."""
        return self.moe.moe_ffn_hidden_size or self.model.ffn_hidden_size

    @property
    def positions(self) -> int:
        """The most tokens that the model reads."""
        return max(self.training.seq_length, self.model.max_position_embeddings or 0)

    @property
    def first_part(self) -> int | None:
        """The number of tokens at a sequence's start that the second loss of evaluation omits.

        None: there is no second loss. This includes sequences of a single segment, of which no
        token would remain.
        """
        first = self.logging.eval_first_part or self.selection.first_part
        return None if first is None or first >= self.training.seq_length else first

    @property
    def settled_after(self) -> int | None:
        """The number of tokens after which no later token changes an output, in evaluation.

        None: every token may change the outputs of all.
        """
        if self.moe.num_experts is None:
            return 0
        return None if self.instances_mix else self.selection.settled_after

    @property
    def instances_mix(self) -> bool:
        """Whether an output depends on the other sequences of a batch, in evaluation: where experts
        drop tokens, or are forced."""
        forced = self.selection.forced_routing is not None
        return forced or self.moe.moe_expert_capacity_factor is not None

    @property
    def time_constants(self) -> list[TimeConstant]:
        """How fast the states of the system of expert selection move."""
        if self.moe.num_experts is None:
            return []
        return self.selection.time_constants(self)

    @property
    def warnings(self) -> list[str]:
        """The warnings about the losses that a run reports, and about its timeouts."""
        found = [self.selection.warning] if self.selection.warning is not None else []
        if self.selection.balancing_warning is not None:
            found.append(self.selection.balancing_warning)
        if self.selection.forced_routing is not None:
            found.append(
                f"experts are forced ({self.selection.forced_routing}): the scores do not choose "
                "them, in evaluations neither, so this run is a benchmark and not a model to keep"
            )
        if self.selection.replay_folder is not None:
            found.append(
                f"experts are replayed from {self.selection.replay_folder}: in training the scores "
                "do not choose them, in evaluations they do"
            )
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
        hang, minutes = self.parallel.hang_timeout, self.parallel.distributed_timeout_minutes
        if hang is not None and hang >= 60 * minutes:
            found.append(
                f"--hang-timeout {hang:g} is not below the {60 * minutes:g} s of "
                f"--distributed-timeout-minutes {minutes:g}: a collective gives up first, and its "
                "error does not name the rank that hangs"
            )
        slow = (each.warning(self.training.train_iters) for each in self.time_constants)
        return [*found, *(text for text in slow if text is not None)]

    @property
    def notes(self) -> list[str]:
        """What the options set for this run, to print at its start."""
        note = None if self.moe.num_experts is None else self.selection.note(self)
        return [] if note is None else [note]

    @property
    def virtual_stages(self) -> int | None:
        """The number of virtual pipeline stages per pipeline rank. None: the plain schedule."""
        layers = self.parallel.num_layers_per_virtual_pipeline_stage
        if layers is None:
            return None
        return self.model.num_layers // self.parallel.pipeline_model_parallel_size // layers

    def padded_vocab_size(self, vocab_size: int) -> int:
        """The vocabulary size of the model, rounded up to a multiple; the same in every layout."""
        multiple = self.model.make_vocab_size_divisible_by
        return -(-vocab_size // multiple) * multiple

    def values(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(section, {option: value}) in the order in which `config.yaml` lists them."""
        for name, section in self.sections():
            values = {o.name: getattr(section, o.name) for o in options(type(section))}
            if section is self.selection:
                values = {EXPERT_SELECTION: recorded_name(type(self.selection))} | values
            yield name, values

    def to_yaml(self) -> str:
        """All values, as a file that `read_config` reads back to an equal configuration."""
        parts = []
        for section, values in self.values():
            flat = {name.replace("_", "-"): _plain(value) for name, value in values.items()}
            parts.append(f"# {section}\n" + yaml.dump(flat, Dumper=_DUMPER, sort_keys=False))
        return "\n".join(parts)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def common_sections() -> dict[str, type[Section]]:
    """The sections that every configuration has, by name."""
    return {name: type(part) for name, part in Config().sections() if name != "selection"}


def common_options() -> dict[str, Option]:
    """The options that every configuration has, by name."""
    return {o.name: o for section in common_sections().values() for o in options(section)}


def selection_options() -> dict[str, dict[str, Option]]:
    """The options of each expert-selection system: {system: {name: option}}."""
    return {name: {o.name: o for o in options(kind)} for name, kind in selections().items()}


def expert_selection() -> Option:
    """The option --expert-selection; its choices are the systems that are imported."""
    return Option(
        name=EXPERT_SELECTION,
        kind=str,
        optional=False,
        many=False,
        default=_DEFAULT,
        help="the system that selects the experts",
        choices=tuple(selections()),
    )


def make_config(raw: Mapping[str, Any]) -> Config:
    """A configuration from raw values by option name; an option that is absent has its default.

    Raises InputError for an unknown name (the message has the nearest known one), for a value of
    the wrong type, or for an option that the chosen system of expert selection does not have.
    """
    raw = dict(raw)
    which = expert_selection()
    given = raw.pop(which.name, which.default)
    outside = isinstance(given, str) and given not in (*which.choices, "none")
    kind = selection_of(given if outside else which.parse(given))
    system, common, by_system = kind.system, common_options(), selection_options()
    known = common | by_system[system]
    for name in GONE.keys() & raw.keys() - known.keys():
        is_the_same, instead = GONE[name]
        if raw.pop(name) and not is_the_same:
            raise InputError(f"{flag(name)} is gone: {instead}")
    for name in raw:
        if name not in known:
            raise _unknown(name, raw[name], system, known, by_system)
    values = {name: known[name].parse(value) for name, value in raw.items()}
    parts = {name: build(section, values) for name, section in common_sections().items()}
    return Config(selection=build(kind, values), **parts)


def _unknown(
    name: str,
    value: Any,
    system: str,
    known: Mapping[str, Option],
    by_system: dict[str, dict[str, Option]],
) -> InputError:
    owners = [other for other, its_options in by_system.items() if name in its_options]
    if owners:
        given = as_typed(value) if isinstance(value, str) else shown(value)
        return InputError(
            f"{flag(name)} is {given}, but it belongs to --expert-selection "
            f"{' or '.join(owners)}, and {system} is selected: remove {flag(name)}, or change "
            "--expert-selection"
        )
    if flag(name) in launching_flags() | {"--config", "--help"}:
        return InputError(
            f"{flag(name)} belongs to the command line: remove it from the file, and start with "
            f"{flag(name)}{'' if value is True else f' {as_typed(str(value))}'}"
        )
    texts = {each.flag: each.help for each in (*known.values(), expert_selection())}
    listed = "pretrain_gpt_moe.py --help all lists all flags"
    hint = did_you_mean(flag(name), texts) or listed
    return InputError(f"{as_typed(flag(name))} is not a flag or YAML key of this program: {hint}")


#: The order matters: a later section may rely on the checks of an earlier one.
_ORDER = ("fp8", "parallel", "training", "optimizer", "checkpoint", "data", "logging")


def validate(config: Config, world_size: int) -> None:
    """Raise InputError for the first rule that `config` on `world_size` ranks breaks."""
    _check_bounds(config)
    config.model.check(config, world_size)
    _check_experts(config, world_size)
    for section in _ORDER:
        getattr(config, section).check(config, world_size)


def validate_layer(config: Config) -> None:
    """Raise InputError for the first rule that `config` breaks for one layer of experts.

    Only single values and the rules on experts are checked, not those on the rest of the model.
    """
    _check_bounds(config)
    _check_experts(config, 1)


def _check_bounds(config: Config) -> None:
    for _, section in config.sections():
        for option in options(type(section)):
            option.check(getattr(section, option.name))


def _check_experts(config: Config, world_size: int) -> None:
    config.moe.check(config, world_size)
    if config.moe.num_experts is not None:
        config.selection.check(config, world_size)
