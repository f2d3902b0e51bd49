"""The stream of training, held-out text, blends and splits."""

import errno
import pickle
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

from moe_parallel.config import Config, DataConfig, validate
from moe_parallel.data import datasets as datasets_module
from moe_parallel.data.datasets import (
    Datasets,
    Source,
    blend_sources,
    build_datasets,
    held_out_documents,
    texts,
)
from moe_parallel.data.indexed import write_indexed
from moe_parallel.data.sampler import evaluation_batches
from moe_parallel.data.sealed import file_digest, write_sealed
from moe_parallel.data.tokenizer import Tokenizer, train_byte_bpe
from moe_parallel.errors import InputError
from tests.data.hostile import Payload
from tests.data.small_text import (
    NUMBERS,
    numbered_sources,
    small_bpe,
    words,
    write_numbers,
    write_texts,
)
from tests.distributed import run_distributed

LENGTH = 8


def build(folder: Path, *, samples: int = 30, seed: int = 1, length: int = LENGTH) -> Datasets:
    """The datasets of the numbered domains, which are first written to `folder`."""
    return build_from(numbered_sources(folder), folder, samples, seed, length)


def build_from(
    sources: list[Source],
    folder: Path,
    samples: int = 30,
    seed: int = 1,
    length: int = LENGTH,
    tokenizer: Tokenizer = NUMBERS,
    **more: Any,
) -> Datasets:
    return build_datasets(
        sources,
        tokenizer=tokenizer,
        seq_length=length,
        train_samples=samples,
        seed=seed,
        cache_folder=folder / "cache",
        **more,
    )


def stream(datasets: Datasets, count: int) -> torch.Tensor:
    """The first labels of the training stream, [count, LENGTH]."""
    return torch.stack([datasets.train[i]["labels"] for i in range(count)])


def test_a_sample_is_a_run_of_text_and_its_continuation(tmp_path: Path) -> None:
    datasets = build(tmp_path)
    for i in range(30):
        sample = datasets.train[i]
        tokens, labels = sample["tokens"], sample["labels"]
        assert tokens.shape == labels.shape == (LENGTH,) and tokens.dtype == torch.int64
        assert torch.equal(tokens[1:], labels[:-1])
        # The numbers are consecutive, except where one document ends and another begins.
        assert (labels - tokens != 1).sum() <= 2
        assert sample["loss_mask"].tolist() == [1.0] * LENGTH
        assert sample["position_ids"].tolist() == list(range(LENGTH))


def test_positions_begin_again_after_the_end_of_a_document(tmp_path: Path) -> None:
    tokenizer = small_bpe()
    write_texts(tmp_path / "text", [words(5, seed) for seed in range(40)], tokenizer)
    text = blend_sources([str(tmp_path / "text")], "9,1,0")
    datasets = build_from(text, tmp_path, 4, 1, 64, tokenizer, restart_positions=True)
    for i in range(4):
        sample, position = datasets.train[i], 0
        assert (sample["tokens"] == tokenizer.eod).sum() > 1
        for token, found in zip(sample["tokens"], sample["position_ids"], strict=True):
            assert found == position
            position = 0 if token == tokenizer.eod else position + 1


def test_domains_are_blended_in_proportion_to_their_tokens(tmp_path: Path) -> None:
    datasets = build(tmp_path, samples=90)
    assert shares_of(datasets, 90) == [60, 30]


def shares_of(datasets: Datasets, samples: int) -> list[int]:
    """How many of the first samples each domain gave."""
    joined = datasets.train.dataset  # of all domains, one after another
    ends = joined.cumulative_sizes
    chosen = datasets.train.indices[:samples]
    return np.bincount(np.searchsorted(ends, chosen, side="right")).tolist()


def test_given_weights_count_instead(tmp_path: Path) -> None:
    a = write_numbers(tmp_path / "a", [50] * 10)
    b = write_numbers(tmp_path / "b", [50] * 10)
    datasets = build_from(blend_sources(["1", a, "3", b], "8,1,1"), tmp_path, samples=80)
    assert shares_of(datasets, 80) == [20, 60]
    assert set(datasets.valid) == {"a", "b"}


def test_the_stream_depends_on_the_seed_and_on_nothing_else(tmp_path: Path) -> None:
    one = stream(build(tmp_path / "one"), 30)
    assert torch.equal(one, stream(build(tmp_path / "one"), 30)), "from the cached indices"
    assert torch.equal(one, stream(build(tmp_path / "two"), 30)), "in another folder"
    assert not torch.equal(one, stream(build(tmp_path / "one", seed=2), 30))


