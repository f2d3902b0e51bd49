"""The tokenizer and the data of a run."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parallel.config import Config, parse_command_line
from moe_parallel.data.corpus import DefaultCorpus
from moe_parallel.data.tokenizer import FastTokenizer, load_tokenizer, train_byte_bpe
from moe_parallel.errors import InputError
from moe_parallel.training.text import (
    open_text,
    token_counts,
)
from tests.data.small_text import small_bpe, words
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, flags, pretrain_here, small_data


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DefaultCorpus:
    """An embedded corpus that has only the tokenizer, with 300 tokens."""
    made = DefaultCorpus(tmp_path)
    small_bpe().save(made.tokenizer_folder)
    monkeypatch.setattr(
        "moe_parallel.training.text.prepare_default_corpus", lambda folder, vocab_size: made
    )
    return made


@pytest.mark.usefixtures("corpus")
def test_a_vocabulary_that_comes_out_smaller_is_told() -> None:
    text = open_text(parse_command_line(["--vocab-size", "1000000"]))
    assert text.vocab_size == 300
    (warning,) = text.warnings
    assert warning.startswith("--vocab-size 1000000: ") and "300 tokens" in warning
    assert open_text(parse_command_line(["--vocab-size", "300"])).warnings == ()


SAMPLES = [{"tokens": torch.tensor(ids)} for ids in ([0, 1, 1], [1, 3, 0], [2, 2, 2], [1, 0, 3])]


def test_all_samples_are_counted():
    assert token_counts(SAMPLES, vocab_size=5) == [3, 4, 3, 2, 0]


def other_bpe() -> FastTokenizer:
    """A tokenizer with as many tokens as small_bpe, but different ones."""
    other = train_byte_bpe([words(400, seed)[::-1] for seed in range(4)], 300)
    assert other.vocab_size == small_bpe().vocab_size
    assert other.fingerprint != small_bpe().fingerprint
    return other


def losses(printed: str) -> list[str]:
    return re.findall(r"iteration +[34]/4 \| loss (\S+)", printed)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """A run that stopped at iteration 2, its options, and the losses of the next iterations."""
    folder = tmp_path_factory.mktemp("trained")
    options = SMALL | AOE | small_data(folder)
    whole = options | {"save": folder / "whole"}
    half = options | {"save": folder / "half", "exit_interval": 2}
    [[(_, printed), (code, _)]] = run_distributed(1, pretrain_here, [whole, half])
    assert code == 0 and len(losses(printed)) == 2
    return folder, options, losses(printed)


@pytest.fixture
def moved(
    trained: tuple[Path, dict[str, Any], list[str]], tmp_path: Path
) -> tuple[Path, dict[str, Any], list[str]]:
    """That run in another folder, its options with the data elsewhere, and the losses."""
    folder, options, expected = trained
    shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.copytree(folder / "half", tmp_path / "run")
    shutil.rmtree(tmp_path / "elsewhere" / "half")
    options = options | {
        "data_path": [tmp_path / "elsewhere" / path.name for path in options["data_path"]],
        "data_cache_path": tmp_path / "cache",
    }
    return tmp_path / "run", options, expected


@pytest.mark.full
def test_a_run_goes_on_with_its_own_tokenizer(
    moved: tuple[Path, dict[str, Any], list[str]],
) -> None:
    run, options, expected = moved
    old = Path(options["tokenizer_model"])
    kept = old.with_name("kept")
    old.rename(kept)
    try:
        assert open_text(config_of(options | {"load": run})).warnings == ()  # no file is there
        goes_on = options | {"load": run, "save": run}
        del goes_on["tokenizer_model"]
        again = options | {"load": run / "iter_0000002", "save": run.with_name("again")}
        shutil.copytree(run, run.with_name("remade"))
        other_bpe().save(old)
        remade = options | {"load": run.with_name("remade"), "save": run.with_name("remade")}
        [ends] = run_distributed(1, pretrain_here, [goes_on, again, remade])
        assert [losses(printed) for _, printed in ends] == [expected] * 3
        for name in ("run", "again", "remade"):
            copies = [run.with_name(name), *run.with_name(name).glob("iter_*")]
            for copy in copies:
                assert load_tokenizer(copy / "tokenizer").fingerprint == small_bpe().fingerprint
    finally:
        shutil.rmtree(old, ignore_errors=True)
        kept.rename(old)


def config_of(options: dict[str, Any]) -> Config:
    return parse_command_line(flags(options))


def test_another_tokenizer_on_the_command_line_is_refused(
    moved: tuple[Path, dict[str, Any], list[str]],
) -> None:
    run, options, _ = moved
    own = options | {"load": run}
    assert open_text(config_of(own)).warnings == ()
    other_bpe().save(run.with_name("other"))
    small_bpe().save(run.with_name("same"))
    same = own | {"tokenizer_model": run.with_name("same")}
    assert open_text(config_of(same)).warnings == ()
    other = own | {"tokenizer_model": run.with_name("other")}
    with pytest.raises(InputError, match=r"other is not the tokenizer that --load .* was trai"):
        open_text(config_of(other))
    with pytest.raises(InputError, match=r"no/such"):
        open_text(config_of(own | {"tokenizer_model": "no/such"}))


def test_a_tokenizer_that_was_exchanged_or_damaged_is_refused(
    moved: tuple[Path, dict[str, Any], list[str]],
) -> None:
    run, options, _ = moved
    folder = run / "iter_0000002" / "tokenizer"
    size = (folder / "tokenizer.json").stat().st_size
    other_bpe().save(folder)
    with (folder / "tokenizer.json").open("a") as stream:  # padded to the original size
        stream.write(" " * max(0, size - (folder / "tokenizer.json").stat().st_size))
    with pytest.raises(InputError, match=rf"--load {run}/iter_0000002: ") as told:
        open_text(config_of(options | {"load": run}))
    assert "\n" not in str(told.value)
    (folder / "tokenizer.json").write_text("[" * size)
    with pytest.raises(InputError, match=r"its tokenizer cannot be used: .*not a tokenizer\.json"):
        open_text(config_of(options | {"load": run}))
