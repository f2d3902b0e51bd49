"""The folder of a run: what may be written to it, and its checkpoints."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path

import torch.distributed as dist

import moe_parallel
from moe_parallel.collective_errors import agree, exchange, on_rank_0, one_line
from moe_parallel.config import Config
from moe_parallel.config.fp8 import Fp8Config
from moe_parallel.config.moe import MoEConfig, dense_width
from moe_parallel.config.option import options
from moe_parallel.data.atomic_files import write_atomically
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.parallel import Groups
from moe_parallel.platform.device import device
from moe_parallel.platform.machine import PACKAGES
from moe_parallel.systems import TopKSelection
from moe_parallel.telemetry.metrics import has_evaluation
from moe_parallel.training.checkpoint.checkpointer import Checkpointer
from moe_parallel.training.checkpoint.record import Expected
from moe_parallel.training.checkpoint.saving import Background
from moe_parallel.training.text import TOKENIZER, Stream


def open_checkpoints(
    config: Config,
    vocab_size: int,
    groups: Groups,
    tokenizer: Tokenizer | None = None,
    stream: Stream | None = None,
) -> Checkpointer:
    """The checkpoints of the run in --save. Writes nothing. Collective.

    Their record names `tokenizer` and `stream`. Without --save, they can only be loaded. Raises
    InputError if the folder contains another run, which would be overwritten.
    """
    folder = Path(config.checkpoint.save or ".")
    checkpoints = Checkpointer(
        folder,
        keep_last=config.checkpoint.keep_last,
        fingerprint=fingerprint(config, vocab_size, tokenizer),
        layout={
            "tp": groups.tp.size(),
            "pp": groups.pp.size(),
            "dp": groups.dp.size(),
            "ep": groups.ep.size(),
            "etp": groups.etp.size(),
            **({"cp": groups.cp.size()} if groups.cp.size() > 1 else {}),
            "virtual_stages": config.virtual_stages or 1,
            "device": device().type,  # random states are specific to the kind of device
        },
        files=stored_files(folder, config),
        states=_states(config),
        stream=stream,
        same_schedule=not config.checkpoint.override_opt_param_scheduler,
        background=_background(config),
    )
    if config.checkpoint.save is None:
        return checkpoints
    latest = checkpoints.latest()
    if latest is not None and config.checkpoint.finetune:
        raise InputError(
            f"--save {folder} already contains a run ({latest.name}), and --finetune starts a new "
            f"one: use another folder, or continue that run with --load {folder} alone"
        )
    if latest is not None and not goes_on_here(config):
        raise InputError(
            f"--save {folder} already contains a run ({latest.name}): continue it with --load "
            f"{folder}, or use another folder"
        )
    return checkpoints


def _background(config: Config) -> Background | None:
    """The writer of --async-save. Collective."""
    if not (config.checkpoint.async_save and config.checkpoint.save):
        return None
    return Background(timedelta(minutes=config.parallel.distributed_timeout_minutes))


def goes_on_here(config: Config) -> bool:
    """Whether this run continues the run of --load in the same folder, --save."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if load is None or save is None or config.checkpoint.finetune:
        return False
    return Path(save).resolve() in (Path(load) / "_").resolve().parents


def is_finished(config: Config, iteration: int) -> bool:
    """Whether a run that is loaded at `iteration` has nothing left to do or to log. Collective.

    Without --save there is no record of the last evaluation, so it is repeated and shown. A
    dense run with all its iterations is not finished if it is upcycled into another folder, because
    its experts must still be saved there.
    """
    save, train_iters = config.checkpoint.save, config.training.train_iters
    if iteration < train_iters:
        return False
    if config.moe.moe_use_upcycling and iteration == train_iters and not goes_on_here(config):
        return False
    if iteration > train_iters or not config.logging.evaluates_at_the_end:
        return True
    if save is None or not goes_on_here(config):
        return save is not None
    on_rank_0_alone = dist.get_rank() == 0
    return any(exchange(agree(lambda: on_rank_0_alone and has_evaluation(save, iteration))))


def dense_checkpoints(config: Config, vocab_size: int, checkpoints: Checkpointer) -> Checkpointer:
    """The checkpoints of the run's dense warm-up, in the folder of `checkpoints`."""
    shared = {key: value for key, value in checkpoints.fingerprint.items() if key == TOKENIZER}
    return checkpoints.of_model(_fingerprint(dense_twin(config), vocab_size) | shared)


def dense_twin(config: Config) -> Config:
    """The dense model from which that of `config` can start: a dense layer, as wide as one expert,
    for each MoE layer.

    All other options are the same, except that options only for experts have their defaults.
    """
    return replace(
        config,
        model=replace(config.model, ffn_hidden_size=dense_width(config)),
        moe=MoEConfig(moe_backend=config.moe.moe_backend),
        selection=TopKSelection(),
        fp8=Fp8Config(),
    )


