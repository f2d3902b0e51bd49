"""A pretraining run: set up, train, report."""

from __future__ import annotations

import gc
import lzma
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.utils import unwrap_model

from moe_parallel.collective_errors import agree
from moe_parallel.config import Config, FixedNumber, validate
from moe_parallel.config.message import counted
from moe_parallel.data.datasets import Datasets, texts
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.evaluation.text_loss import TextLoss
from moe_parallel.model.memory import check_memory
from moe_parallel.model.shards import total_parameters
from moe_parallel.ops.padding import LANES, width_warning
from moe_parallel.parallel import Groups, initialize_groups, seed_ranks
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from moe_parallel.platform.determinism import be_deterministic
from moe_parallel.platform.device import (
    choose_backend,
    device,
    keep_freed_memory_unless_set,
    take_gpu,
)
from moe_parallel.platform.gradients import replace_gradient_loops
from moe_parallel.platform.megatron import check_megatron_version, check_muon
from moe_parallel.telemetry.progress import Phase, Progress, clock_of
from moe_parallel.telemetry.sinks import Telemetry, open_telemetry
from moe_parallel.training.checkpoint.checkpointer import TrainingState
from moe_parallel.training.checkpoint.record import newest_good
from moe_parallel.training.failure import FailureChannel, connect_ranks, run
from moe_parallel.training.heartbeat import heartbeat
from moe_parallel.training.instruments import open_instruments
from moe_parallel.training.loop import Loop
from moe_parallel.training.run_config import begins_in, run_config
from moe_parallel.training.run_folder import begin_run, goes_on_here, is_finished, open_checkpoints
from moe_parallel.training.run_lock import locked_folder, patience
from moe_parallel.training.signals import StopRequest
from moe_parallel.training.stages import Stage, Stages
from moe_parallel.training.text import open_stream, open_text


def main(arguments: Sequence[str], stop: StopRequest | None = None) -> NoReturn:
    """Pretrain as the command line specifies, and end the process; see signals.py."""
    stop = stop or StopRequest()

    def body(channel: FailureChannel) -> int:
        given = run_config(arguments)
        config = given.config
        validate(config, int(os.environ.get("WORLD_SIZE", 1)))
        backend = choose_backend(config.parallel.distributed_backend)
        check_megatron_version()
        if config.optimizer.optimizer == "muon":
            check_muon()
        if config.training.deterministic_mode:
            be_deterministic(config)
        if torch.cuda.is_available():
            take_gpu(int(os.environ.get("LOCAL_RANK", 0)))
            replace_gradient_loops()
        else:
            adapt_megatron_to_cpu()
            keep_freed_memory_unless_set()
        channel.watch()
        timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
        flag = "--distributed-timeout-minutes"
        connect_ranks(channel.store, backend, timeout, flag)
        progress = Progress(clock_of(device()))
        with heartbeat(progress, channel, config.parallel.hang_timeout):
            return pretrain(
                config,
                initialize_groups(config.parallel, config.virtual_stages),
                stop,
                given.warnings,
                progress=progress,
            )

    run(body, stop)


def pretrain(
    config: Config,
    groups: Groups,
    stop: StopRequest | None = None,
    warnings: Sequence[str] = (),
    progress: Progress | None = None,
) -> int:
    """Train, evaluate and report; returns the exit code. Collective.

    Args:
        stop: receives the signals; None: a new request that no signal reaches.
        warnings: warnings to print besides those of the configuration.
        progress: told what this rank does.
    """
    stop, progress = stop or StopRequest(), progress or Progress()
    wait = patience(os.environ, config.parallel.hang_timeout)
    with locked_folder(config.checkpoint.save, wait) as lock_warnings:
        warnings = (*warnings, *lock_warnings)
        return _pretrain(config, groups, stop, warnings, progress)


