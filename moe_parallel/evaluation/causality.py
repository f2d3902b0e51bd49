"""Tests whether a later token changes an earlier output of a model, by perturbation.

The loss of a language model is the likelihood of a text only if the output at a position depends
on no token after it. Attention is masked. But three parts of an MoE layer can carry information
back: experts that choose among tokens, capacities that drop tokens, and parameters that are merged
by a mean. They can also carry it from one instance of a micro-batch to another, and then the loss
of a text depends on the other texts of its batch. The probe therefore runs a micro-batch, changes
one token, runs it again, and examines every output that should be the same.

Both runs have the same shape and the same random numbers. Besides a leak, only rounding can cause a
difference: a token that goes to another expert changes the number of rows that each expert
multiplies, and a product of another size may sum in another order. A change is a leak if it exceeds
`TOLERANCE` times the largest logit. In fp64 that is 4e-11, where rounding causes 1e-15 and a leak
rarely less than 1e-6. The model should therefore be in fp64 (`model.double()`).

A probe that finds no leak does not prove that there is none, because a choice changes only if
scores are close. Perturbing all places, with several replacements each, makes a leak likely to be
found.

Shape suffixes: B instances of a micro-batch, S positions, V vocabulary, P perturbed places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from moe_parallel.errors import InputError

LogitsOf = Callable[[torch.Tensor], torch.Tensor]

# By dtype of the logits, relative to the largest logit: a power of the unit roundoff, between the
# unit roundoff and 1.
TOLERANCE = {
    dtype: torch.finfo(dtype).eps ** (2 / 3)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
}


#: The number of other tokens to try at each place, if there are that many.
REPLACEMENTS = 2


class TokenPlace(NamedTuple):
    """The place of a token and its output in a micro-batch. Both numbers count from 0."""

    instance: int
    position: int


class Leak(NamedTuple):
    """An output that a token changed but must not change."""

    source: TokenPlace  # the token
    target: TokenPlace  # the output
    change: float  # of the logit that changed most


@dataclass(frozen=True)
class Influence:
    """How much each perturbed token changed each output."""

    places: tuple[TokenPlace, ...]  # P: the perturbed places
    changes_PBS: torch.Tensor  # fp64: the largest change of a logit, over the replacements
    tolerance: float  # a larger change is a leak or, where it is permitted, an effect

    @property
    def future(self) -> list[Leak]:
        """Outputs that a later token of the same instance changed."""
        return [leak for leak in self._changed() if _is_future(leak)]

    @property
    def across(self) -> list[Leak]:
        """Outputs that a token of another instance changed."""
        return [leak for leak in self._changed() if _is_across(leak)]

    @property
    def future_pairs(self) -> int:
        """The number of (later token, earlier output) pairs that were examined."""
        return sum(place.position for place in self.places)

    @property
    def across_pairs(self) -> int:
        """The number of (token, output of another instance) pairs that were examined."""
        _, instances, positions = self.changes_PBS.shape
        return len(self.places) * (instances - 1) * positions

    @property
    def felt(self) -> int:
        """The number of perturbations that changed the output at their own place. Nearly all
        must."""
        own = [self.changes_PBS[p][place] for p, place in enumerate(self.places)]
        return sum(bool(change > self.tolerance) for change in own)

    @property
    def noise(self) -> float:
        """The largest change that was attributed to rounding where no change is permitted."""
        quiet = [0.0]
        for p, place in enumerate(self.places):
            changes_BS = self.changes_PBS[p].clone()
            changes_BS[place.instance, place.position :] = 0.0  # these outputs may change
            quiet.append(float(changes_BS[changes_BS <= self.tolerance].max()))
        return max(quiet)

    def _changed(self) -> list[Leak]:
        found = (self.changes_PBS > self.tolerance).nonzero().tolist()
        return [
            Leak(self.places[p], TokenPlace(b, s), float(self.changes_PBS[p, b, s]))
            for p, b, s in found
        ]


def _is_future(leak: Leak) -> bool:
    same = leak.source.instance == leak.target.instance
    return same and leak.source.position > leak.target.position


def _is_across(leak: Leak) -> bool:
    return leak.source.instance != leak.target.instance


@torch.no_grad()
def measure_influence(
    logits_of: LogitsOf,
    tokens_BS: torch.Tensor,
    vocab_size: int,
    *,
    places: Sequence[TokenPlace] | None = None,
) -> Influence:
    """Perturb tokens one at a time and compare all outputs with the unperturbed ones.

    Runs the model P * REPLACEMENTS + 2 times. Torch's random generators start each run in the same
    state, and are restored afterward.

    Args:
        logits_of: tokens [B, S] -> logits [B, S, V] of any float dtype.
        tokens_BS: int64, the micro-batch.
        vocab_size: replacements are drawn from the tokens below it; at least 2.
        places: the tokens to perturb; None: all.

    Raises InputError if logits are not finite, or if the same tokens give different logits.
    """
    if places is None:
        instances, positions = tokens_BS.shape
        places = [TokenPlace(b, s) for b in range(instances) for s in range(positions)]

    def run(perturbed_BS: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            logits_BSV = logits_of(perturbed_BS)
        if not torch.isfinite(logits_BSV).all():
            raise InputError("the logits are not finite: probe a model that has not diverged")
        return logits_BSV

    logits_BSV = run(tokens_BS)
    tolerance = TOLERANCE[logits_BSV.dtype] * float(logits_BSV.abs().max())
    draw = random.Random(0)
    changes = []
    for place in places:
        others = _others(int(tokens_BS[place]), vocab_size, draw)
        runs = [run(_with(tokens_BS, place, token)) for token in others]
        changes.append(torch.stack([_change(each, logits_BSV) for each in runs]).amax(0))
    again = float(_change(run(tokens_BS), logits_BSV).max())
    if again > tolerance:
        raise InputError(
            "the model gives different outputs for the same tokens (a logit differs by "
            f"{again:.3g}): turn off what changes between passes"
        )
    return Influence(tuple(places), torch.stack(changes), tolerance)


def sample_places(instances: int, positions: int, count: int, seed: int = 0) -> list[TokenPlace]:
    """`count` places of a micro-batch, drawn without replacement, in order; all if fewer exist."""
    everywhere = [TokenPlace(b, s) for b in range(instances) for s in range(positions)]
    return sorted(random.Random(seed).sample(everywhere, min(count, len(everywhere))))


def logits_of_gpt(model: Any) -> LogitsOf:
    """A function that returns the logits of a complete Megatron-Core GPT in its current mode.

    Megatron-Core's random generators also start each run in the same state and are restored.
    """

    def logits_of(tokens_BS: torch.Tensor) -> torch.Tensor:
        positions_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        generators = get_cuda_rng_tracker()
        states = generators.get_states()
        logits_BSV: torch.Tensor = model(tokens_BS, positions_BS.expand_as(tokens_BS), None)
        generators.set_states(states)
        return logits_BSV

    return logits_of


def _others(token: int, vocab_size: int, draw: random.Random) -> list[int]:
    """Random distinct tokens other than `token`."""
    drawn = draw.sample(range(vocab_size - 1), min(REPLACEMENTS, vocab_size - 1))
    return [other + (other >= token) for other in drawn]


def _with(tokens_BS: torch.Tensor, place: TokenPlace, token: int) -> torch.Tensor:
    perturbed_BS = tokens_BS.clone()
    perturbed_BS[place] = token
    return perturbed_BS


def _change(a_BSV: torch.Tensor, b_BSV: torch.Tensor) -> torch.Tensor:
    """The largest change of a logit at each place: fp64 [B, S] on the CPU."""
    return (a_BSV.double() - b_BSV.double()).abs().amax(2).cpu()
