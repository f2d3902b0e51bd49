"""Invalid values: on the command line or in a file, each gives a one-line error."""

import re
from pathlib import Path

import pytest

from moe_parallel.config import parse_command_line, validate
from moe_parallel.config.config import common_options, selection_options
from moe_parallel.errors import InputError

TEXT = "it takes text of one line"


def message_of(*arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        validate(parse_command_line(arguments), world_size=1)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    return message


EXPERTS = ["--num-experts", "4"]

#: The words of a command line, and the beginning of its one-line error.
WORDS = {
    "digits of another script": (["--seed", "٤"], "--seed is '٤': it takes an integer"),
    "a boolean": (["--num-layers", "true"], "--num-layers is 'true': it takes an integer"),
    "too large for a float": (["--lr", "9" * 400], "--lr is '999.*: it takes a finite number"),
    "a learning rate that fp32 lacks": (["--min-lr", "1e-300"], "--min-lr is 1e-300, too small"),
    "thousands of digits": (["--seed", "9" * 5000], "--seed is '999.*: it takes an integer"),
    "an empty folder": (["--save", ""], f"--save is '': {TEXT}"),
    "a NUL in a path": (["--load", "a\0b"], f"--load is 'a.x00b': {TEXT}"),
    "a path that turns around": (["--save", "a\u202eb"], f"--save is 'a.u202eb': {TEXT}"),
    "a path too long": (["--save", "a" * 5000], f"--save is 'aaa.*: {TEXT}"),
    "a home that no shell has found": (
        ["--save=~/runs"],
        "--save is '~/runs', but ~ is not expanded",
    ),
    "a split that overflows": (["--split", "1e308,1e308"], "--split is '1e308,1e308': it takes"),
    "three dashes": (
        ["---seed", "4"],
        "---seed is not a flag of this program: did you mean --seed",
    ),
    "a short flag": (["-n", "4"], "unrecognized arguments: -n 4"),
    "a value for help": (
        ["--help=@"],
        "--help @: no section, system or flag has this: --help lists",
    ),
    "weights of nothing": (["--finetune"], "--finetune needs a checkpoint: set --load"),
    "a schedule of nothing": (
        ["--override-opt-param-scheduler"],
        "--override-opt-param-scheduler needs a checkpoint: set --load",
    ),
    "a start and a warm-up": (
        [*EXPERTS, "--load=x", "--finetune", "--moe-dense-warmup-percent=10"],
        "--finetune starts from the weights of --load as they are, and --moe-dense-warmup-percent",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    words, start = WORDS[name]
    assert re.match(start, message_of(*words)), message_of(*words)


FLOATS = [
    (system, each.flag)
    for system, known in [("topk", common_options()), *selection_options().items()]
    for each in known.values()
    if each.kind is float
]


@pytest.mark.parametrize("value", ["1e39", "1e-39"])
@pytest.mark.parametrize(("system", "flag"), FLOATS)
def test_no_number_is_beyond_fp32(system: str, flag: str, value: str) -> None:
    message = message_of("--expert-selection", system, *EXPERTS, f"{flag}={value}")
    assert re.match(f"{flag} is {re.escape(repr(float(value)))}", message)


INVALID = "is not valid YAML"

#: The content of a file, and the end of its one-line error.
FILES: dict[str, tuple[str | bytes, str]] = {
    "nested in JSON": ('{"a":' * 100_000 + "1" + "}" * 100_000, f"{INVALID}: it is nested too"),
    "nested by indentation": ("\n".join(" " * n + "a:" for n in range(1000)), INVALID),
    "thousands of digits": ("seed: " + "9" * 5000, "--seed is '999.*: it takes an integer"),
    "an octal number": ("seed: 0o10", "--seed is '0o10': it takes an integer"),
    "a boolean for an integer": ("seed: yes", "--seed is True: it takes an integer"),
    "a date": ("save: 2026-01-01", f"--save is datetime.*: {TEXT}"),
    "half a character": ('save: "\\ud800"', f"--save is '.ud800': {TEXT}"),
    "an unknown tag": ("seed: !mine 4", f"{INVALID}: could not determine a constructor"),
    "dashes in a key": ("--seed: 1", "----seed is not a flag .*: did you mean --seed"),
    "a key given twice by an escape": ('seed: 4\n"s\\x65ed": 4', "gives seed twice"),
    "a key given twice by a merge": ("<<: {seed: 4}\nseed: 5", "gives seed twice"),
    "a NUL": (b"seed: 4\0", f"{INVALID}: unacceptable character"),
    "far too much": (b"#" * (2 << 20), "is larger than 1 MiB: name a YAML file"),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    content, start = FILES[name]
    file = tmp_path / "file.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = message_of("--config", str(file))
    assert re.match(start, message.removeprefix(f"--config {file} ")), message


def test_numbers_of_a_file_are_those_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("seed: 010\nlr: 1e-3\nmin-lr: .5e-4\nweight-decay: 1\nclip-grad: +1.\n")
    flags = "--seed=010 --lr=1e-3 --min-lr=.5e-4 --weight-decay=1 --clip-grad=+1.".split()
    config = parse_command_line(["--config", str(file)])
    assert config == parse_command_line(flags)
    assert (config.training.seed, config.optimizer.min_lr) == (10, 5e-5)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("/dev/zero", "cannot be read: it is not a regular file"),
        ("/dev", "cannot be read: Is a directory"),
        ("\udcff.yaml", "does not exist"),
    ],
)
def test_paths_that_are_no_files(path: str, problem: str) -> None:
    assert problem in message_of("--config", path)


def test_twenty_thousand_keys(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("\n".join(f"k{n}: 1" for n in range(20_000)))
    assert message_of("--config", str(file)).startswith("--k0 is not a flag or YAML key")
