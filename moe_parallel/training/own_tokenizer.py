"""The tokenizer of a run that continues: the run's own copy, stored in each of its checkpoints.

The path in config.yaml is where the tokenizer was when the run started. A different tokenizer of
the same size may be there now, with which the weights are meaningless, or the run folder has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_parallel.config import DataConfig, read_yaml
from moe_parallel.config.message import flag
from moe_parallel.data.tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from moe_parallel.errors import InputError
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.checkpoint.record import read_record

# The key of the tokenizer's fingerprint in a checkpoint's record.
TOKENIZER = "tokenizer"

_FLAGS = ("tokenizer_type", "tokenizer_model")


@dataclass(frozen=True)
class OwnTokenizer:
    """The tokenizer that a checkpoint was trained with.

    Attributes:
        tokenizer: the copy in the checkpoint.
        warning: what the user should know of the tokenizer in the configuration; None: nothing.
    """

    tokenizer: Tokenizer
    warning: str | None


def own_tokenizer(
    load: str | None, data: DataConfig, *, given: bool = False
) -> OwnTokenizer | None:
    """The tokenizer of the checkpoint that `--load` names.

    Args:
        load: a run or one of its checkpoints; None: there is none.
        data: the configuration, which may name a tokenizer.
        given: whether the command line itself names it, not only a file.

    Returns None without --load, and for a checkpoint without a tokenizer.

    Raises:
        InputError: the copy is damaged or was exchanged; or the command line, or a configuration
            that differs from the checkpoint's config.yaml, names a different tokenizer.
    """
    if load is None:
        return None
    checkpoint = find_checkpoint(Path(load))
    folder = checkpoint / "tokenizer"
    recorded = read_record(checkpoint)["fingerprint"].get(TOKENIZER)
    if recorded is None and not folder.is_dir():
        return None
    try:
        tokenizer = load_tokenizer(folder)
    except InputError as error:
        raise InputError(f"--load {checkpoint}: its tokenizer cannot be used: {error}") from None
    if recorded not in (None, tokenizer.fingerprint):
        raise InputError(
            f"--load {checkpoint}: {folder} is not the tokenizer that the weights were trained "
            "with (damaged, or another one): restore it, or load another checkpoint"
        )
    newly = given or not _as_recorded(data, checkpoint)
    return OwnTokenizer(tokenizer, _compare(tokenizer, data, checkpoint, newly))


def names_tokenizer(arguments: Sequence[str]) -> bool:
    """Whether a command line itself names the tokenizer, not only a file."""
    words = {word.split("=")[0].replace("_", "-") for word in arguments}
    return not words.isdisjoint(map(flag, _FLAGS))


def _as_recorded(data: DataConfig, checkpoint: Path) -> bool:
    """Whether the tokenizer is the one that the checkpoint's config.yaml names."""
    file = checkpoint / "config.yaml"
    recorded = read_yaml(file) if file.is_file() else {}
    default = DataConfig()
    return all(getattr(data, name) == recorded.get(name, getattr(default, name)) for name in _FLAGS)


def _compare(own: Tokenizer, data: DataConfig, checkpoint: Path, newly: bool) -> str | None:
    """A warning, or an InputError, if the configuration names a different tokenizer."""
    default = DataConfig()
    named = [f"{flag(name)} {value}" for name in _FLAGS
             if (value := getattr(data, name)) != getattr(default, name)]  # fmt: skip
    local = data.tokenizer_model is None or Path(data.tokenizer_model).exists()
    if not named or not (newly or local):  # none is named, or it is no longer there
        return None
    try:
        other = build_tokenizer(data.tokenizer_type, data.tokenizer_model, data.vocab_size)
    except InputError:
        if newly:
            raise
        return None
    if other.fingerprint == own.fingerprint:
        return None
    if newly:
        raise InputError(
            f"{' '.join(named)} is not the tokenizer that --load {checkpoint} was trained with: "
            "remove it to use the run's own copy"
        )
    return (
        f"{' '.join(named)} is not the tokenizer any more that this run was trained with: its own "
        f"copy, {checkpoint}/tokenizer, is used"
    )
