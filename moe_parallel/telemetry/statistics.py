"""Statistics of the routing: the balance of the load, and how confident the routing is, per layer.

Ownership: the code that builds the model creates one `RoutingStatistics` and gives it to the
layers; the training loop reads it. Nothing here is global, a module or a buffer, so it is neither
saved with the weights nor cast to bf16 with them.

    statistics = RoutingStatistics(num_layers, num_experts, device)
    totals = statistics.recipient()                                # in the forward of layer 3
    if totals is not None:
        totals.add(3, tokens_per_expert_E, scores_TE, ...)
    layers = statistics.training.reduced(groups).summaries()       # on every rank, when logging
    statistics.training.clear()
    with statistics.evaluating():                                  # forward passes of an evaluation
        ...
    layers = statistics.evaluation.reduced(groups).summaries()

No double counting: activation recompute runs a layer's forward twice, first without gradients and
then, in the backward pass, with them. (That is reentrant checkpointing, the only kind that
Megatron-Core has.) In training there is therefore no recipient while gradients are off. With
recompute the second run counts; without it the only run counts; a stray evaluation does not count.
This needs no notion of the current micro-batch, which a pipeline schedule interleaves. Inside
`evaluating()` there is no backward pass, so every call counts, in separate sums.

Shape suffixes: T tokens on this rank, E experts (all), G routed or dense layers of the whole model,
C columns of sums, M merged experts.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_parallel.telemetry.metrics import loss_names


def load_shares(tokens_per_expert: Sequence[float]) -> list[float]:
    """The share of all choices that fell on each expert; sums to 1, or is all 0 without choices.

    It is the `f` of the load-balancing loss (whose sum is K) divided by K. A count of choices
    already includes K per token, so K itself is not needed, and top-p is covered too.
    """
    total = sum(tokens_per_expert)
    return [count / total if total else 0.0 for count in tokens_per_expert]


def ent_load(tokens_per_expert: Sequence[float]) -> float:
    """Entropy of the load in nats: -sum_i f_i ln f_i, f = `load_shares`. [Eq. 7 of AoE]

    0 if one expert gets every choice; ln E, the maximum, if all get equally many.
    """
    return -sum(share * math.log(share) for share in load_shares(tokens_per_expert) if share > 0)


def max_minus_min_load(tokens_per_expert: Sequence[float]) -> float:
    """Load of the busiest minus load of the idlest expert, as shares of all choices, in [0, 1].

    If the experts are on different devices, this is the time that the idlest one waits. AoE's paper
    (Appendix) sums it over layers.
    """
    shares = load_shares(tokens_per_expert)
    return max(shares) - min(shares)


def ent_conf_sum(scores_TE: torch.Tensor) -> torch.Tensor:
    """Entropy of softmax over all E scores, in nats, summed over the tokens. [Eq. 8 of AoE]

    Divided by the number of tokens it is Ent_conf: 0 when certain, ln E when indifferent. It is
    returned as a sum (0-d, float64), so that micro-batches and ranks of any size add up to the
    exact mean. `scores_TE`: router logits, or AoE's norms, of any float type.
    """
    probabilities_TE = torch.softmax(scores_TE.float(), dim=-1)
    return torch.special.entr(probabilities_TE).sum(dtype=torch.float64)


class RoutingTotals:
    """Sums for every layer of the model, in one float64 tensor `sums_GC`, and `peaks_GE`.

    A pipeline stage fills the rows of its own layers and leaves the others at zero, so adding over
    ranks also gathers the stages. The columns are: choices per expert (E), norms per expert (E),
    cutoffs per expert times tokens (E), each loss and the number of its values, then tokens,
    tokens with a norm, tokens with cutoffs, entropy of the scores, dropped choices, merged experts,
    bytes sent, choices of free experts, squares of the numbers in the outputs of the layer, and how
    many these are. In a merged layer a token is divided among the experts by their weights, and
    `peaks_GE` is the largest weight of each expert.
    """

    TOKENS, NORMED_TOKENS, CUT_TOKENS, ENTROPY, DROPPED, MERGES = range(-10, -4)
    WIRE_BYTES, FREE, SQUARES, OUTPUTS = range(-4, 0)

    def __init__(self, sums_GC: torch.Tensor, peaks_GE: torch.Tensor) -> None:
        self._sums_GC = sums_GC
        self.peaks_GE = peaks_GE
        # A loss that is registered later has no columns.
        columns = sums_GC.shape[1] - 3 * peaks_GE.shape[1] + self.TOKENS
        self._losses = loss_names()[: columns // 2]
        # Numbers that the host knows, by layer and column. They would cost a kernel each.
        self._from_host: defaultdict[tuple[int, int], float] = defaultdict(float)

    @property
    def sums_GC(self) -> torch.Tensor:
        """fp64 [G, C], with all that was added."""
        if self._from_host:
            on_gpu = self._sums_GC.is_cuda
            from_host_GC = torch.zeros(self._sums_GC.shape, dtype=torch.float64, pin_memory=on_gpu)
            for (row, column), number in self._from_host.items():
                from_host_GC[row, column] = number
            self._sums_GC += from_host_GC.to(self._sums_GC.device, non_blocking=True)
            self._from_host.clear()
        return self._sums_GC

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory to which `add` and the like add; the host's numbers are elsewhere."""
        return self._sums_GC, self.peaks_GE

    def numbers(self) -> dict[tuple[int, int], float]:
        """The numbers so far that the host knows and the device does not, by layer and column."""
        return dict(self._from_host)

    def add_numbers(self, numbers: Mapping[tuple[int, int], float]) -> None:
        """Adds those of a pass that is replayed: the difference of `numbers` by its recording."""
        for (row, column), number in numbers.items():
            self._from_host[row, column] += number

    @classmethod
    def zeros(cls, num_layers: int, num_experts: int, device: torch.device) -> RoutingTotals:
        columns = 3 * num_experts + 2 * len(loss_names()) - cls.TOKENS
        return cls(
            torch.zeros(num_layers, columns, dtype=torch.float64, device=device),
            torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device),
        )

    @torch.no_grad()
    def add(
        self,
        layer_number: int,
        tokens_per_expert_E: torch.Tensor,
        scores_TE: torch.Tensor,
        *,
        dropped: torch.Tensor | int = 0,
        norms_TE: torch.Tensor | None = None,
        cutoff_E: torch.Tensor | None = None,
        free_choices: torch.Tensor | int = 0,
        losses: Mapping[str, torch.Tensor] | None = None,
        wire_bytes: int = 0,
    ) -> None:
        """Adds one micro-batch of a layer on this rank. Does not wait for the device.

        Args:
            layer_number: counted from 1.
            tokens_per_expert_E: choices of each expert before dropping.
            scores_TE: router logits or norms.
            dropped: choices over capacity.
            norms_TE: AoE's norms.
            cutoff_E: what a score must exceed.
            free_choices: choices of free experts, which have no columns in the others.
            losses: auxiliary losses without their coefficients.
            wire_bytes: that this rank sends to others in the forward pass.
        """
        tokens, num_experts = scores_TE.shape
        row_C, host, row = self._sums_GC[layer_number - 1], self._from_host, layer_number - 1
        row_C[:num_experts] += tokens_per_expert_E
        host[row, self.TOKENS] += tokens
        row_C[self.ENTROPY] += ent_conf_sum(scores_TE)
        for column, number in (self.DROPPED, dropped), (self.FREE, free_choices):
            if isinstance(number, torch.Tensor):
                row_C[column] += number
            else:
                host[row, column] += number
        if norms_TE is not None:
            row_C[num_experts : 2 * num_experts] += norms_TE.sum(dim=0, dtype=torch.float64)
            host[row, self.NORMED_TOKENS] += tokens
        if cutoff_E is not None:
            row_C[2 * num_experts : 3 * num_experts] += tokens * cutoff_E
            host[row, self.CUT_TOKENS] += tokens
        if wire_bytes:
            host[row, self.WIRE_BYTES] += wire_bytes
        for name, loss in (losses or {}).items():
            self.add_loss(layer_number, name, loss)

    @torch.no_grad()
    def add_loss(self, layer_number: int, name: str, loss: torch.Tensor) -> None:
        """Adds an auxiliary loss, or a number beside it, of one micro-batch of a layer."""
        column = 3 * self.peaks_GE.shape[1] + 2 * self._losses.index(name)
        self._sums_GC[layer_number - 1, column] += loss
        self._from_host[layer_number - 1, column + 1] += 1

    @torch.no_grad()
    def add_merges(
        self, layer_number: int, weights_ME: torch.Tensor, tokens_M: torch.Tensor
    ) -> None:
        """Adds the merged experts of one micro-batch of a layer. A token counts on one rank only.

        Args:
            weights_ME: of each expert in each merged expert.
            tokens_M: tokens of each merged expert.
        """
        merges, num_experts = weights_ME.shape
        row_C = self._sums_GC[layer_number - 1]
        weights_ME, tokens_M = weights_ME.double(), tokens_M.double()
        row_C[:num_experts] += tokens_M @ weights_ME
        row_C[self.TOKENS] += tokens_M.sum()
        row_C[self.ENTROPY] += tokens_M @ torch.special.entr(weights_ME).sum(dim=1)
        self._from_host[layer_number - 1, self.MERGES] += merges
        peaks_E = self.peaks_GE[layer_number - 1]
        torch.maximum(peaks_E, weights_ME.amax(dim=0), out=peaks_E)

    @torch.no_grad()
    def add_output(self, layer_number: int, y: torch.Tensor) -> None:
        """Adds the output of a layer for one micro-batch, of any shape."""
        squares = torch.linalg.vector_norm(y, dtype=torch.float64).square()
        self._sums_GC[layer_number - 1, self.SQUARES] += squares
        self._from_host[layer_number - 1, self.OUTPUTS] += y.numel()

    def reduced(self, groups: Iterable[dist.ProcessGroup | None]) -> RoutingTotals:
        """The totals over the ranks of each group in turn, as a new object; this one is unchanged.

        Pass the group of the ranks that hold different tokens (data and context parallel, and
        tensor parallel under sequence parallelism), then the pipeline group. `None` is the default
        group. Call it on every rank of the groups.
        """
        sums_GC, peaks_GE = self.sums_GC.clone(), self.peaks_GE.clone()
        for group in groups:
            dist.all_reduce(sums_GC, group=group)
            dist.all_reduce(peaks_GE, dist.ReduceOp.MAX, group=group)
        return RoutingTotals(sums_GC, peaks_GE)

    @classmethod
    def zeros_like(cls, other: RoutingTotals) -> RoutingTotals:
        return cls(torch.zeros_like(other.sums_GC), torch.zeros_like(other.peaks_GE))

    @torch.no_grad()
    def add_totals(self, other: RoutingTotals) -> None:
        """Adds other totals of the same model. Does not wait for the device."""
        self._sums_GC += other.sums_GC
        torch.maximum(self.peaks_GE, other.peaks_GE, out=self.peaks_GE)

    def state(self) -> dict[str, list[list[float]]]:
        """All sums and peaks, exact to the bit, in JSON's types. Waits for the device."""
        return {"sums": self.sums_GC.tolist(), "peaks": self.peaks_GE.tolist()}

    def load_state(self, state: Mapping[str, list[list[float]]]) -> None:
        """Restores the result of `state`, of a model with as many layers and experts.

        Another version may have had other columns. Its sums are left out, so the next record has
        only what follows.
        """
        sums_GC = torch.tensor(state["sums"], dtype=torch.float64).view(len(self._sums_GC), -1)
        peaks_GE = torch.tensor(state["peaks"], dtype=torch.float64).view_as(self.peaks_GE)
        if sums_GC.shape == self._sums_GC.shape:
            self._from_host.clear()
            self._sums_GC.copy_(sums_GC)
            self.peaks_GE.copy_(peaks_GE)

    def clear(self) -> None:
        self._sums_GC.zero_()
        self._from_host.clear()
        self.peaks_GE.zero_()

    def summaries(self) -> list[dict[str, Any]]:
        """The `layers` of a metrics record, for the layers that saw a token. Waits for the device.

        Each has layer (from 1), tokens_per_expert (choices made, before dropping; in merged layers
        tokens times weights), experts_per_token, tokens_dropped (choices), ent_load and ent_conf
        (nats), max_minus_min_load (share of choices), and the auxiliary losses that were recorded
        (mean over micro-batches, without their coefficients). Layers with norms have
        norm_per_expert, and layers with cutoffs cutoff_per_expert (means over all tokens). Merged
        layers have routing_weight_per_expert (mean over tokens) and utilisation (share of the
        experts whose weight was above 2 / E at least once). Layers that dispatch tokens have
        wire_bytes_per_token (sent to other ranks in the forward pass, results and gathered weights
        included). Where free experts were chosen there is free_share (the share of all choices that
        fell on them; all else is about the other experts). Layers whose output was measured have
        output_rms.
        """
        rows = zip(self.sums_GC.tolist(), self.peaks_GE.tolist(), strict=True)
        return [
            _summary(number, row, peaks, self._losses)
            for number, (row, peaks) in enumerate(rows, start=1)
            if row[self.TOKENS] > 0
        ]


