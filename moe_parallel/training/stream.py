"""The stream of training samples, in which the position of a checkpoint counts.

A checkpoint records it as `stream`:

made_of   by flag, what its order depends on. The files of --data-path count by their content, so
          they may be moved
first     the samples that the run had consumed before it began; 0 except after --override-data
ends      the numbers of samples that it was built for: at the first start, and by each extension
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.collective_errors import agree
from moe_parallel.config import Config
from moe_parallel.data.datasets import Source
from moe_parallel.data.indexed import check_indexed, read_manifest
from moe_parallel.data.sealed import file_digest
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import read_record


@dataclass(frozen=True)
class Stream:
    """See the top of this file."""

    made_of: Mapping[str, Any]
    first: int
    ends: tuple[int, ...]


def open_stream(config: Config, sources: Sequence[Source]) -> tuple[Stream, list[str]]:
    """The stream of a run that starts, or of the run that continues from --load, and warnings.

    A continued run extends its stream if it needs more samples. Upcycling of another run's dense
    model continues in its stream if the data are the same, and else begins one. Collective.

    Raises InputError for other data without --override-data.
    """
    training, checkpoint = config.training, config.checkpoint
    made_of = agree(lambda: _made_of(config, sources))
    size = training.global_batch_size
    fresh = Stream(made_of, 0, (training.train_iters * size,))
    if checkpoint.load is None:
        return fresh, []
    load = Path(checkpoint.load)
    record = agree(lambda: read_record(find_checkpoint(load)))
    done, before = record["training"], record.get("stream")
    if before is None:
        unknown = (
            f"--load {load} does not record what its training samples were drawn from: whether the "
            "data, --split and --seed are the same is not checked, and the version that saved it "
            "held out other documents of --data-path"
        )
        # a conversion has used none
        return fresh, [unknown] if done["consumed_samples"] and not checkpoint.finetune else []
    differing = {
        flag: f"{flag} is {_shown(known)} in the checkpoint and {_shown(made_of[flag])} here"
        for flag, known in before["made_of"].items()
        if flag in made_of and not _equal(known, made_of[flag])
    }
    warnings = []
    files, before_files = (
        {each["idx"] for each in data["--data-path"]} for data in (made_of, before["made_of"])
    )
    if "--split" in differing and files & before_files:
        warnings = [
            f"--load {load}: {differing['--split']}: text that is held out here may be text that "
            "it was trained on"
        ]
    if training.skip_train or checkpoint.finetune:
        return fresh, warnings
    rest = max(0, training.train_iters - done["iteration"]) * size
    upcycles = config.moe.moe_use_upcycling and record["fingerprint"].get("--num-experts") is None
    if differing and not (checkpoint.override_data or upcycles):
        raise InputError(
            f"--load {load}: {', '.join(differing.values())}; its position would be one in other "
            "samples: use the values of its config.yaml, or go on with the first sample of the "
            "data given here by --override-data"
        )
    if differing:
        return Stream(made_of, done["consumed_samples"], (max(1, rest),)), warnings
    ends, end = tuple(before["ends"]), done["consumed_samples"] - before["first"] + rest
    return Stream(made_of, before["first"], (*ends, end) if end > ends[-1] else ends), []


def _made_of(config: Config, sources: Sequence[Source]) -> dict[str, Any]:
    weights = [source.weight for source in sources if source.weight is not None]
    return {
        "--seed": config.training.seed,
        "--seq-length": config.training.seq_length,
        "--split": sources[0].split,
        "--data-path": [
            {
                "name": Path(source.train_prefix).name,
                "weight": None if source.weight is None else source.weight / sum(weights),
                **_digests(source.train_prefix),
            }
            for source in sources
        ],
    }


def _digests(prefix: str) -> dict[str, str | None]:
    """Of the index, and of the token ids if there is a manifest."""
    manifest = read_manifest(prefix)
    if manifest is not None:
        return {"idx": manifest.idx_sha256, "bin": manifest.bin_sha256}
    try:
        return {"idx": file_digest(Path(f"{prefix}.idx")), "bin": None}
    except OSError:
        check_indexed(prefix, vocab_size=1)  # says what is wrong
        raise


def _equal(before: Any, here: Any) -> bool:
    if isinstance(before, str) and isinstance(here, str):
        with suppress(ValueError, ZeroDivisionError):  # a record may say anything
            return _shares(before) == _shares(here)
    if not isinstance(here, list):
        return bool(before == here)
    return len(before) == len(here) and all(
        (a["weight"], a["idx"]) == (b["weight"], b["idx"])
        and (a["bin"] == b["bin"] or None in (a["bin"], b["bin"]))
        for a, b in zip(before, here, strict=True)
    )


def _shares(split: str) -> list[float]:
    parts = [*map(float, split.split(",")), 0, 0][:3]
    return [part / sum(parts) for part in parts]


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    return " ".join(
        f"{'' if each['weight'] is None else format(each['weight'], 'g') + ' '}{each['name']} "
        f"({(each['bin'] or each['idx'])[:12]})"
        for each in value
    )
