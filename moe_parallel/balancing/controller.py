"""Controllers: after each step, a number that all layers share moves toward a mean of K experts.

Each layer holds a copy of the number and counts its own choices. At the end of a step, the counts
of all layers, micro-batches and ranks are added, in one collective of the whole model, and every
copy moves by the same rule on the same counts. So all copies are equal, in every layout, and a
pipeline stage with any number of layers of experts, also none, can take part. A step routes with
the number of the step before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_parallel.balancing.load import keeping_dtypes
from moe_parallel.selection.choices import Choices


class Controller(nn.Module, ABC):
    """A layer's copy of a number that holds the mean number of experts per token at `target`.

    `state`, fp32, is saved with the model; its first element is the number, `setting`. `counts`,
    fp64, are the layer's choices and tokens since the last step, on this rank.
    """

    state: torch.Tensor
    counts: torch.Tensor

    def __init__(self, state: Sequence[float], target: float) -> None:
        """
        Args:
            state: the setting of the first step, then other numbers of the rule.
            target: K, the mean number of experts per token over all tokens and layers.
        """
        super().__init__()
        self.target = target
        self.register_buffer("state", torch.tensor(state, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(2, dtype=torch.float64), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return keeping_dtypes(self, fn, super()._apply)

    @property
    def setting(self) -> torch.Tensor:
        """fp32 []. Read it in each forward pass, because a move to a GPU replaces the tensor."""
        return self.state[0]

    @torch.no_grad()
    def count(self, choices: Choices) -> None:
        """Adds the choices of a micro-batch on this rank, made in training, before any is dropped.

        Free experts do not count. Not for the first pass of a recomputation, which repeats a
        micro-batch.
        """
        self.counts[0] += choices.tokens_per_expert().sum(dtype=torch.float64)
        self.counts[1] += len(choices.scores_TE)

    def of(self, rule: Any) -> Any:
        """The rule with the setting in it. Here rules do not use the setting."""
        return rule

    @abstractmethod
    def move(self, counts: torch.Tensor) -> None:
        """Sets the state for the next step.

        Args:
            counts: of choices and tokens, over all layers of the model, fp64 [2]. Their quotient
                is the mean number of experts per token.
        """


@torch.no_grad()
def end_step(
    controllers: Sequence[Controller],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Adds what all layers counted since the last step, and moves each controller. Collective.

    Args:
        controllers: of this rank's layers; a pipeline stage without experts has none.
        device: of the process group.
        group: the ranks that train the model; None: torch's default group.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    for controller in controllers:
        counts += controller.counts
        controller.counts.zero_()
    if group is None or group.size() > 1:
        dist.all_reduce(counts, group=group)
    for controller in controllers:
        controller.move(counts)


def setting_of(controllers: Sequence[Controller], device: torch.device) -> float:
    """The setting for the next step, also on ranks without a controller. Collective."""
    setting = torch.full((), -torch.inf, device=device)
    if controllers:
        setting = controllers[0].setting.clone()
    dist.all_reduce(setting, dist.ReduceOp.MAX)
    return setting.item()


class LossCoefficient(Controller):
    """The coefficient c of a loss against too many experts: c <- c * a^sign(mean number - K).

    ReMoE (arXiv 2412.14711; lambda and a) and Routing-Free MoE (arXiv 2604.00801;
    lambda and 1 + eta there). The counts are compared as whole numbers, so an equal number
    leaves c as it is.
    """

    def __init__(
        self,
        initial: float,
        target: float,
        factor: float,
        most: float = torch.finfo(torch.float32).max,
    ) -> None:
        """
        Args:
            initial: the coefficient in the first step.
            target: K.
            factor: a, above 1.
            most: an upper bound.
        """
        super().__init__([initial], target)
        self.factor, self.most = factor, most

    @torch.no_grad()
    def move(self, counts: torch.Tensor) -> None:
        choices, tokens = counts.unbind()
        k, of = Fraction(str(self.target)).as_integer_ratio()
        moved = self.setting.double() * self.factor ** torch.sign(of * choices - k * tokens)
        # A coefficient of 0 could not grow again.
        self.state[0] = moved.clamp(torch.finfo(torch.float32).tiny, self.most)