def _pretrain(
    config: Config,
    groups: Groups,
    stop: StopRequest,
    warnings: Sequence[str],
    progress: Progress,
) -> int:
    seed_everything(config, groups)
    config, note = _first_start(config)
    check_memory(config, config.data.vocab_size or 0, groups)
    config, damage = _before_damage(config)
    text = open_text(config)
    check_memory(config, text.vocab_size, groups)
    stream, unknown = open_stream(config, text.sources)
    checkpoints = open_checkpoints(config, text.vocab_size, groups, text.tokenizer, stream)
    datasets = text.datasets(config, stream)
    counts = text.token_counts(config, datasets)
    stages = Stages(config, text.vocab_size, groups, checkpoints, progress, counts)
    stage = stages.first()
    if is_finished(config, stage.state.iteration):
        _tell_finished(config, stage)
        return 0
    begin_run(config, text.tokenizer)
    with (
        _telemetry(config, stage.state) if dist.get_rank() == 0 else Telemetry() as telemetry,
        open_instruments(config, text.vocab_size) as instruments,
    ):
        telemetry.say(_opening(config, groups, stage))
        for each in (*([] if note is None else [note]), *config.notes):
            telemetry.say(each)
        for state in config.time_constants:
            telemetry.say(state.note(config.training.train_iters))
        for warning in (
            *warnings,
            *damage,
            *unknown,
            *config.warnings,
            *text.warnings,
            *datasets.warnings,
            *instruments.warnings,
            *_width_warnings(config),
        ):
            telemetry.say(f"warning: {warning}")
        began = time.monotonic()
        loop = Loop(config, stage, text, datasets, telemetry, instruments, began, stop)
        evaluating = config.training.skip_train
        code = 0 if evaluating else loop.train()
        if not (loop.done or loop.asked_to_leave or evaluating):  # the stage is complete
            del loop, stage
            gc.collect()  # the experts need the memory that the dense model occupied
            with progress.activity(Phase.SET_UP):
                stage = stages.second()
            loop = Loop(config, stage, text, datasets, telemetry, instruments, began, stop)
            code = loop.train()
        if code == 0 and (loop.done or evaluating):
            with progress.activity(Phase.REPORT):
                _report(loop, telemetry, text.tokenizer)
    dist.barrier()
    return code


def _first_start(config: Config) -> tuple[Config, str | None]:
    """The configuration without a --load that has no checkpoint yet, and a note. Collective."""
    checkpoint = config.checkpoint
    if checkpoint.finetune or not agree(lambda: begins_in(checkpoint.load, checkpoint.save)):
        return config, None
    note = f"no checkpoint in {checkpoint.load} yet: the run begins there"
    return replace(config, checkpoint=replace(checkpoint, load=None)), note


def _before_damage(config: Config) -> tuple[Config, list[str]]:
    """The configuration that loads the newest good checkpoint, if the run continues in its own
    folder, and a warning if the newest of all is damaged. Collective."""
    checkpoint = config.checkpoint
    names_folder = checkpoint.load is not None and checkpoint.save is not None and (
        Path(checkpoint.load).resolve() == Path(checkpoint.save).resolve()
    )  # fmt: skip
    if not names_folder or checkpoint.finetune:
        return config, []
    good, wrong = newest_good(Path(checkpoint.load or ""))
    if wrong is None:
        return config, []
    loading = replace(config, checkpoint=replace(checkpoint, load=str(good)))
    return loading, [f"{wrong}; the run continues from {good.name}"]


def seed_everything(config: Config, groups: Groups) -> None:
    """Seed the generators of torch and Megatron-Core; the weights have their own seeds."""
    seed_ranks(config.training.seed, groups)
    init_num_microbatches_calculator(
        dist.get_rank(),
        None,
        config.training.global_batch_size,
        config.training.micro_batch_size,
        groups.dp.size(),
    )


def _telemetry(config: Config, state: TrainingState) -> Telemetry:
    """Opens the telemetry. `state`: of the loaded checkpoint, or of a new run."""
    done = state.iteration
    unlogged: int = state.unlogged["iterations"] if state.unlogged else 0
    return open_telemetry(
        config.checkpoint.save,
        config.training.train_iters,
        first=done,
        resumed_from=done if goes_on_here(config) else None,
        logged=done - unlogged,
        tensorboard=config.logging.tensorboard,
        wandb_project=config.logging.wandb_project,
        wandb_mode=config.logging.wandb_mode,
        config=dict(config.values()),
    )


def _width_warnings(config: Config) -> list[str]:
    if not (torch.cuda.is_available() and config.training.bf16 and any(config.moe_layers)):
        return []
    assert config.moe.num_experts is not None
    selection, step = config.selection, LANES * config.parallel.expert_tensor_size
    width = selection.dispatched_width(config.expert_width, config.moe.num_experts)
    # The experts with low-rank factors are those that are padded: `autonomous_experts`.
    is_padded = bool(selection.low_rank_sizes)
    remedy = selection.fitting_width(config.model.hidden_size, config.moe_ffn_size, step)
    warning = width_warning(width, step, is_padded=is_padded, remedy=remedy)
    return [] if warning is None else [warning]


