"""Core attention whose memory grows with S, not with S x S: torch's scaled_dot_product_attention.

With context parallelism a rank has the queries of its share of every sequence. It gathers the keys
and values of the whole sequences, by one all-gather, and keeps them for the backward pass, which
adds up the gradients of all ranks by one reduce-scatter.

Shape suffixes: S sequence, B batch (Megatron's order), T = B * S tokens, N documents in them, H
attention heads of this rank, G key/value heads of this rank, C width of a head, Q queries, K keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from moe_parallel.config import TrainingConfig
from moe_parallel.copies import copied_to
from moe_parallel.parallel import gather_over
from moe_parallel.platform.device import device, fast_factors
from moe_parallel.selection.tokens import Share, in_order, zigzag

#: On a CPU, queries with more keys before them are computed in strips of this many rows, whose mask
#: has as many rows.
STRIP = 256


class TorchAttention(MegatronModule):
    """Causal attention, softmax(Q K^T / sqrt(C)) V, by the kernel that torch selects.

    The flash kernels compute it in tiles and keep one fp32 number per row of the scores for the
    backward pass (Dao 2023, arXiv 2307.08691). H / G heads share a key/value head without copies of
    it. The module has no weights, so a checkpoint is the same with every kernel.

    Megatron-Core's specs build it with the arguments of its own DotProductAttention; those that are
    not named here do not apply.
    """

    #: torch uses one of these, by the device, the dtype and the shapes.
    kernels: ClassVar[list[SDPBackend]] = [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """
        Args:
            softmax_scale: the factor of the scores; None: 1 / sqrt(C).
            pg_collection: Megatron-Core's groups; its `cp` are the ranks that share the sequences.
                None: this rank has them alone.
        """
        super().__init__(config)
        self.layer_number = layer_number
        assert config.kv_channels is not None
        self.cp: Any = getattr(pg_collection, "cp", None)
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self,
        q_SBHC: torch.Tensor,
        k_SBGC: torch.Tensor,
        v_SBGC: torch.Tensor,
        attends_to: torch.Tensor | None,
        **_: Any,
    ) -> torch.Tensor:
        """[S, B, H, C], twice [S, B, G, C] -> [S, B, H * C], in the dtype of q.

        With context parallelism S is this rank's share of a sequence.

        Args:
            attends_to: what `own_documents` returns: None, or the lengths of the documents of all
                sequences, one whole sequence after another (int64, on the CPU). A token then
                attends only to its own document, and scores between documents are not computed. Or
                the tokens before these, which also keeps the new keys and values.

        Raises RuntimeError if none of the kernels serves the device, the dtype and the shapes.
        """
        # Without instructions for bf16, torch's flash kernel takes six times as long in it.
        share = [range(len(q_SBHC))]
        if self.cp is not None and self.cp.size() > 1:
            share = zigzag(len(q_SBHC) * self.cp.size(), self.cp.size(), self.cp.rank())
            k_SBGC, v_SBGC = self._of_whole_sequences(k_SBGC, v_SBGC)
        q, k, v = fast_factors(q_SBHC, k_SBGC, v_SBGC)
        with sdpa_kernel(self.kernels):
            if attends_to is None:
                y_SBD = self._attend_to_all(q, k, v, share)
            else:
                y_SBD = self._attend_to_own(q, k, v, share, attends_to.tolist())
        return y_SBD.to(q_SBHC.dtype)

    def _of_whole_sequences(
        self, k_SBGC: torch.Tensor, v_SBGC: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The keys and values of all context-parallel ranks, by position. Collective."""
        size = self.cp.size()
        kv_S2BGC = gather_over(torch.stack([k_SBGC, v_SBGC], 1), 0, self.cp)
        shares = [zigzag(len(kv_S2BGC), size, rank) for rank in range(size)]
        return in_order(kv_S2BGC, shares).unbind(1)

    def _attend_to_all(
        self, q_SBHC: torch.Tensor, k_SBGC: torch.Tensor, v_SBGC: torch.Tensor, share: Share
    ) -> torch.Tensor:
        """Each token of a share to all tokens before it: [S, B, H * C]."""
        k_BGSC, v_BGSC = (x.permute(1, 2, 0, 3) for x in (k_SBGC, v_SBGC))
        parts = []
        for run, q_QBHC in zip(share, q_SBHC.split([len(run) for run in share]), strict=True):
            keys = (_first(x, run.stop) for x in (k_BGSC, v_BGSC))
            parts.append(self._attend(q_QBHC.permute(1, 2, 0, 3), *keys).permute(2, 0, 1, 3))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(2)

    def _attend_to_own(
        self,
        q_SBHC: torch.Tensor,
        k_SBGC: torch.Tensor,
        v_SBGC: torch.Tensor,
        share: Share,
        lengths: list[int],
    ) -> torch.Tensor:
        """Each token of a share to those of its document before it: [S, B, H * C]."""
        pieces = list(_pieces(share, lengths, len(k_SBGC)))
        # One call a piece. `split`, unlike slices, has a backward pass without additions.
        q_THC, k_TGC, v_TGC = map(sequences_first, (q_SBHC, k_SBGC, v_SBGC))
        documents = list(zip(k_TGC.split(lengths), v_TGC.split(lengths), strict=True))
        parts = []
        queries = q_THC.split([queries for _, queries, _ in pieces])
        for (document, _, keys), q_QHC in zip(pieces, queries, strict=True):
            kv = (_first(x.transpose(0, 1)[None], keys) for x in documents[document])
            parts.append(self._attend(q_QHC.transpose(0, 1)[None], *kv)[0].transpose(0, 1))
        return positions_first(torch.cat(parts).flatten(1), q_SBHC.shape[1])

    def _attend(
        self, q_BHQC: torch.Tensor, k_BGKC: torch.Tensor, v_BGKC: torch.Tensor
    ) -> torch.Tensor:
        """Causal attention of the last Q of K tokens: [B, H, Q, C]."""
        queries, keys = q_BHQC.shape[2], k_BGKC.shape[2]
        if keys == 1:  # the softmax of one score is 1; cuDNN has no kernel for it
            return v_BGKC.repeat_interleave(q_BHQC.shape[1] // v_BGKC.shape[1], 1)
        if queries == keys:
            return self._kernel(q_BHQC, k_BGKC, v_BGKC, is_causal=True)
        if q_BHQC.is_cuda:
            mask: Any = causal_lower_right(queries, keys)  # not a tensor that is written
            return self._kernel(q_BHQC, k_BGKC, v_BGKC, attn_mask=mask)
        strips, end = [], keys - queries
        for strip_BHQC in q_BHQC.split(STRIP, 2):
            end += strip_BHQC.shape[2]
            mask = _mask_of_strip(strip_BHQC.shape[2], end, q_BHQC.dtype)
            kv = (_first(x, end) for x in (k_BGKC, v_BGKC))
            strips.append(self._kernel(strip_BHQC, *kv, attn_mask=mask))
        return strips[0] if len(strips) == 1 else torch.cat(strips, 2)

    def _kernel(
        self, q_BHQC: torch.Tensor, k_BGKC: torch.Tensor, v_BGKC: torch.Tensor, **mask: Any
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q_BHQC,
            k_BGKC,
            v_BGKC,
            scale=self.scale,
            enable_gqa=q_BHQC.shape[1] != k_BGKC.shape[1],
            **mask,
        )


def sequences_first(x_SBHC: torch.Tensor) -> torch.Tensor:
    """The tokens of one sequence after another: [T, H, C]."""
    return x_SBHC.transpose(0, 1).flatten(0, 1)


def positions_first(y_TD: torch.Tensor, sequences: int) -> torch.Tensor:
    """The inverse for the outputs of all heads: [S, B, D], dense."""
    return y_TD.unflatten(0, (sequences, -1)).transpose(0, 1).contiguous()


def _first(x_BGKC: torch.Tensor, keys: int) -> torch.Tensor:
    return x_BGKC if keys == x_BGKC.shape[2] else x_BGKC[:, :, :keys]


def _pieces(share: Share, lengths: list[int], length: int) -> Iterator[tuple[int, int, int]]:
    """The parts of documents in a share, in the order of sequences and positions.

    Args:
        lengths: of the documents of all sequences.
        length: of a sequence.

    Yields the number of the document, its tokens in one range of the share, and its tokens up to
    the last of them.
    """
    first = 0
    for number, size in enumerate(lengths):
        for run in share:
            inside = range(max(run.start, first), min(run.stop, first + size))
            if len(inside):
                yield number, len(inside), inside.stop - first
        first = (first + size) % length


def _mask_of_strip(queries: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores of the last of `keys` tokens: 0, or -inf for a later key.

    It is a view of a few tensors of STRIP rows, which attention of all layers shares.
    """
    whole = _strip(1 << (keys - 1).bit_length(), dtype)
    return whole[STRIP - queries :, whole.shape[1] - keys :]


@functools.lru_cache(maxsize=8)
def _strip(keys: int, dtype: torch.dtype) -> torch.Tensor:
    later = torch.ones(STRIP, keys, dtype=torch.bool).triu(keys - STRIP + 1)
    return torch.zeros(STRIP, keys, dtype=dtype).masked_fill_(later, -torch.inf)


def own_documents(position_ids_BS: torch.Tensor, training: TrainingConfig) -> torch.Tensor | None:
    """What the model's attention takes as its mask: None if a token attends to all before it.

    Args:
        position_ids_BS: on the CPU; 0 where a document begins.
        training: has --reset-attention-mask and --attention-backend.

    Returns the lengths of the documents (int64 [N], on the CPU), or for Megatron-Core's own module
    a mask: bool [B, 1, S, S] on the device of the model, True where a query must not see a key.
    """
    if not training.reset_attention_mask:
        return None
    begins_BS = position_ids_BS == 0
    begins_BS[:, 0] = True
    if training.attention_backend != "local":
        begins_N = begins_BS.flatten().nonzero()[:, 0]
        return torch.diff(begins_N, append=begins_N.new_tensor([begins_BS.numel()]))
    document_BS = begins_BS.cumsum(1)
    of_another_BSS = document_BS[:, :, None] != document_BS[:, None, :]
    return copied_to(device(), (of_another_BSS | torch.ones_like(of_another_BSS).triu(1))[:, None])
