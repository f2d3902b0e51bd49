"""The model with its optimizer, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.utils import get_model_config

from moe_parallel.balancing.controller import end_step, setting_of
from moe_parallel.config import Config
from moe_parallel.experts.experts import AddsToMainGradients
from moe_parallel.layers import DispatchedLayer, ExpertLayer
from moe_parallel.model.forward import Batch, language_model_loss, run_micro_batches
from moe_parallel.model.gpt import build_model
from moe_parallel.parallel import Groups
from moe_parallel.platform.device import device
from moe_parallel.telemetry.progress import Phase, Progress, Timers
from moe_parallel.telemetry.statistics import RoutingStatistics
from moe_parallel.training.optimizer import build_optimizer, build_scheduler, parallelize
from moe_parallel.training.router_trace import RunTrace, run_trace
from moe_parallel.training.step_graph import Passes, StepGraph, use_stream_of_graphs


@dataclass(frozen=True)
class StepResult:
    """The measurements of a step, which are the same on every rank."""

    lm_loss: float  # nats per token, over the global batch
    grad_norm: float  # before clipping
    learning_rate: float
    tokens: int


class NonFinite(ArithmeticError):
    """The loss or the gradient norm of a step is NaN or infinite. The message says which."""


class Engine:
    """The model chunks, the optimizer and the schedule of this rank."""

    def __init__(
        self,
        config: Config,
        vocab_size: int,
        groups: Groups,
        progress: Progress | None = None,
        before_update: Callable[[], object] | None = None,
        token_counts: Sequence[int] = (),
    ) -> None:
        """Build everything, with initial weights.

        Args:
            vocab_size: of the tokenizer.
            progress: is told the phases of a step.
            before_update: called in every step after the backward pass, before the optimizer
                changes its state and the weights.
            token_counts: how often each token id occurs in the training text, if it was counted.
        """
        self._before_update = before_update
        self.config = config
        self.progress = progress or Progress()
        self.groups = groups
        self.device = device()
        if config.training.uses_cuda_graph:
            use_stream_of_graphs(self.device)
        self.statistics = RoutingStatistics(
            config.model.num_layers, config.moe.num_experts or 1, self.device
        )
        padded = config.padded_vocab_size(vocab_size)
        self._trace = run_trace(config, groups)
        with self.device:
            chunks = build_model(
                config,
                padded,
                groups,
                self.statistics,
                self.progress,
                self._iteration,
                None if self._trace is None else self._trace.layers,
                token_counts,
            )
        self._expert_layers = [
            layer for chunk in chunks for layer in chunk.modules() if isinstance(layer, ExpertLayer)
        ]
        for layer in self._expert_layers:
            layer.register_forward_hook(self._measure_start)
        self._controllers = [
            layer.controller
            for layer in self._expert_layers
            if isinstance(layer, DispatchedLayer) and layer.controller is not None
        ]
        self.chunks = parallelize(config, chunks)
        if config.training.gradient_accumulation_fusion:
            for module in (module for chunk in chunks for module in chunk.modules()):
                if isinstance(module, AddsToMainGradients):
                    module.add_to_main_gradients()
        self.optimizer = build_optimizer(config, self.chunks, Timers(self.progress))
        self.scheduler = build_scheduler(config, self.optimizer)
        _wire(get_model_config(self.chunks[0]), self.chunks, self.optimizer)
        dp = config.parallel.data_parallel_size(dist.get_world_size())
        self.num_micro_batches = config.training.global_batch_size // (
            config.training.micro_batch_size * dp
        )
        self._passes = self._passes_of_step()

    def step(self, batches: Iterator[Batch]) -> StepResult:
        """One optimizer step on the next micro-batches of this rank. Collective.

        Raises NonFinite on every rank: the weights have changed then and must not be saved. With
        --overlap-param-gather they are complete on a rank only after `gather_weights`.

        Raises InputError on every rank, if a trace cannot be written or replayed.
        """
        if self._trace is not None:
            batches = self._traced(self._trace, batches)
        for chunk in self.chunks:
            chunk.train()
        self._clear_gradients()
        reported = self._passes(batches)
        if self._before_update is not None:
            with self.progress.activity(Phase.SAVE):
                self._before_update()
        with self.progress.during(Phase.OPTIMIZER):
            _, grad_norm, _ = self.optimizer.step()
        grad_norm = float(grad_norm or 0.0)
        with self.progress.during(Phase.REDUCE):
            loss, tokens = self.global_loss([report["sums"] for report in reported], grad_norm)
            for layer in self._expert_layers:
                layer.after_step()
            if self._controlled is not None:
                end_step(self._controllers, self.device)
        if self._trace is not None:
            self._trace.end_step(self.device)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.scheduler.step(increment=1)
        return StepResult(loss, grad_norm, learning_rate, tokens)

    def _clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _passes_of_step(self) -> Passes:
        config = self.config.training
        passes: Passes = partial(
            run_micro_batches,
            self.chunks,
            training=config,
            num_micro_batches=self.num_micro_batches,
            loss_of=language_model_loss,
            forward_only=False,
            cp=self.groups.cp,
        )
        if not config.uses_cuda_graph:
            return passes
        # Sums of gradients stay outside the graph.
        get_model_config(self.chunks[0]).finalize_model_grads_func = None
        return StepGraph(
            passes,
            self._clear_gradients,
            partial(finalize_model_grads, self.chunks),
            self.chunks,
            self.num_micro_batches,
            config.cuda_graph_warmup_steps,
            self.groups.etp_ep,
            self.statistics.training,
            self.progress,
            self.device,
        )

    def _traced(self, trace: RunTrace, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The micro-batches of the step, all read; the trace sees them before the layers do."""
        of_step = list(islice(batches, self.num_micro_batches))
        trace.begin_step(self._iteration(), of_step)
        return iter(of_step)

    def _measure_start(self, layer: Any, _: Any, output: tuple[torch.Tensor, None]) -> None:
        """Record the size of the layer's output in the first step of a run."""
        if layer.routes and self._iteration() == 0:
            totals = self.statistics.recipient()
            assert totals is not None
            totals.add_output(layer.layer_number, output[0])

    @property
    def _controlled(self) -> str | None:
        """The name of what controllers move. It is the same on ranks that hold no controller."""
        return self.config.selection.controlled if any(self.config.moe_layers) else None

    def controlled(self) -> dict[str, float]:
        """The number that controllers move, by its name; {}: there is none. Collective."""
        if self._controlled is None:
            return {}
        return {self._controlled: setting_of(self._controllers, self.device)}

    def _iteration(self) -> int:
        """The number of steps so far, also those before a checkpoint that was loaded."""
        done: int = self.scheduler.num_steps
        return done

    def global_loss(self, sums: list[torch.Tensor], grad_norm: float = 0.0) -> tuple[float, int]:
        """(nats per token, tokens) over all micro-batches of all ranks. Collective.

        `sums`: [nats, tokens] in fp64 per micro-batch of this rank; [] on earlier pipeline stages.
        `grad_norm`: of this rank, which a data-parallel rank computes from gradients of its own.
        Raises NonFinite on every rank.
        """
        mine = torch.zeros(3, dtype=torch.float64, device=self.device)
        if sums and self.groups.tp.rank() == 0:  # tensor-parallel ranks report the same tokens
            mine[:2] = torch.stack(sums).sum(0)
        mine[2].fill_(grad_norm)
        total = mine.clone()
        dist.all_reduce(total)
        nats, tokens, norms = total.tolist()
        if not math.isfinite(nats):
            finite: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(finite, bool(torch.isfinite(mine[:2]).all()))
            ranks = ", ".join(str(rank) for rank, ok in enumerate(finite) if not ok)
            raise NonFinite(f"the loss is {nats} (on rank {ranks})")
        loss = nats / max(tokens, 1.0)
        if not math.isfinite(norms):
            raise NonFinite(f"the loss is {loss:.4f}, but the gradient norm is {norms}")
        return loss, round(tokens)


def _wire(megatron: Any, chunks: list[Any], optimizer: Any) -> None:
    """Set the hooks that Megatron-Core's schedules read from the model's configuration."""
    megatron.finalize_model_grads_func = finalize_model_grads
    megatron.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in chunks]
    megatron.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
