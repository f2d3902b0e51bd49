"""The harness' own `hf` model, on the model of an export in memory.

This is the only module that imports lm_eval at its top. Import it after `tasks.require_harness`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.huggingface.export import ExportSource, model_in_memory, source_of
from moe_parallel.huggingface.tokenizer import write_tokenizer


class HarnessModel(HFLM):
    """Answers the requests of tasks. Each rank has a complete model and a share of the documents.

    A Lory model routes the texts that it scores by segments, as in training. If it merges by the
    prompt (--lory-inference prompt), the mean of the context merges the experts for the answer.
    """

    def __init__(self, source: ExportSource, batch_size: int = 1, dtype: str = "float32") -> None:
        """Raises InputError for a system without an exported form."""
        config = source.config
        self._length = config.training.seq_length
        # A pass without a cache is that of evaluations; `generate` always asks for one.
        model = model_in_memory(source, dtype)
        model.config.use_cache = False
        # Padding would count in the mean of a first segment.
        alone = config.settled_after != 0
        selection: Any = config.selection
        self._prefix: int | None = None
        if selection.system == "lory" and selection.lory_inference == "prompt":
            self._prefix = selection.lory_segment_length
            self._uniform = selection.lory_first_segment == "uniform"
        torch.manual_seed(config.training.seed)
        super().__init__(
            model,
            tokenizer=opened_tokenizer(source.tokenizer, self._length),
            batch_size=1 if alone else batch_size,
            max_length=self._length,
            prefix_token_id=source.tokenizer.before_text,
            add_bos_token=bool(source.tokenizer.beginning),
        )
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    @property
    def max_gen_toks(self) -> int:
        """The most tokens of an answer, if its task does not say it."""
        return min(256, self._length // 2)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """One element of each rank: [ranks]."""
        found = [torch.empty_like(tensor) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(found, tensor)
        return torch.stack(found) if self.world_size > 1 else tensor

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        longest = max((len(answer) for _, _, answer in requests), default=0)
        if longest > self._length:
            raise InputError(
                f"an answer has {longest} tokens, and the model reads --seq-length "
                f"{self._length}: leave its task out"
            )
        if self._prefix is None:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        if self._uniform and any(pair is None for pair, _, _ in requests):
            raise InputError(
                "--lory-inference is prompt, but a text without a context has no prompt to merge "
                "by --lory-first-segment uniform: set --lory-inference segment"
            )
        found = []
        for pair, context, answer in requests:
            first = min(len(context), self._length + 1 - len(answer))
            self.model.config.prefix_length = self._prefix if pair is None else first
            found += super()._loglikelihood_tokens([(pair, context, answer)], True, 1)
        self.model.config.prefix_length = None
        return found


def harness_model(load: str, flags: Sequence[str] = (), batch_size: int = 1) -> HarnessModel:
    """The model of a checkpoint, for `lm_eval.simple_evaluate(model=...)`. Raises InputError.

    `flags`: of training, which may change the configuration.
    """
    return HarnessModel(source_of(load, flags), batch_size)


def opened_tokenizer(tokenizer: Tokenizer, length: int) -> Any:
    """As transformers opens that of an export. `length`: the most tokens that the model reads."""
    with tempfile.TemporaryDirectory() as folder:
        if not write_tokenizer(tokenizer, length, Path(folder)).opens:
            raise InputError(
                "--tasks: transformers does not open the run's tokenizer, which the harness needs: "
                "evaluate by --documents or --input"
            )
        return AutoTokenizer.from_pretrained(folder)
