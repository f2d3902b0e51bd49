"""The selections of a trained model on texts, written as an analysis folder."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from moe_parallel.analysis.routing import (
    ANALYSIS_MANIFEST,
    VIEW,
    AnalysisTotals,
    SelectionsFile,
    Specialization,
    View,
    specialization,
    tables_of,
    write_facts,
    write_tables,
)
from moe_parallel.analysis.selections import TextSelections
from moe_parallel.collective_errors import StorageError, agree, exchange, on_rank_0
from moe_parallel.config import Config
from moe_parallel.data.atomic_files import atomic_folder
from moe_parallel.data.sampler import evaluation_batches, sample_count
from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.evaluation.given_text import text_batches
from moe_parallel.evaluation.selection_trace import (
    batches_of_rank,
    expert_layers,
    on_all_layers,
    selections_of,
)
from moe_parallel.model.forward import Batch
from moe_parallel.training.checkpoint.folder import find_checkpoint
from moe_parallel.training.standalone import open_model, vocab_size_of
from moe_parallel.training.text import open_text, open_tokenizer

#: The name of the folder in a run.
ANALYSIS_FOLDER = "analysis"

Receive = Callable[[TextSelections], None]


@dataclass(frozen=True)
class AnalysisOptions:
    """What is analyzed, and what is written."""

    files: dict[str, Path]  # by the name of the text; {}: the held-out text of the run
    samples: int | None  # the most sequences of each text
    permutations: int
    view_tokens: int  # of each text, to be read in the report
    selections: bool  # write selections.parquet
    command: str  # that was given


def named_files(words: Sequence[str]) -> dict[str, Path]:
    """The files of --text by name: NAME=FILE, or FILE, named by its stem. Raises InputError."""
    found: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        path = Path(file if equals else word)
        name = name if equals else path.stem
        if not name:
            raise InputError(f"--text {word}: the name before = is empty")
        if name in found:
            raise InputError(f"--text {word}: another text is called {name}: give NAME=FILE")
        if not path.is_file():
            raise InputError(f"--text {path}: there is no such file")
        found[name] = path
    return found


def output_folder(given: Path | None, load: Path) -> Path:
    """--output, or `analysis` in the run. Raises InputError if it holds something else."""
    folder = given
    if folder is None:
        checkpoint = find_checkpoint(load)
        run = checkpoint.parent if checkpoint.name.startswith("iter_") else checkpoint
        folder = run / ANALYSIS_FOLDER
    if folder.exists() and not (folder / ANALYSIS_MANIFEST).is_file():
        raise InputError(f"--output {folder} exists and is not an analysis: name another folder")
    return folder


def analyze(
    config: Config,
    on_ranks: Config,
    options: AnalysisOptions,
    folder: Path,
    advance: Callable[[int], object] = lambda tokens: None,
) -> list[str]:
    """Analyze the model of --load and write `folder`; an earlier analysis there is replaced.

    Collective over all ranks; torch.distributed is initialized, and its groups are not. Rank 0
    writes.

    Args:
        config: of the run, on one process.
        on_ranks: of the same model on these ranks, which compute it in fp32.
        options: what is analyzed, and what is written.
        folder: to write.
        advance: called on rank 0 with the tokens of each batch.

    Returns lines for the user. Raises InputError.
    """
    tokenizer, vocab_size, texts = _texts(config, options)
    in_fp32 = replace(on_ranks, training=replace(on_ranks.training, bf16=False))
    # The model's vocabulary may be larger than the tokenizer's.
    pieces = [tokenizer.detokenize([item]) for item in range(min(vocab_size, tokenizer.vocab_size))]
    pieces += [""] * (vocab_size - len(pieces))
    tests: list[Specialization] = []
    with open_model(in_fp32) as model, _disk_of(folder), ExitStack() as stack:
        numbers = exchange([layer.layer_number for layer in expert_layers(model.chunk)])
        layers = sorted(set(chain.from_iterable(numbers)))
        totals = AnalysisTotals(layers, config.num_experts, pieces)
        receivers: list[Receive] = []
        writing = _written(folder, config, options, totals, tests)
        on_rank_0(lambda: receivers.extend(stack.enter_context(writing)))

        def receive(batches: Sequence[TextSelections]) -> None:
            for selections in batches:
                for receiver in receivers:
                    receiver(selections)
                advance(len(selections))

        for name, batches in texts:
            for part in selections_of(model, batches_of_rank(batches, model.groups.dp), name):
                found = on_all_layers(part, model.groups)
                on_rank_0(partial(receive, found))
        on_rank_0(stack.close)
    return _lines(totals, tests)


@contextmanager
def _disk_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise InputError(
            f"--output {folder} cannot be written ({error}): name a folder on a disk with room"
        ) from error


@contextmanager
def _written(
    folder: Path,
    config: Config,
    options: AnalysisOptions,
    totals: AnalysisTotals,
    tests: list[Specialization],
) -> Iterator[list[Receive]]:
    """The functions that take the selections. At the end the folder is complete, and `tests` has
    the results of the test of specialization."""
    view = View(options.view_tokens)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as writing:
        with ExitStack() as stack:
            receivers: list[Receive] = [totals.add, view.add]
            if options.selections:
                receivers.append(stack.enter_context(SelectionsFile(writing)).add)
            yield receivers
        tests += _write(writing, config, options, totals, view)
        earlier = None
        if folder.exists():
            earlier = tempfile.mkdtemp(prefix=f".{folder.name}.earlier-", dir=folder.parent)
            os.replace(folder, earlier)
    if earlier is not None:
        shutil.rmtree(earlier, ignore_errors=True)


def _texts(
    config: Config, options: AnalysisOptions
) -> tuple[Tokenizer, int, Iterator[tuple[str, Iterable[Batch]]]]:
    """(tokenizer, size of the model's vocabulary, the batches of each text)."""
    training = config.training
    size, length = training.micro_batch_size, training.seq_length
    if options.files:
        tokenizer = agree(lambda: open_tokenizer(config))
        files = options.files.items()
        given = (
            (name, text_batches(path, tokenizer, length, size, options.samples))
            for name, path in files
        )
        return tokenizer, vocab_size_of(config), given
    text = agree(lambda: open_text(config))
    datasets = text.datasets(config).valid
    if not datasets:
        raise InputError(
            f"--split {config.data.split} leaves no validation text: name texts by --text"
        )
    held_out = (
        (
            domain,
            evaluation_batches(
                dataset,
                samples=options.samples,
                sizes=[size] * math.ceil(sample_count(dataset, options.samples) / size),
                data_parallel_rank=0,
                data_parallel_size=1,
            ),
        )
        for domain, dataset in datasets.items()
    )
    return text.tokenizer, text.vocab_size, held_out


def _write(
    folder: Path, config: Config, options: AnalysisOptions, totals: AnalysisTotals, view: View
) -> list[Specialization]:
    """Write everything but the selections; the result of the test of specialization."""
    if not totals.tokens:
        raise InputError("the texts have no tokens: name others by --text")
    tests = specialization(totals.blocks, totals.layers, options.permutations, config.training.seed)
    pieces = [totals.pieces_V[item] for item in view.columns["token"]]
    write_tables(folder, tables_of(totals, tests) | {VIEW: {**view.columns, "piece": pieces}})
    facts = {
        "checkpoint": str(find_checkpoint(Path(config.checkpoint.load or ""))),
        "system": config.selection.system,
        "merged": config.selection.merges,
        "experts": totals.num_experts,
        "layers": list(totals.layers),
        "tokens": {name: text.tokens for name, text in totals.texts.items()},
        "sequences_of_a_block": totals.blocks.sequences,
        **asdict(options),
        "files": {name: str(path) for name, path in options.files.items()},
    }
    write_facts(folder, facts)
    return tests


def _lines(totals: AnalysisTotals, tests: Sequence[Specialization]) -> list[str]:
    lines = [
        f"{name}: {text.tokens:,} tokens, {text.mean_G(text.experts_G).mean():.3f} experts per "
        f"token, Ent_load {text.ent_load_G().mean():.3f}, "
        f"Ent_conf {text.mean_G(text.entropy_G).mean():.3f} nats"
        for name, text in totals.texts.items()
    ]
    if tests:
        mean = tests[-1]
        lines.append(
            f"I(expert; text) {mean.mutual_information:.4f} nats, mean over layers; by chance "
            f"{mean.by_chance:.4f}, p = {mean.p:.3g}"
        )
    return lines
