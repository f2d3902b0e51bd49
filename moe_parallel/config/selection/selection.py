"""The base class of the options of a system of expert selection, and the registry of its classes.

A state of a system that moves from step to step has a time constant. One that needs 1,000 steps
does nothing in a run of 200, so a default that is right for a long run may be wrong for a short
one.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from moe_parallel.config.message import flag, shown
from moe_parallel.config.option import Section
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

#: A run says something of a system if the time constants of its states are at most this share of
#: its steps.
MOST_OF_A_RUN = 0.25
#: The share of its steps over which a state averages if its memory is set by the length of a run.
MEMORY_OF_A_RUN = 0.05


@dataclass(frozen=True)
class TimeConstant:
    """How many steps a state needs to reach its value."""

    state: str  # its name for users
    steps: float
    remedy: str  # what makes it faster

    def note(self, train_iters: int) -> str:
        """A line for users, of a run of so many steps."""
        share = self.steps / train_iters
        return (
            f"{self.state}: time constant {self.steps:,.0f} steps, {share:.2g} of --train-iters "
            f"{train_iters}"
        )

    def warning(self, train_iters: int) -> str | None:
        """Why a run of so many steps says little about the state. None: it is long enough."""
        if self.steps <= MOST_OF_A_RUN * train_iters * (1 + 1e-9):  # beyond rounding
            return None
        return (
            f"{self.note(train_iters)}, which is above {MOST_OF_A_RUN}: the run says little about "
            f"it; {self.remedy}, or train longer"
        )


def steps_between(start: float, end: float, factor: float) -> float:
    """The steps from one positive number to another, by this factor in each; the factor is > 1."""
    return abs(math.log(end / start)) / math.log(factor)


def kept_share(steps: float) -> float:
    """The share of its value that an average over so many steps keeps in each; at least 0."""
    return max(0.0, 1 - 1 / steps)


_REACHED = 1e-3  # the coefficient that a run should reach early


_WITHIN = 0.05  # the share of the run in which it should


@dataclass(frozen=True)
class MovingCoefficient:
    """The options of such a coefficient, lambda."""

    loss: str  # its name for users
    flags: str  # what the flags of `init` and `multiplier` begin with
    init: float | None  # None: by the length of the run
    multiplier: float
    least_init: float  # of an init by the length of the run; the paper's

    def initial(self, train_iters: int | None) -> float:
        """lambda in the first step of a run of so many iterations. None: no run."""
        if self.init is not None:
            return self.init
        if train_iters is None:
            return self.least_init
        growth = self.multiplier ** -(_WITHIN * train_iters)
        return max(self.least_init, _REACHED * growth)

    def time_constant(self, train_iters: int) -> TimeConstant:
        initial = self.initial(train_iters)
        remedy = (
            f"set {self.flags}-init (now {initial:.3g}) nearer to {_REACHED:g} (none: by the "
            f"length of the run) or raise {self.flags}-multiplier"
        )
        steps = steps_between(initial, _REACHED, self.multiplier)
        return TimeConstant(f"coefficient of the {self.loss}", steps, remedy)


#: The classes of options by the word for `--expert-selection`, of the modules that are imported.
#: `Selection` adds each subclass; `selections` imports those of the tree.
SELECTIONS: dict[str, type[Selection]] = {}
_IN_TREE = "moe_parallel.systems"


class FreeKinds(NamedTuple):
    """The number of free experts of each kind."""

    zero: int = 0  # output 0
    copy: int = 0  # their input
    constant: int = 0  # a mixture of their input and a learned vector


class SharedExpertSize(NamedTuple):
    """A dense SwiGLU network that computes every token, in addition to the experts."""

    width: int
    gate: bool = False  # its output is multiplied by sigmoid(x w)


@dataclass(frozen=True)
class Selection(Section):
    """The options of one system of expert selection, and the properties that follow from them.

    A class with the argument `system` is registered in SELECTIONS by that word:

        @dataclass(frozen=True)
        class TopPSelection(DynamicChoices, Balancing, RoutedSelection, system="top_p"): ...

    A class without it is a set of options that systems share.
    """

    system: ClassVar[str]  # the name for --expert-selection
    merges: ClassVar[bool] = False  # experts are merged; no token is dispatched to them
    width_flag: ClassVar[str] = "--moe-ffn-hidden-size"  # the flag for the width of an expert

    def __init_subclass__(cls, system: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if system is None:
            return
        if system in SELECTIONS:
            raise ValueError(
                f"the name {system!r} already belongs to {SELECTIONS[system].__name__}"
            )
        cls.system = system
        SELECTIONS[system] = cls

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert: d_ffn for a SwiGLU expert."""
        return ffn_hidden_size

    def fitting_width(self, hidden_size: int, ffn_hidden_size: int, multiple: int) -> str:
        """The option for experts whose width is a multiple; the next smaller one. Empty: none."""
        for size in range(ffn_hidden_size, 0, -1):
            width = self.expert_width(hidden_size, size)
            if width > 0 and width % multiple == 0:
                return f"--moe-ffn-hidden-size {size}"
        return ""

    @property
    def shared_expert(self) -> SharedExpertSize | None:
        """The shared expert. None: there is none."""
        return None

    def dispatched_width(self, expert_width: int, num_experts: int) -> int:
        """The inner width of the part of an expert that computes the chosen tokens."""
        return expert_width

    @property
    def losses_of_all_scores(self) -> list[str]:
        """The options of losses that are on and have a gradient through scores of other experts
        than the chosen ones."""
        return []

    @property
    def low_rank_sizes(self) -> list[tuple[str, int]]:
        """The low-rank sizes of an expert, each with its flag."""
        return []

    @property
    def choices_per_token(self) -> int | None:
        """K. None: it varies."""
        return None

    @property
    def renormalizes(self) -> bool:
        """Whether the routing probabilities of the chosen experts are divided by their sum."""
        return False

    def bias_moves(self, iteration: int, train_iters: int | None) -> bool:
        """Whether that bias or cutoff moves after the step that follows `iteration` others.

        `train_iters`: of the run; None: no run trains the layer.
        """
        return True

    @property
    def free_kinds(self) -> FreeKinds:
        """The number of free experts of each kind. Free experts have scores and no rows."""
        return FreeKinds()

    @property
    def free_experts(self) -> int:
        """The number of free experts, Z."""
        return sum(self.free_kinds)

    @property
    def mean_choices(self) -> float | None:
        """The mean number of experts per token. None: it is known only in training."""
        return self.choices_per_token

    @property
    def first_part(self) -> int | None:
        """The number of tokens at a sequence's start that the second loss of evaluation omits.

        None: there is no second loss.
        """
        return None

    @property
    def by_sequence(self) -> bool:
        """Whether the result depends on which tokens share a sequence, and on their order."""
        return False

    @property
    def settled_after(self) -> int | None:
        """The number of tokens after which no later token changes an output, in evaluation.

        With 0, a token's output depends on no later token. None: every token changes the outputs of
        all.
        """
        return 0

    @property
    def depends_on_init_std(self) -> bool:
        """Whether a fixed number of the model follows from --init-method-std."""
        return False

    @property
    def uses_step_load(self) -> bool:
        """Whether routing depends on the loads of the previous step."""
        return False

    def score_range(self, config: Config) -> float:
        """The range over which a balancing bias has to shift the scores: that of probabilities."""
        return 0.6

    def time_constants(self, config: Config) -> list[TimeConstant]:
        """How fast the states of the system move. []: it has none."""
        return []

    def rescaled(self, config: Config) -> Selection:
        """The same options, with values for those that follow the length of the run."""
        return self

    @property
    def reads_token_ids(self) -> bool:
        """Whether the ids of the tokens choose the experts."""
        return False

    @property
    def trace_folder(self) -> str | None:
        """The folder to which training writes the choices. None: they are not recorded."""
        return None

    @property
    def replay_folder(self) -> str | None:
        """The folder whose choices training takes. None: the rule chooses."""
        return None

    @property
    def controlled(self) -> str | None:
        """The name, in metrics.jsonl, of the number that a controller moves after each step.

        None: the system has no controller.
        """
        return None

    @property
    def forced_routing(self) -> str | None:
        """The workload that chooses the experts, in place of the scores. None: the scores do."""
        return None

    def note(self, config: Config) -> str | None:
        """What the system sets by the other options of a run, to print at its start."""
        return None

    @property
    def balancing_warning(self) -> str | None:
        """A warning about two ways of balancing the load that work against each other."""
        return None

    @property
    def warning(self) -> str | None:
        """A warning about the training loss. None: the loss is the likelihood of the text."""
        return None


