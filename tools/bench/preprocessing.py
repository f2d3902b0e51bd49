"""Tokenize the same text with this project's script and with Megatron-LM's, in turns.

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    python tools/bench/preprocessing.py --megatron-lm Megatron-LM --json preprocessing.json

Both scripts get the same JSON lines, the same byte-level BPE and the same number of workers. Their
datasets are compared byte by byte. The speed is in MB of text per CPU second of all processes of a
script, after its start, which a run on a few documents measures. The text is that of Python's own
modules, or --input. Exit codes: 0 done, whatever was measured; 2 a wrong flag, or a script that
failed, with its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moe_parallel.data.corpus import DOMAINS, python_corpus
from moe_parallel.data.tokenizer import train_byte_bpe
from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_positive, last_line
from tools.bench.about import ROOT, about
from tools.bench.preprocessors import Cost, Preprocessor, TextRun, same_bytes, table

SCRIPT = Path("tools") / "preprocess_data.py"  # in both projects
FEW = 20  # documents, which take no time: such a run measures the start
SAME = ["--json-keys", "text", "--append-eod"]
_VALID_FRACTION = 0.04  # of the default corpus, whose training side is tokenized


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--megatron-lm", type=Path, required=True, metavar="FOLDER",
        help="a clone of Megatron-LM, with the tag of its version checked out")  # fmt: skip
    add("--input", type=Path, metavar="FILE",
        help="JSON lines with the key text (default: Python's own modules)")  # fmt: skip
    add("--vocab-size", type=int, default=16384, metavar="N",
        help="tokens of the byte-level BPE to train first (default: %(default)s)")  # fmt: skip
    add("--workers", type=int, nargs="+", default=[1, 2], metavar="N",
        help="numbers of worker processes (default: 1 2)")  # fmt: skip
    add("--turns", type=int, default=3, metavar="N",
        help="runs of each script with each number of workers (default: %(default)s)")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the samples too")
    return tool.run(arguments, lambda own: work(arguments, own))


def work(arguments: list[str], own: argparse.Namespace) -> int:
    check_positive(own, "vocab-size", "turns")
    if min(own.workers) < 1:
        raise InputError(f"--workers has {min(own.workers)}: it must be at least 1")
    theirs = own.megatron_lm / SCRIPT
    if not theirs.is_file():
        raise InputError(
            f"--megatron-lm {own.megatron_lm} has no {SCRIPT}: clone Megatron-LM there"
        )
    facts = about("preprocessing.py", arguments)
    print(f"{facts['command']}   ({facts['date']})\nmachine   {facts['machine']}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        text, few = write_text(Path(folder), own.input)
        tokenizer = Path(folder) / "tokenizer"
        train_byte_bpe(map(_text_of, _lines(text)), own.vocab_size).save(tokenizer)
        contenders = [
            Preprocessor("this project", ROOT, ["--tokenizer-model", str(tokenizer)]),
            Preprocessor(
                "Megatron-LM", own.megatron_lm.resolve(),
                ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)],
            ),
        ]  # fmt: skip
        runs = [
            run
            for turn in range(own.turns)
            for workers in own.workers
            # Each is the first in every second turn.
            for run in measure(contenders[:: -1 if turn % 2 else 1], text, few, workers)
        ]
        facts["text_bytes"] = text.stat().st_size
    print(table(contenders, runs, facts["text_bytes"]))
    if own.json is not None:
        own.json.write_text(json.dumps({"about": facts, "runs": [*map(_fields, runs)]}, indent=1))
    return 0


def write_text(folder: Path, given: Path | None) -> tuple[Path, Path]:
    """The JSON lines that are tokenized, and the first few of them in a file of their own."""
    text, few = folder / "text.jsonl", folder / "few.jsonl"
    if given is None:
        corpus = python_corpus(_VALID_FRACTION)
        records = (text for domain in DOMAINS for text in corpus[domain, "train"])
        lines = [json.dumps({"text": record}) + "\n" for record in records]
    else:
        lines = _lines(given)
    text.write_text("".join(lines), encoding="utf-8")
    few.write_text("".join(islice(lines, FEW)), encoding="utf-8")
    return text, few


def measure(contenders: list[Preprocessor], text: Path, few: Path, workers: int) -> list[TextRun]:
    """One run of each contender. Says so if they write different bytes."""
    runs, written = [], []
    for contender in contenders:
        prefix = text.parent / f"{contender.name.replace(' ', '_')}_{workers}"
        start = run_script(contender, few, prefix.with_name(f"{prefix.name}_few"), workers)
        whole = run_script(contender, text, prefix, workers)
        runs.append(TextRun(contender.name, workers, whole, start))
        written.append(prefix)
        print(f"  {contender.name}, workers {workers}: {whole.cpu_seconds:.1f} CPU s", flush=True)
    if not same_bytes(*written):
        print(f"  workers {workers}: the datasets of the two scripts DIFFER")
    return runs


def run_script(contender: Preprocessor, text: Path, prefix: Path, workers: int) -> Cost:
    """What a run of a script costs. Datasets of an earlier turn are deleted first."""
    for file in prefix.parent.glob(f"{prefix.name}_text_document*"):
        file.unlink()
    flags = ["--input", str(text), "--output-prefix", str(prefix), "--workers", str(workers)]
    output = prefix.with_suffix(".log")
    before, begun = _cpu_seconds(), time.monotonic()
    with output.open("wb") as log:
        code = subprocess.run(
            [sys.executable, str(contender.folder / SCRIPT), *contender.flags, *SAME, *flags],
            stdout=log, stderr=subprocess.STDOUT, cwd=contender.folder,
            # Each imports its own packages first.
            env={**os.environ, "PYTHONPATH": str(contender.folder)},
        ).returncode  # fmt: skip
    cost = Cost(_cpu_seconds() - before, time.monotonic() - begun)
    if code != 0:
        reason = last_line(output.read_text(errors="replace"), f"exit code {code}")
        raise InputError(f"{contender.name} failed: {reason}")
    return cost


def _cpu_seconds() -> float:
    """Of all processes that this one started and that ended, and of their own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _lines(file: Path) -> list[str]:
    with file.open(encoding="utf-8") as lines:
        return list(lines)


def _text_of(line: str) -> str:
    try:
        return str(json.loads(line)["text"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"--input has a line that is no record with a text: {line[:60]}") from None


def _fields(run: TextRun) -> dict[str, object]:
    return {**vars(run), "whole": vars(run.whole), "start": vars(run.start)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
