"""The report of a finished run: held-out bits per byte, also of simple models, and the figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from moe_parallel.config import Config, FixedNumber
from moe_parallel.data.datasets import Datasets, texts
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.evaluation.baselines import (
    first_bytes,
    held_out_bits_per_byte,
    joined,
    train_trigram,
)
from moe_parallel.evaluation.text_loss import TextLoss

# Far more than a trigram model of bytes can use; read and counted in a minute or two.
TRAIN_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ByteComparison:
    """Bits per byte by text and model.

    Attributes:
        rows: {domain or "all": {"model", "unigram", "trigram", "xz -9"}}; "all" if there are
            several domains.
        note: a remark on the numbers; may be empty.
    """

    rows: Mapping[str, Mapping[str, float]]
    note: str


def compare_with_baselines(
    text_losses: Mapping[str, TextLoss],
    datasets: Datasets,
    tokenizer: Tokenizer,
    train_bytes: int = TRAIN_BYTES,
) -> ByteComparison:
    """The model, a unigram and a trigram model of bytes, and xz, on held-out text.

    The byte models are trained on the training text of every domain. If that is more than
    `train_bytes` bytes of UTF-8 in all, they are trained on the first documents only, with as many
    bytes from each domain. The other ranks wait meanwhile, so this must not grow with the corpus.
    xz sees only the held-out text, which the model did not see either. Memory: the held-out text,
    twice.
    """
    train = [texts(side, tokenizer) for side in datasets.train_domains.values()]
    share = max(1, train_bytes // len(train))
    trigram = train_trigram(chain.from_iterable(first_bytes(side, share) for side in train))
    left_out = any(next(side, None) is not None for side in train)

    ours = dict(text_losses)
    held_out = {name: joined(texts(side, tokenizer)) for name, side in datasets.valid.items()}
    if len(held_out) > 1:
        held_out["all"] = np.concatenate(list(held_out.values()))
        ours["all"] = TextLoss(
            sum(each.nats for each in text_losses.values()),
            sum(each.tokens for each in text_losses.values()),
            sum(each.num_bytes for each in text_losses.values()),
        )
    rows = {
        name: {"model": ours[name].bits_per_byte} | held_out_bits_per_byte(trigram, data)
        for name, data in held_out.items()
    }
    of_each = " of each domain" if len(train) > 1 else ""
    note = f"unigram, trigram: of the first {_mebibytes(share)} of training text{of_each}"
    return ByteComparison(rows, note if left_out else "")


def format_table(comparison: ByteComparison) -> str:
    """The comparison as lines for a terminal, the note last."""
    table = comparison.rows
    columns = list(next(iter(table.values())))
    width = max(map(len, [*table, "bits per byte"]))
    head = f"{'bits per byte':<{width}}" + "".join(f"{column:>10}" for column in columns)
    rows = [
        f"{name:<{width}}" + "".join(f"{row[column]:>10.3f}" for column in columns)
        for name, row in table.items()
    ]
    return "\n".join([head, *rows, *filter(None, [comparison.note])])


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


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.4g} MiB"