def _summary(
    layer_number: int, row: list[float], peaks: list[float], names: Sequence[str]
) -> dict[str, Any]:
    num_experts = len(peaks)
    counts, norms = row[:num_experts], row[num_experts : 2 * num_experts]
    cutoffs = row[2 * num_experts : 3 * num_experts]
    losses = row[3 * num_experts : RoutingTotals.TOKENS]
    tokens, normed_tokens, cut_tokens, entropy, dropped, merges = row[
        RoutingTotals.TOKENS : RoutingTotals.WIRE_BYTES
    ]
    wire_bytes, free, squares, outputs = row[RoutingTotals.WIRE_BYTES :]
    summary: dict[str, Any] = {
        "layer": layer_number,
        "tokens_per_expert": [round(count) for count in counts],
        "experts_per_token": sum(counts) / tokens,
        "tokens_dropped": round(dropped),
        "ent_load": ent_load(counts),
        "ent_conf": entropy / tokens,
        "max_minus_min_load": max_minus_min_load(counts),
    }
    for name, total, times in zip(names, losses[::2], losses[1::2], strict=True):
        if times:
            summary[name] = total / times
    if normed_tokens:
        summary["norm_per_expert"] = [norm / normed_tokens for norm in norms]
    if cut_tokens:
        summary["cutoff_per_expert"] = [cutoff / cut_tokens for cutoff in cutoffs]
    if merges:
        summary["routing_weight_per_expert"] = [count / tokens for count in counts]
        used = sum(peak > 2 / num_experts for peak in peaks)
        summary["utilisation"] = used / num_experts
    if wire_bytes:
        summary["wire_bytes_per_token"] = wire_bytes / tokens
    if free:
        summary["free_share"] = free / (free + sum(counts))
    if outputs:
        summary["output_rms"] = math.sqrt(squares / outputs)
    return summary