def expected_dense(config: Config, vocab_size: int) -> Expected:
    """The properties of a dense checkpoint from which the experts of `config` can start."""
    return Expected(
        _fingerprint(dense_twin(config), vocab_size),
        # When experts start from another run, they take its weights and have their own schedule.
        same_schedule=not config.moe.moe_use_upcycling,
        remedy="upcycling takes a dense model of these sizes, its --ffn-hidden-size the experts' "
        "width: use another checkpoint, or the same sizes here",
    )


def begin_run(config: Config, tokenizer: Tokenizer) -> None:
    """Write config.yaml, tokenizer/ and a line of starts.jsonl to --save, after all checks have
    passed. Collective."""
    if config.checkpoint.save is None:
        return
    folder = Path(config.checkpoint.save)

    def begin() -> None:
        try:
            write_run_files(folder, config, tokenizer)
            with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(_start(config)) + "\n")
        except OSError as error:
            raise InputError(
                f"--save {folder} cannot be written ({one_line(error)}): "
                "name a folder on a disk with room"
            ) from error

    on_rank_0(begin)


#: The variable in which the first process of a start hands the command to its ranks.
COMMAND = "MOE_PARALLEL_COMMAND"


def _start(config: Config) -> dict[str, object]:
    """A line of starts.jsonl, which says how a run was started or continued."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": os.environ.get(COMMAND),  # as the user typed it; None: of a program of his own
        "directory": os.getcwd(),
        "ranks": dist.get_world_size(),
        "load": config.checkpoint.load,
        "versions": {
            "python": platform.python_version(),
            "moe-parallel": moe_parallel.__version__,
            **{name: metadata.version(name) for name in PACKAGES},
        },
        "platform": f"{sys.platform} {platform.machine()}",
    }


def write_run_files(folder: Path, config: Config, tokenizer: Tokenizer) -> None:
    """Write config.yaml and tokenizer/ into a run folder, on this process. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", _run_again(config))
    tokenizer.save(folder / "tokenizer")


def stored_files(folder: Path, config: Config) -> dict[str, str | Path]:
    """The small files that every checkpoint of a run folder contains, see `copy_files`."""
    return {"config.yaml": _run_again(config), "tokenizer": folder / "tokenizer"}


def _run_again(config: Config) -> str:
    """The configuration without --load and its flags, so that a run from it starts anew."""
    checkpoint = replace(
        config.checkpoint,
        load=None,
        finetune=False,
        override_opt_param_scheduler=False,
        override_data=False,
    )
    return replace(config, checkpoint=checkpoint).to_yaml()


def fingerprint(config: Config, vocab_size: int, tokenizer: Tokenizer | None) -> dict[str, object]:
    """The facts that a checkpoint must share with a configuration and a tokenizer."""
    named = {} if tokenizer is None else {TOKENIZER: tokenizer.fingerprint}
    return _fingerprint(config, vocab_size) | named


def _fingerprint(config: Config, vocab_size: int) -> dict[str, object]:
    """The facts, by flag, that a checkpoint must share with a configuration to be loaded.

    Defaults are resolved, so a size compares equal however it was given. Settings that change
    neither the shape nor the meaning of a weight are left out: loss weights, capacity, the backend.
    See `weights` of `config.option.option`.
    """
    model, selection = config.model, config.selection
    facts: dict[str, object] = {
        "--expert-selection": selection.system,
        "--num-layers": model.num_layers,
        "--hidden-size": model.hidden_size,
        "--num-attention-heads": model.num_attention_heads,
        "--num-query-groups": model.query_groups,
        "--kv-channels": model.head_width,
        "--qk-layernorm": model.qk_layernorm,
        "--qk-layernorm-all-heads": model.qk_layernorm_all_heads,
        "--add-qkv-bias": model.add_qkv_bias,
        "--ffn-hidden-size": model.ffn_hidden_size,
        "--norm-epsilon": model.norm_epsilon,
        "--rotary-base": model.rotary_base,
        "--use-rope-scaling": model.use_rope_scaling,
        "--rope-scaling-factor": model.rope_scaling_factor,
        "--untie-embeddings-and-output-weights": model.untie_embeddings_and_output_weights,
        "--vocab-size": vocab_size,
        "--num-experts": config.moe.num_experts,
    }
    if config.moe.num_experts is None:
        return facts
    facts["--moe-layer-freq"] = [int(moe) for moe in config.moe_layers]
    for each in options(type(selection)):
        if each.weights:
            facts[each.flag] = getattr(selection, each.name)
    if selection.depends_on_init_std:
        facts["--init-method-std"] = model.init_method_std
    facts[selection.width_flag] = config.expert_width
    return facts


def _states(config: Config) -> dict[str, object]:
    """By flag, the options that decide which numbers move after a step."""
    return {
        o.flag: getattr(section, o.name)
        for section in (config.selection, config.optimizer)
        for o in options(type(section))
        if o.state
    }