@pytest.mark.parametrize("ends", [(98, 150, 420), (10, 40, 90), (250, 260, 300)])
def test_an_extended_stream_keeps_its_samples(tmp_path: Path, ends: tuple[int, ...]) -> None:
    one = blend_sources([write_numbers(tmp_path / "mine", [20] * 40)], "1,0,0")
    for sources in (one, numbered_sources(tmp_path)):
        before = torch.empty(0, LENGTH)
        for number, end in enumerate(ends):
            datasets = build_from(sources, tmp_path, samples=end, extends=ends[:number])
            found = stream(datasets, end)
            assert torch.equal(found[: len(before)], before)
            before = found


@pytest.mark.parametrize(("ends", "times"), [((90, 150), (1, 2)), ((60, 99, 190), (1, 2))])
def test_an_extended_stream_reads_evenly(
    tmp_path: Path, ends: tuple[int, ...], times: tuple[int, int]
) -> None:
    """An epoch has 99 samples. Its last tokens are left out if they do not fill a sample."""
    sources = blend_sources([write_numbers(tmp_path / "mine", [20] * 40)], "1,0,0")
    datasets = build_from(sources, tmp_path, samples=ends[-1], extends=ends[:-1])
    counts = torch.bincount(stream(datasets, ends[-1]).flatten(), minlength=800)
    assert (counts < times[0]).sum() <= 2 * LENGTH and counts.max() == times[1]


def test_held_out_samples_depend_on_the_data_alone(tmp_path: Path) -> None:
    one, two = build(tmp_path, seed=1), build(tmp_path, seed=2, samples=900)
    for domain, valid in one.valid.items():
        assert len(valid) == len(two.valid[domain]) > 3
        for i in range(len(valid)):
            assert torch.equal(valid[i]["labels"], two.valid[domain][i]["labels"])


@pytest.mark.parametrize("length", [1, 7, 8, 12, 60, 64])
def test_validation_asks_for_every_token_once(tmp_path: Path, length: int) -> None:
    datasets = build(tmp_path, length=length)
    for domain, count in (("a", 61), ("b", 37)):
        labels: list[int] = []
        valid = datasets.valid[domain]
        for batch in evaluation_batches(
            valid, sizes=[1] * len(valid), data_parallel_rank=0, data_parallel_size=1
        ):
            labels += batch["labels"][batch["loss_mask"] > 0].tolist()
        assert len(labels) == count - 1, "all but the very first, which nothing precedes"
        assert len(set(labels)) == count - 1 and set(labels) <= set(range(count))


def test_reading_the_filled_up_sample_first_spoils_no_mask(tmp_path: Path) -> None:
    valid = build(tmp_path).valid["a"]
    masks = [valid[i]["loss_mask"] for i in range(len(valid))]
    short = min(range(len(valid)), key=lambda i: masks[i].sum())
    assert masks[short].sum() == 60 % LENGTH
    again = build(tmp_path).valid["a"]
    assert torch.equal(again[short]["loss_mask"], masks[short])
    for i in range(len(valid)):
        assert torch.equal(again[i]["loss_mask"], masks[i])


def test_a_split_draws_documents_whatever_their_order_and_the_seed(tmp_path: Path) -> None:
    bpe = small_bpe()
    documents = [f"{'code' if i < 90 else 'license'} {i}: {words(5, i)}" for i in range(100)]
    prefix = write_texts(tmp_path / "mine", documents, bpe)
    held_out = []
    for seed in (1, 2):
        datasets = build_from(blend_sources([prefix], "8,1,1"), tmp_path, 10, seed, 16, bpe)
        train = list(texts(datasets.train_domains["mine"], bpe))
        held_out.append(list(texts(datasets.valid["mine"], bpe)))
        assert len(train) == 80 and not set(train) & set(held_out[-1])
        assert train == [each for each in documents if each in train], "the order of the file"
    assert held_out[0] == held_out[1] and len(held_out[0]) == 10
    assert sum(text.startswith("code") for text in held_out[0]) >= 7


def test_new_text_under_an_old_name_is_not_read_by_old_indices(tmp_path: Path) -> None:
    first, _ = numbered_sources(tmp_path)
    for lengths in ([33] * 9, [9] * 33):  # the same tokens, split into other documents
        write_numbers(Path(first.train_prefix), lengths)
        datasets = build_from([first], tmp_path, samples=37)
        breaks = {lengths[0] * i for i in range(len(lengths) + 1)}
        for i in range(37):
            sample = datasets.train[i]
            jumps = sample["labels"] - sample["tokens"] != 1
            assert set(sample["labels"][jumps].tolist()) <= breaks


def labels_read(sources: list[Source], folder: Path) -> tuple[list[list[int]], int]:
    """Labels of the training stream and of each domain's first held-out sample, and the number of
    ranges of token ids that this rank found by a scan and wrote, with a delay."""
    notes = []

    def slowly(path: Path, content: dict[str, object]) -> None:
        time.sleep(0.2)
        write_sealed(path, content)
        notes.append(path)

    with mock.patch("moe_parallel.data.indexed.write_sealed", slowly):
        datasets = build_from(sources, folder)
    valid = [datasets.valid[domain][0]["labels"].tolist() for domain in ("a", "b")]
    return [*stream(datasets, 30).tolist(), *valid], len(notes)