def _opening(config: Config, groups: Groups, stage: Stage) -> str:
    parameters = total_parameters(unwrap_model(stage.engine.chunks))
    sizes = {
        "tp": groups.tp, "pp": groups.pp, "dp": groups.dp, "ep": groups.ep, "etp": groups.etp
    }  # fmt: skip
    if groups.cp.size() > 1:
        sizes["cp"] = groups.cp
    layout = " ".join(f"{name} {group.size()}" for name, group in sizes.items())
    tokens = config.training.global_batch_size * config.training.seq_length
    done = stage.state.iteration
    start = f", going on after iteration {done}" if done else ""
    ranks = counted(dist.get_world_size(), "rank")
    return (
        f"{parameters / 1e6:.2f}M parameters on {ranks} ({layout}); "
        f"{config.training.train_iters} iterations of {tokens:,} tokens{start}"
    )


def _tell_finished(config: Config, stage: Stage) -> None:
    """Report that nothing is left to do. Collective.

    The figure is drawn again, because the run may have been killed before it drew one.
    """
    parameters = total_parameters(unwrap_model(stage.engine.chunks))
    if dist.get_rank() != 0:
        return
    done, train_iters = stage.state.iteration, config.training.train_iters
    print(
        f"--load {config.checkpoint.load}: {done} iterations are done, and --train-iters is "
        f"{train_iters}: nothing is left to do",
        flush=True,
    )
    if done == train_iters and goes_on_here(config):
        print(write_figure(config, parameters), flush=True)


def _report(loop: Loop, telemetry: Telemetry, tokenizer: Any) -> None:
    """The last evaluation, its bits per byte beside those of xz, and the figure. Collective."""
    full = loop.config.logging.full_evaluation
    text_losses = loop.evaluate(everything=full)
    parameters = total_parameters(unwrap_model(loop.engine.chunks))
    if dist.get_rank() != 0:
        return
    if full and text_losses:
        table = bits_per_byte(text_losses, loop.datasets, tokenizer)
        telemetry.say("\n".join(["\nheld-out text, every token:", *table]))
    if loop.config.checkpoint.save is not None:
        telemetry.say(write_figure(loop.config, parameters))


def bits_per_byte(
    text_losses: Mapping[str, TextLoss], datasets: Datasets, tokenizer: Tokenizer
) -> list[str]:
    """A table for a terminal: bits per byte of the model and of `xz -9` on held-out text.

    It has a row for each domain, and one for all if there are several. xz sees only the held-out
    text, which the model did not see either; its file counts with its header. Memory: the held-out
    text, twice.
    """
    ours = dict(text_losses)
    held_out = {
        name: "".join(texts(side, tokenizer)).encode() for name, side in datasets.valid.items()
    }
    if len(held_out) > 1:
        held_out["all"] = b"".join(held_out.values())
        ours["all"] = TextLoss(
            sum(each.nats for each in text_losses.values()),
            sum(each.tokens for each in text_losses.values()),
            sum(each.num_bytes for each in text_losses.values()),
        )
    width = max(map(len, [*held_out, "bits per byte"]))
    return [
        f"{'bits per byte':<{width}}{'model':>10}{'xz -9':>10}",
        *(
            f"{name:<{width}}{ours[name].bits_per_byte:>10.3f}"
            f"{8 * len(lzma.compress(text, preset=9)) / len(text):>10.3f}"
            for name, text in held_out.items()
        ),
    ]


def write_figure(config: Config, parameters: int) -> str:
    """Draw the figure of the run in --save; returns a line with its path or why there is none."""
    # Here, because only one rank draws, and the import of Matplotlib takes a second on each.
    from moe_parallel.analysis.run_figure import plot_run

    assert config.checkpoint.save is not None
    try:
        path = plot_run(Path(config.checkpoint.save), model_line=_model_line(config, parameters))
        return f"figure: {path}"
    except Exception as error:  # the run is complete and saved: its exit code stays
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"warning: there is no figure: {reason}"


def _model_line(config: Config, parameters: int) -> str:
    model = config.model
    line = f"{config.selection.system}, {parameters / 1e6:.1f}M parameters, "
    line += f"{model.num_layers} layers x {model.hidden_size}"
    if config.moe.num_experts is not None:
        line += f", {config.moe.num_experts} experts"
        if isinstance(config.selection, FixedNumber):
            line += f", {config.selection.moe_router_topk} a token"
    return line
