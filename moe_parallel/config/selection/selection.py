"""Any system of expert selection, as a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from moe_parallel.config.section import Section

#: The configurations by the words of `--expert-selection`. Each enters itself: see `Selection`.
SELECTIONS: dict[str, type[Selection]] = {}


class LayerWeights(NamedTuple):
    """How many weights a layer of experts has, by what they are divided over."""

    replicated: int  # on every rank of the stage
    tensor_parallel: int  # divided over tp
    expert_parallel: int  # divided over ep and etp


@dataclass(frozen=True)
class Selection(Section):
    """Who decides which expert computes: the options of one system, and what follows from them.

    A system gives its word in the head of its class, and is one of SELECTIONS from then on:

        @dataclass(frozen=True)
        class TopPSelection(DynamicChoices, Balancing, RoutedSelection, system="top_p"): ...

    A class without a word is a set of options that systems share.
    """

    system: ClassVar[str]  # the word of --expert-selection
    merges: ClassVar[bool] = False  # experts are merged, no token is sent to them
    width_flag: ClassVar[str] = "--moe-ffn-hidden-size"  # what sets the width of an expert

    def __init_subclass__(cls, system: str | None = None, **others: Any) -> None:
        super().__init_subclass__(**others)
        if system is None:
            return
        if system in SELECTIONS:
            raise ValueError(f"system {system!r} is {SELECTIONS[system].__name__} already")
        cls.system = system
        SELECTIONS[system] = cls

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert: d_ffn for a SwiGLU expert."""
        return ffn_hidden_size

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        """Of a linear router and SwiGLU experts."""
        return LayerWeights(
            replicated=num_experts * hidden_size,
            tensor_parallel=0,
            expert_parallel=num_experts * 3 * hidden_size * expert_width,
        )

    @property
    def low_rank_sizes(self) -> list[tuple[str, int]]:
        """Widths inside an expert other than its own, each with its flag."""
        return []

    @property
    def choices_per_token(self) -> int | None:
        """K; None where it varies."""
        return None

    @property
    def mean_choices(self) -> float | None:
        """Experts that compute a token on average; None: only training will tell."""
        return self.choices_per_token

    @property
    def first_part(self) -> int | None:
        """Tokens at the start of a sequence that are judged apart; None: there are none."""
        return None

    @property
    def by_sequence(self) -> bool:
        """Whether it matters which tokens are of one sequence, and in which order."""
        return False

    @property
    def bias_update_rate(self) -> float | None:
        """By how much a step moves the bias that balances the load; None: there is no bias."""
        return None

    @property
    def uses_step_load(self) -> bool:
        """Whether routing depends on the loads of the step before."""
        return False

    @property
    def caution(self) -> str | None:
        """What a user has to know of the training loss; None: it is the likelihood of the text."""
        return None