def test_ranks_of_a_process_group_see_what_one_process_sees(tmp_path: Path) -> None:
    sources = numbered_sources(tmp_path)
    together = run_distributed(2, labels_read, sources, tmp_path / "together")
    alone, _ = labels_read(sources, tmp_path / "alone")
    assert together == [(alone, 4), (alone, 0)], "rank 0 alone scans"


@pytest.mark.parametrize(
    ("prefixes", "split", "length", "message"),
    [
        (["mine"], "1,1,0", 50, r"--seq-length 50 is longer than the data.* 51 .* has 50;"),
        (["mine"], "99,1,0", 8, r"validation part of \S*mine is empty.*--split"),
        (["missing"], "9,1,0", 8, r"missing\.idx is missing"),
    ],
)
def test_data_that_do_not_suffice_are_told(
    tmp_path: Path, prefixes: list[str], split: str, length: int, message: str
) -> None:
    write_numbers(tmp_path / "mine", [25] * 4)
    with pytest.raises(InputError, match=message) as caught:
        sources = blend_sources([str(tmp_path / name) for name in prefixes], split)
        build_from(sources, tmp_path, 10, length=length)
    assert "\n" not in str(caught.value)


def test_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    bpe = small_bpe()
    prefix = write_texts(tmp_path / "mine", [words(50, i) for i in range(9)], bpe)
    other = train_byte_bpe([words(400, 99)], bpe.vocab_size)
    assert other.vocab_size == bpe.vocab_size
    source = blend_sources([prefix], "8,1,0")
    build_from(source, tmp_path, tokenizer=bpe)
    with pytest.raises(InputError, match="with another tokenizer than"):
        build_from(source, tmp_path, tokenizer=other)
    with pytest.raises(InputError, match="mine was written with another tokenizer than this run's"):
        list(held_out_documents(source[0], other))


def test_data_cut_for_another_length_are_refused(tmp_path: Path) -> None:
    documents = [list(range(16))] * 10
    write_indexed(tmp_path / "mine", documents, NUMBERS.vocab_size, seq_length=LENGTH)
    source = blend_sources([str(tmp_path / "mine")], "8,1,0")
    build_from(source, tmp_path)
    with pytest.raises(InputError, match=r"for --seq-length 8, and --seq-length is 4.*order it"):
        build_from(source, tmp_path, length=4)


def test_data_without_a_manifest_are_taken_with_a_warning(tmp_path: Path) -> None:
    source = blend_sources([write_numbers(tmp_path / "mine", [50] * 10)], "8,1,0")
    known = build_from(source, tmp_path)
    assert known.warnings == ()
    (tmp_path / "mine.manifest.json").unlink()
    unknown = build_from(source, tmp_path)
    assert torch.equal(stream(unknown, 30), stream(known, 30))
    assert len(unknown.warnings) == 1 and "no manifest next to" in unknown.warnings[0]