@functools.cache
def selections() -> dict[str, type[Selection]]:
    """SELECTIONS with all systems of the tree, `moe_parallel.systems`."""
    # By name, because the systems build on this package.
    importlib.import_module(_IN_TREE)
    return SELECTIONS


def selection_of(name: str) -> type[Selection]:
    """The options of the system that --expert-selection names.

    Args:
        name: a word of the tree; that of an entry point `moe_parallel.systems` of an installed
            package, whose value is a module; or MODULE:WORD, for a module on Python's path.

    Raises InputError.
    """
    known = selections()
    if name in known:
        return known[name]
    module, _, word = name.rpartition(":")
    if not module:
        installed = list(entry_points(group=_IN_TREE, name=name))
        if not installed:
            raise InputError(
                f"--expert-selection is {shown(name)}: it takes one of {', '.join(known)}; or "
                "MODULE:WORD, for a system of your own"
            )
        module = installed[0].module
    _import(module, name)
    if word not in known or known[word].__module__.partition(".")[0] != module.partition(".")[0]:
        raise InputError(
            f"--expert-selection is {name}, but {module} defines no system {word}: give a "
            f'subclass of Selection the argument system="{word}"'
        )
    return known[word]


def _import(module: str, name: str) -> None:
    # The name may come from a stranger's file, and importing some standard modules does something.
    words = module.split(".")
    if not all(map(str.isidentifier, words)) or words[0] in sys.stdlib_module_names:
        raise InputError(
            f"--expert-selection is {shown(name)}: before the colon it takes the name of a module "
            "with a system, such as my_router"
        )
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"--expert-selection is {name}, but Python finds no module {error.name}: install its "
            "package, or add its folder to PYTHONPATH"
        ) from None


def recorded_name(kind: type[Selection]) -> str:
    """The value of --expert-selection with which any program finds the class again."""
    module = kind.__module__
    in_tree = module == "__main__" or module.startswith(f"{_IN_TREE}.")
    return kind.system if in_tree else f"{module}:{kind.system}"


def check_at_most_all(selection: Selection, name: str, config: Config, or_else: str = "") -> None:
    """Raise InputError if an option, a number of experts per token, is above that of all experts.

    `or_else`: the end of the message, with another remedy.
    """
    value, n = getattr(selection, name), config.num_experts
    if value > n:
        raise InputError(
            f"{flag(name)} is {value}, above --num-experts {n}: choose at most {n}{or_else}"
        )
