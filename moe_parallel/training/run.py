"""The folder of a run: what may be written there, and the checkpoints in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from moe_parallel.config import Config, selection_name
from moe_parallel.config.option import flag, options
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.parallel import Groups
from moe_parallel.training.checkpoint import Checkpointer
from moe_parallel.training.checkpoint_agreement import on_rank_0, one_line


def open_checkpoints(
    config: Config, tokenizer: Tokenizer, vocab_size: int, groups: Groups
) -> Checkpointer:
    """The checkpoints of the run in --save; its folder, config.yaml and tokenizer/. Collective.

    Without --save nothing is written, and only loading makes sense. Raises InputError if the
    folder holds another run, which would be written over.
    """
    folder = Path(config.checkpoint.save or ".")
    # Run again from it and the run starts anew, whether this one was resumed or not.
    again = replace(config, checkpoint=replace(config.checkpoint, load=None)).to_yaml()
    checkpoints = Checkpointer(
        folder,
        keep_last=config.checkpoint.keep_last,
        fingerprint=_fingerprint(config, vocab_size),
        layout={
            name: group.size()
            for name, group in (
                ("tp", groups.tp), ("pp", groups.pp), ("dp", groups.dp),
                ("ep", groups.ep), ("etp", groups.etp),
            )
        } | {"virtual_stages": config.virtual_stages or 1},
        files={"config.yaml": again, "tokenizer": folder / "tokenizer"},
    )  # fmt: skip
    if config.checkpoint.save is None:
        return checkpoints
    latest = checkpoints.latest()
    loads_here = (
        config.checkpoint.load is not None
        and folder.resolve() in (Path(config.checkpoint.load) / "_").resolve().parents
    )
    if latest is not None and not loads_here:
        raise InputError(
            f"--save {folder} holds a run already ({latest.name}): go on with it by --load "
            f"{folder}, or name another folder"
        )

    def begin() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(again)
            tokenizer.save(folder / "tokenizer")
        except OSError as error:
            raise InputError(
                f"--save {folder} cannot be written ({one_line(error)}): "
                "name a folder on a disk with room"
            ) from error

    dist.barrier()  # every rank has looked before anything is written
    on_rank_0(begin)
    return checkpoints


def _fingerprint(config: Config, vocab_size: int) -> dict[str, object]:
    """What a checkpoint must share with a configuration to be loaded, by flag."""
    facts: dict[str, object] = {"--expert-selection": selection_name(config.selection)}
    # These change neither the shape nor the meaning of a weight.
    free = {"norm_epsilon", "init_method_std", "moe_backend"} | {
        o.name
        for part in (config.moe, config.selection)
        for o in options(type(part))
        if o.name.endswith("_coeff") or "capacity" in o.name or "drop" in o.name
    }
    for part in (config.model, config.moe, config.selection):
        facts |= {
            flag(o.name): getattr(part, o.name) for o in options(type(part)) if o.name not in free
        }
    facts["--vocab-size"] = vocab_size
    return facts