def cache_of(folder: Path) -> Path:
    (found,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
    return found


def built_again(folder: Path, expected: torch.Tensor) -> None:
    """The stream is as expected, with one warning, and then whole."""
    again = build(folder)
    assert torch.equal(stream(again, 30), expected)
    assert len(again.warnings) == 1 and "damaged" in again.warnings[0]
    assert build(folder).warnings == ()


def test_indices_that_were_edited_are_built_again(tmp_path: Path) -> None:
    expected = stream(build(tmp_path), 30)
    for index in ("document_index", "sample_index", "shuffle_index"):
        for path in cache_of(tmp_path).glob(f"*{index}.npy"):
            np.save(path, np.load(path)[::-1])
        built_again(tmp_path, expected)
    for content in ("", "[" * 100_000, "{}", "[]"):
        (cache_of(tmp_path) / "complete.json").write_text(content)
        built_again(tmp_path, expected)
    (cache_of(tmp_path) / "more-shuffle_index.npy").write_bytes(b"")
    built_again(tmp_path, expected)
    # Half written, they have no record.
    (cache_of(tmp_path) / "complete.json").unlink()
    for path in cache_of(tmp_path).glob("*.npy"):
        path.write_bytes(b"torn")
    assert torch.equal(stream(build(tmp_path), 30), expected)
    # What a link points to is not deleted.
    cache = cache_of(tmp_path)
    moved = cache.rename(tmp_path / "moved")
    cache.symlink_to(moved)
    next(moved.glob("*shuffle_index.npy")).write_bytes(b"")
    built_again(tmp_path, expected)
    assert len(list(moved.iterdir())) == len(list(cache.iterdir()))


def test_a_pickle_in_place_of_an_index_runs_nothing(tmp_path: Path) -> None:
    expected, marker = stream(build(tmp_path), 30), tmp_path / "marker"
    objects = tmp_path / "objects.npy"
    np.save(objects, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    brackets = b"\x93NUMPY\x01\0" + (3000).to_bytes(2, "little") + b"(" * 2999 + b"\n"
    for hostile in (pickle.dumps(Payload(marker)), objects.read_bytes(), brackets):
        for path in cache_of(tmp_path).glob("*sample_index.npy"):
            path.write_bytes(hostile)
        # The record agrees with the files, as an attacker would write it.
        files = {path.name: file_digest(path) for path in cache_of(tmp_path).iterdir()}
        del files["complete.json"]
        write_sealed(cache_of(tmp_path) / "complete.json", {"files": files})
        built_again(tmp_path, expected)
        assert not marker.exists()
    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists(), "the payload works"


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(InputError, match=r"--data-cache-path \S*cache cannot be written"):
        build(tmp_path)
    (tmp_path / "cache").unlink()
    for error, reason in (
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (OSError("16 requested and 0 written"), "16 requested and 0"),
    ):
        monkeypatch.setattr(datasets_module, "GPTDataset", mock.Mock(side_effect=error))
        with pytest.raises(InputError, match=rf"--data-cache-path .* \({reason}") as caught:
            build(tmp_path)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.glob("cache/*/complete.json"))


SPLIT = "969,30,1"


def blend(*words: str) -> list[tuple[str, float | None, str]]:
    sources = blend_sources(words, SPLIT)
    assert all(s.valid_prefix == s.train_prefix and s.split == SPLIT for s in sources)
    return [(s.domain, s.weight, s.train_prefix) for s in sources]


def test_megatrons_blend_syntax() -> None:
    assert blend("data/web") == [("web", None, "data/web")]
    assert blend("a/web", "b/code") == [("web", None, "a/web"), ("code", None, "b/code")]
    assert blend("a", "b", "c") == [("a", None, "a"), ("b", None, "b"), ("c", None, "c")]
    assert blend("0.3", "a/web", "7e-1", "code") == [("web", 0.3, "a/web"), ("code", 0.7, "code")]
    assert blend("1", "a") == [("a", 1.0, "a")]
    assert blend("30") == [("30", None, "30")]
    names = [name for name, _, _ in blend("a/text", "b/text", "text_2", "c/text")]
    assert names == ["text", "text_2", "text_2_2", "text_3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"--data-path is empty"),
        (["0.5", "a", "b"], r"a weight or a prefix is missing"),
        (["a", "0.5"], r"the weight 'a' of 0\.5 is not a number above 0"),
        (["1", "a", "0", "b"], r"the weight '0' of b is not a number above 0"),
    ],
)
def test_wrong_weights_are_told(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        blend_sources(words, SPLIT)


@pytest.mark.parametrize(
    ("split", "plain", "shares"),
    [
        ("100", "100", [1, 0, 0]),
        ("99.5,.5", "99.5,0.5", [0.995, 0.005, 0]),
        ("3e2,1e2,0", "300,100,0", [0.75, 0.25, 0]),
        (" 9, +1 ", "9,1", [0.9, 0.1, 0]),
        ("1,1e-5", "1,0.00001", [1 / 1.00001, 1e-5 / 1.00001, 0]),
    ],
)
def test_megatron_reads_every_split_that_the_flag_takes(
    split: str, plain: str, shares: list[float]
) -> None:
    validate(Config(data=DataConfig(split=split)), world_size=1)
    (source,) = blend_sources(["a"], split)
    assert source == Source("a", None, "a", "a", plain)
    assert parse_and_normalize_split(plain) == pytest.approx(shares, rel=1e-12)


def test_the_documents_of_a_file_for_validation(tmp_path: Path) -> None:
    train, valid = (
        write_numbers(tmp_path / name, sizes) for name, sizes in (("t", [50]), ("v", [3, 1, 4]))
    )
    source = Source("domain", None, train, valid, None)
    assert list(held_out_documents(source, NUMBERS)) == [[0, 1, 2], [3], [4, 5, 6, 7]]


@pytest.mark.parametrize("split", ["8,2,0", "6,3,1", "1,1,0"])
def test_the_validation_part_of_a_file(tmp_path: Path, split: str) -> None:
    tokenizer = small_bpe()
    write_texts(tmp_path / "a", [words(30, seed) for seed in range(11)], tokenizer)
    sources = blend_sources([str(tmp_path / "a")], split)
    datasets = build_from(sources, tmp_path, 4, tokenizer=tokenizer)
    expected = list(texts(datasets.valid["a"], tokenizer))
    documents = held_out_documents(sources[0], tokenizer)
    assert [tokenizer.detokenize(each) for each in documents] == expected
    assert len(expected) > 1
