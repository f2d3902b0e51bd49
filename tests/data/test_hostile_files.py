"""Files from elsewhere would run code, or have no end, if they were trusted: one line is printed.

The files of a cache, which can be rebuilt, are in test_datasets.py; folders with code for
transformers are in test_tokenizer.py and test_similarity.py.
"""

import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_parallel.config import parse_command_line
from moe_parallel.data.indexed import check_indexed
from moe_parallel.data.tokenizer import build_tokenizer, load_tokenizer
from moe_parallel.errors import InputError
from tests.data.hostile import Payload
from tests.data.small_text import small_bpe, words, write_texts
from tools.preprocess_data import main as preprocess_data


def pickled(marker: Path) -> bytes:
    return pickle.dumps(Payload(marker))


def torch_file(marker: Path) -> bytes:
    path = marker.with_name("file.pt")
    torch.save(Payload(marker), path)
    return path.read_bytes()


def tagged_yaml(marker: Path) -> bytes:
    return f"!!python/object/apply:os.mkdir ['{marker}']\n".encode()


def python(marker: Path) -> bytes:
    return f"__import__('os').mkdir({str(marker)!r})\n".encode()


def deep(marker: Path) -> bytes:
    return b"[" * 5_000 + b"]" * 5_000


def endless(marker: Path) -> Path:
    return Path("/dev/zero")


def a_pipe(marker: Path) -> Path:
    os.mkfifo(marker.with_name("pipe"))
    return marker.with_name("pipe")


def reading_data(folder: Path) -> object:
    return check_indexed(str(folder / "data"), 300)


def preprocessing(folder: Path, text: str = "in.jsonl") -> object:
    line = ["--input", folder / text, "--output-prefix", folder / "out"]
    line += ["--tokenizer-model", folder / "tokenizer"]
    return preprocess_data([str(word) for word in line])


preprocessing_packed = partial(preprocessing, text="packed")


def opening(folder: Path) -> object:
    return load_tokenizer(folder / "tokenizer")


def opening_sentencepiece(folder: Path) -> object:
    pytest.importorskip("sentencepiece", reason="pip install sentencepiece")
    return build_tokenizer("SentencePieceTokenizer", str(folder / "tokenizer" / "tokenizer.model"))


def configuring(folder: Path) -> object:
    return parse_command_line(["--config", str(folder / "config.yaml")])


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("data.idx", reading_data),
    ("data.bin", reading_data),
    ("data.manifest.json", reading_data),
    ("in.jsonl", preprocessing),
    ("packed/in.jsonl.gz", preprocessing_packed),
    ("packed/in.jsonl.zst", preprocessing_packed),
    ("packed/in.parquet", preprocessing_packed),
    ("tokenizer/tokenizer.json", preprocessing),
    ("tokenizer/tokenizer.json", opening),
    ("tokenizer/tokenizer_config.json", opening),
    ("tokenizer/tokenizer.model", opening_sentencepiece),
    ("config.yaml", configuring),
]


@pytest.mark.parametrize(
    ("name", "read", "hostile"),
    [
        (*reader, hostile)
        for reader in READERS
        for hostile in (pickled, torch_file, tagged_yaml, python, deep, endless, a_pipe)
        # A pipe or a device that --input names is read as long as it gives text.
        if reader[0] != "in.jsonl" or hostile not in (endless, a_pipe)
    ],
)
def test_a_hostile_file_runs_nothing_and_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    read: Callable[[Path], Any],
    hostile: Callable[[Path], bytes | Path],
) -> None:
    marker = tmp_path / "marker"
    bpe = small_bpe()
    write_texts(tmp_path / "data", [words(30, seed) for seed in range(4)], bpe)
    bpe.save(tmp_path / "tokenizer")
    (tmp_path / "in.jsonl").write_text('{"text": "the expert"}\n')
    (tmp_path / "packed").mkdir()
    content = hostile(marker)
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(content)
    try:
        code = read(tmp_path)
    except InputError as error:  # every program turns it into one line and exit code 2
        assert "\n" not in str(error)
    else:
        assert code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not marker.exists()


def test_the_payload_works(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickled(marker))
    os.rmdir(marker)
    torch.load(marker.with_name("file.pt"), weights_only=False) if torch_file(marker) else None
    os.rmdir(marker)
    eval(python(marker))
    assert marker.exists()
