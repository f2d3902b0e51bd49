"""A model of a few thousand parameters with its optimizer, in any layout, to save and load."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.checkpoint.checkpointer import Checkpointer, TrainingState
from moe_parallel.training.checkpoint.saving import Background
from moe_parallel.training.engine import Engine

LENGTH, BATCH, VOCABULARY = 16, 4, 100

#: A dense layer (its SwiGLU weight is saved as two halves), then experts; grouped-query attention.
TINY = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "moe_layer_freq": "[0]+[1]*3",
    "moe_backend": "reference",
    "micro_batch_size": 1,
    "global_batch_size": BATCH,
    "seq_length": LENGTH,
    "lr": 1e-2,
    "lr_warmup_iters": 2,
    "train_iters": 20,
}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 8}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1000}
GATHERED = AOE | {"aoe_gather_w_down": True}


@dataclass(frozen=True)
class Layout:
    """The parallel sizes of a run."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = True  # if tp is more than 1
    distributed: bool = False
    cp: int = 1

    def options(self) -> dict[str, Any]:
        virtual = {}
        if self.vpp > 1:
            layers = TINY["num_layers"] // self.pp // self.vpp
            virtual = {"num_layers_per_virtual_pipeline_stage": layers}
        return {
            "tensor_model_parallel_size": self.tp,
            "context_parallel_size": self.cp,
            "sequence_parallel": self.sp and self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "use_distributed_optimizer": self.distributed,
            **virtual,
        }

    def sizes(self) -> dict[str, int]:
        return {
            "tp": self.tp,
            "pp": self.pp,
            "vpp": self.vpp,
            "ep": self.ep,
            "etp": self.etp,
            "cp": self.cp,
        }


class TinyRun:
    """An engine, its checkpointer, and data by sample number. Close it before opening another."""

    def __init__(
        self,
        layout: Layout,
        save: Path,
        *,
        options: dict[str, Any] | None = None,
        keep_last: int | None = None,
        files: dict[str, str | Path] | None = None,
        background: Background | None = None,
    ) -> None:
        config = make_config({**TINY, **layout.options(), **(options or {})})
        self.groups = initialize_groups(config.parallel, config.virtual_stages)
        model_parallel_cuda_manual_seed(config.training.seed)
        before_update = background.wait_for_copy if background else None
        self.engine = Engine(config, VOCABULARY, self.groups, before_update=before_update)
        self.checkpointer = Checkpointer(
            save,
            keep_last=keep_last,
            fingerprint={
                "hidden_size": config.model.hidden_size,
                "expert_selection": type(config.selection).__name__,
                "heads": (config.model.num_attention_heads, config.model.num_query_groups),
            },
            layout=layout.sizes(),
            files=files or {},
            background=background,
        )
        self.iteration = 0

    def close(self) -> None:
        destroy_groups()

    def steps(self, number: int) -> list[tuple[float, float]]:
        """Train; returns the loss and the gradient norm of each step."""
        measured = []
        for _ in range(number):
            result = self.engine.step(self.batches())
            measured.append((result.lm_loss, result.grad_norm))
            self.iteration += 1
        return measured

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's micro-batches of the next step: sample n is the same in every layout."""
        length = self.engine.config.training.seq_length
        first = self.iteration * BATCH
        for sample in range(first + self.groups.dp.rank(), first + BATCH, self.groups.dp.size()):
            generator = torch.Generator().manual_seed(sample)
            start = torch.randint(0, VOCABULARY, (1, 1), generator=generator)
            text = (start + torch.arange(length + 1)) % VOCABULARY
            yield {
                "tokens": text[:, :-1],
                "labels": text[:, 1:],
                "position_ids": torch.arange(length)[None],
                "loss_mask": torch.ones(1, length),
            }

    def save(self) -> Path:
        return self.checkpointer.save(*self.state())

    def state(self) -> tuple[TrainingState, Any, Any, Any]:
        """The arguments of `Checkpointer.save`."""
        samples = self.iteration * BATCH
        state = TrainingState(self.iteration, samples, samples * LENGTH)
        return state, self.engine.chunks, self.engine.optimizer, self.engine.scheduler

    def load(self, path: Path) -> TrainingState:
        engine = self.engine
        state = self.checkpointer.load(path, engine.chunks, engine.optimizer, engine.scheduler)
        self.iteration = state.iteration
        return state

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """The parameters of this rank by their names in the whole model; layers count from 0."""
        for chunk in unwrap_model(self.engine.chunks):
            for name, parameter in chunk.named_parameters():
                words = name.split(".")
                if words[:2] == ["decoder", "layers"]:
                    words[2] = str(chunk.decoder.layers[int(words[2])].layer_number - 1)
                yield ".".join(words), parameter
