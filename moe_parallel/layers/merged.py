"""The merged family: a weighted sum of all experts' matrices computes the tokens.

    tokens -> means of segments -> router -> merged experts -> the segments' tokens

Nothing is dispatched and nothing is dropped. Tensor parallelism divides every expert's matrices
("expert-wise model parallelism"). A rank sees complete sequences and merges its shard of all
experts, and its output is one part of the sum over the ranks. The communication is that of a dense
layer. The gradients of the merge weights are also parts of a sum over the ranks, and so are the
gradients that follow from them. `replicated` sums the router's gradient. The gradient of the
tokens is summed where the tokens enter the layer.

With context parallelism a rank sees its share of every sequence. The sums over the tokens of all
segments are added up over the ranks, so that each rank has the merges of the whole sequence, of
which it computes those that its tokens need. A segment of which two ranks have tokens is merged on
both.

Shape suffixes: S tokens of a sequence on this rank, B sequences, G segments of a sequence, M
stretches with one merge each, E experts, D model width, P = M * B merged experts, T tokens of each
merged expert.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F

from moe_parallel.config import MergedSelection
from moe_parallel.experts.merged import MergedExperts
from moe_parallel.layers.expert_layer import ExpertLayer, LayerConfig, LayerContext
from moe_parallel.layers.system import System
from moe_parallel.parallel import gather_over, sum_gradient_over, sum_over
from moe_parallel.selection.segments import (
    Merges,
    means_of,
    segment_sums_of_share,
)
from moe_parallel.selection.tokens import Share, zigzag


class MergedLayer(ExpertLayer):
    """A linear softmax router over SwiGLU experts whose matrices are merged.

    The router must not start at zero. If the experts are equal, as after a dense warm-up, they
    would then always have the same gradients, and the router would have none.
    """

    w_router_ED: torch.Tensor
    experts: MergedExperts

    def __init__(
        self,
        config: LayerConfig,
        selection: MergedSelection,
        expert_width: int,
        context: LayerContext,
        system: System,
        **_: Any,  # what later versions of Megatron-Core add
    ) -> None:
        super().__init__(config, context)
        self.add_replicated_weight("w_router_ED", self.num_experts, config.hidden_size)
        self.experts = MergedExperts(
            self.num_experts,
            config.hidden_size,
            expert_width,
            context.groups,
            context.ops,
            config.params_dtype,
        )
        self.rule, self.evaluation_rule = system.rules(selection)

    @abstractmethod
    def merges(self, x_SBD: torch.Tensor) -> Merges:
        """The merges for this rank's tokens; S is divided over `cp` only."""

    def segment_means(self, x_SBD: torch.Tensor, length: int | None) -> tuple[torch.Tensor, int]:
        """The means of the segments of complete sequences, [G, B, D], and the length of these.

        `length`: of a segment; None: that of a sequence.
        """
        cp = self.context.groups.cp
        tokens = len(x_SBD) * cp.size()
        length = length or tokens
        sums_GBD = segment_sums_of_share(x_SBD, self._share(tokens), tokens, length)
        # Each rank uses all sums for its own tokens.
        sums_GBD = sum_gradient_over(sum_over(sums_GBD, cp), cp)
        return means_of(sums_GBD, tokens, length), tokens

    def of_this_rank(self, merges: Merges, tokens: int) -> Merges:
        """Those of the merges of complete sequences of `tokens` that this rank's tokens need."""
        return merges if self.context.groups.cp.size() == 1 else merges.within(self._share(tokens))

    def _share(self, tokens: int) -> Share:
        cp = self.context.groups.cp
        return zigzag(tokens, cp.size(), cp.rank())

    def current_rule(self) -> Any:
        """The rule of this forward pass; evaluation may use a different rule."""
        return self.rule if self.training else self.evaluation_rule

    def output(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        x_SBD = self._whole_sequences(hidden_SBD)
        merges = self.merges(x_SBD)
        self._record(merges)
        parts = [self._compute(*part) for part in merges.parts(x_SBD)]
        return self._summed(torch.cat(parts))

    def _compute(self, x_MTBD: torch.Tensor, weights_MBE: torch.Tensor) -> torch.Tensor:
        """The outputs for stretches of equal size, one after another: [M * T, B, D]."""
        x_MBTD = x_MTBD.transpose(1, 2)
        y_PTD = self.experts(x_MBTD.flatten(0, 1), weights_MBE.flatten(0, 1))
        return y_PTD.view(x_MBTD.shape).transpose(1, 2).flatten(0, 1)

    def weights(self, r: torch.Tensor) -> torch.Tensor:
        """e = softmax(R r) of the means r [..., D]: [..., E], in the dtype of r."""
        return torch.softmax(self.logits(r), dim=-1)

    def logits(self, r: torch.Tensor) -> torch.Tensor:
        """The router's logits of the means r [..., D]: [..., E], in the dtype of r."""
        return F.linear(r, self.router_weight(r.dtype))

    def router_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[E, D]. Its gradient on a rank is a part of the sum over tp, like that of the means."""
        return self.replicated(self.w_router_ED.to(dtype))

    def _whole_sequences(self, hidden_SBD: torch.Tensor) -> torch.Tensor:
        """The tokens of all tensor-parallel ranks. Their gradient is summed over these ranks."""
        tp = self.context.groups.tp
        if self.config.sequence_parallel:
            return gather_over(hidden_SBD, 0, tp)
        return sum_gradient_over(hidden_SBD, tp)

    def _summed(self, y_SBD: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' parts, split over the ranks again if the input was split."""
        tp = self.context.groups.tp
        if self.config.sequence_parallel:
            from megatron.core.tensor_parallel import mappings

            return mappings.reduce_scatter_to_sequence_parallel_region(y_SBD, group=tp)
        return sum_over(y_SBD, tp)

    def _record(self, merges: Merges) -> None:
        totals = self.context.statistics.recipient()
        if totals is not None and self.context.groups.tp.rank() == 0:  # others have the same tokens
            weights_ME = merges.weights_MBE.detach().flatten(0, 1)
            totals.add_merges(self.layer_number, weights_ME, merges.tokens_MB().flatten())
