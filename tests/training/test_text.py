from pathlib import Path

import pytest
import torch

from moe_parallel.config import parse_command_line
from moe_parallel.data.corpus import DefaultCorpus
from moe_parallel.data.tokenizer import train_byte_bpe
from moe_parallel.errors import InputError
from moe_parallel.training.text import OwnTokenizer, open_text, token_counts
from tests.data.small_text import small_bpe, words, write_texts


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


@pytest.mark.usefixtures("corpus")
def test_a_corpus_of_another_tokenizer_than_the_runs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_command_line(["--vocab-size", "300"])
    for tokenizer, fits in ((small_bpe(), True), (train_byte_bpe(["other text"], 300), False)):
        own = OwnTokenizer(tokenizer, None)
        monkeypatch.setattr(
            "moe_parallel.training.text.own_tokenizer", lambda *of, own=own, **how: own
        )
        if fits:
            assert open_text(config).tokenizer.fingerprint == tokenizer.fingerprint
            continue
        with pytest.raises(InputError, match="has another tokenizer than --load was trained with"):
            open_text(config)


@pytest.mark.parametrize("flag", [None, "--reset-attention-mask", "--reset-position-ids"])
def test_positions_restart_where_a_flag_asks_for_documents(
    tmp_path: Path, flag: str | None
) -> None:
    tokenizer = small_bpe()
    tokenizer.save(tmp_path / "tokenizer")
    write_texts(tmp_path / "text", [words(5, seed) for seed in range(40)], tokenizer)
    named = {"data-path": "text", "tokenizer-model": "tokenizer", "data-cache-path": "cache"}
    line = [word for name, path in named.items() for word in (f"--{name}", str(tmp_path / path))]
    line += ["--split", "9,1,0", "--seq-length", "64", *filter(None, [flag])]
    config = parse_command_line(line)
    datasets = open_text(config).datasets(config)
    for sides in (datasets.train_domains, datasets.valid):
        (dataset,) = sides.values()
        assert (dataset[0]["position_ids"].max() < 63) == (flag is not None)


SAMPLES = [{"tokens": torch.tensor(ids)} for ids in ([0, 1, 1], [1, 3, 0], [2, 2, 2], [1, 0, 3])]


def test_all_samples_are_counted():
    assert token_counts(SAMPLES, vocab_size=5) == [3, 4, 3, 2, 0]


def test_beyond_the_limit_samples_are_left_out_evenly():
    assert token_counts(SAMPLES, vocab_size=5, limit=6) == [1, 2, 3, 0, 0]
