"""The base class of the configurations of systems of expert selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from moe_parallel.config.section import Section

#: The configuration classes, by name for `--expert-selection`. `Selection` adds each subclass.
SELECTIONS: dict[str, type[Selection]] = {}


class LayerWeights(NamedTuple):
    """The number of weights of a layer of experts, by the groups that divide them."""

    replicated: int  # on every rank of the stage
    tensor_parallel: int  # divided over tp
    expert_parallel: int  # divided over ep and etp


@dataclass(frozen=True)
class Selection(Section):
    """The options of one system of expert selection, and the properties that follow from them.

    A class with the argument `system` is registered in SELECTIONS by that name:

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
            raise ValueError(f"system {system!r} is {SELECTIONS[system].__name__} already")
        cls.system = system
        SELECTIONS[system] = cls

    def expert_width(self, hidden_size: int, ffn_hidden_size: int) -> int:
        """The inner width of an expert: d_ffn for a SwiGLU expert."""
        return ffn_hidden_size

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        """The number of weights of one layer; here with a linear router and SwiGLU experts."""
        return LayerWeights(
            replicated=num_experts * hidden_size,
            tensor_parallel=0,
            expert_parallel=num_experts * 3 * hidden_size * expert_width,
        )

    @property
    def low_rank_sizes(self) -> list[tuple[str, int]]:
        """The low-rank sizes of an expert, each with its flag."""
        return []

    @property
    def choices_per_token(self) -> int | None:
        """K. None: it varies."""
        return None

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

        Generation then keeps the outputs of the tokens so far. With 0, a token's output depends on
        no later token. None: every token changes the outputs of all.
        """
        return 0

    @property
    def uses_step_load(self) -> bool:
        """Whether routing depends on the loads of the previous step."""
        return False

    @property
    def forced_routing(self) -> str | None:
        """The workload that chooses the experts, in place of the scores. None: the scores do."""
        return None

    @property
    def warning(self) -> str | None:
        """A warning about the training loss. None: the loss is the likelihood of the text."""
        return None