class RoutingStatistics:
    """Training and evaluation totals of one model on one rank."""

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        """`num_layers`: of the whole model, including dense layers, on every pipeline stage."""
        self.training = RoutingTotals.zeros(num_layers, num_experts, device)
        self.evaluation = RoutingTotals.zeros(num_layers, num_experts, device)
        self._evaluating = False
        self.is_padding = False  # whether an evaluation runs a micro-batch without a sample

    def recipient(self) -> RoutingTotals | None:
        """The totals that count the current forward pass; None in the first run of a recompute."""
        if self._evaluating:
            return None if self.is_padding else self.evaluation
        return self.training if torch.is_grad_enabled() else None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[RoutingTotals]:
        """Forward passes inside count as evaluation; its totals start at zero."""
        self.evaluation.clear()
        self._evaluating = True
        try:
            yield self.evaluation
        finally:
            self._evaluating = self.is_padding = False


def rank_load(layers: Sequence[Mapping[str, Any]], ranks: int) -> dict[str, Any] | None:
    """The load of the expert-parallel ranks: the choices of a rank's experts over the mean rank's.

    The result is exact, because the counts are: a run that continues on the same layout reports the
    same.

    Args:
        layers: a record's `layers`, with `tokens_per_expert` before capacity drops any.
        ranks: the size of the expert-parallel group. Rank r has the r-th of as many equal parts of
            the experts.

    Returns None if one rank has all experts, or if there was no choice. Otherwise overload (the
    greatest load of all layers and ranks: 1 is even, `ranks` is the worst), its layer and its
    expert_parallel_rank.
    """
    loads = []
    for layer in layers:
        counts = layer["tokens_per_expert"]
        each, total = len(counts) // ranks, sum(counts)
        for rank in range(ranks if total else 0):
            part = sum(counts[rank * each : (rank + 1) * each])
            loads.append((part * ranks / total, layer["layer"], rank))
    if ranks == 1 or not loads:
        return None
    overload, layer, rank = max(loads, key=lambda load: load[0])
    return {"overload": overload, "layer": layer, "expert_parallel_rank": rank}
