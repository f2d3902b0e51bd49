"""What a finished run tells: held-out bits per byte beside those of simple models, and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from moe_parallel.analysis.run_figure import plot_run
from moe_parallel.config import Config, selection_name
from moe_parallel.data.datasets import Datasets, texts
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.evaluation.baselines import held_out_baselines
from moe_parallel.evaluation.perplexity import Perplexity


def compare_with_baselines(
    perplexities: Mapping[str, Perplexity], datasets: Datasets, tokenizer: Tokenizer
) -> dict[str, dict[str, float]]:
    """Bits per byte by text and model: {domain or "all": {"model", "unigram", "trigram", "xz -9"}}.

    The byte models are trained on the training text of every domain; xz sees the held-out text
    alone, as the model did not see it either.
    """
    train = [text for side in datasets.train_domains.values() for text in texts(side, tokenizer)]
    valid = {name: list(texts(side, tokenizer)) for name, side in datasets.valid.items()}
    table = {
        name: {"model": perplexities[name].bits_per_byte} | held_out_baselines(train, held_out)
        for name, held_out in valid.items()
    }
    if len(table) > 1:
        everything = Perplexity(
            sum(each.nats for each in perplexities.values()),
            sum(each.tokens for each in perplexities.values()),
            sum(each.num_bytes for each in perplexities.values()),
        )
        held_out = [text for side in valid.values() for text in side]
        table["all"] = {"model": everything.bits_per_byte} | held_out_baselines(train, held_out)
    return table


def format_table(table: Mapping[str, Mapping[str, float]]) -> str:
    """The comparison as lines for a terminal."""
    columns = list(next(iter(table.values())))
    width = max(map(len, [*table, "bits per byte"]))
    head = f"{'bits per byte':<{width}}" + "".join(f"{column:>10}" for column in columns)
    rows = [
        f"{name:<{width}}" + "".join(f"{row[column]:>10.3f}" for column in columns)
        for name, row in table.items()
    ]
    return "\n".join([head, *rows])


def draw(config: Config, parameters: int) -> Path:
    """The figure of the run in --save."""
    assert config.checkpoint.save is not None
    model = config.model
    line = f"{selection_name(config.selection)}, {parameters / 1e6:.1f}M parameters, "
    line += f"{model.num_layers} layers x {model.hidden_size}"
    if config.moe.num_experts is not None:
        line += f", top-{config.selection.moe_router_topk} of {config.moe.num_experts} experts"
    return plot_run(Path(config.checkpoint.save), model_line=line)
