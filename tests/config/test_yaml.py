"""YAML files: the same values as flags, a round trip, and every kind of wrong file."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_parallel.config import (
    Config,
    make_config,
    parse_command_line,
    read_command_line,
    read_yaml,
)
from moe_parallel.config.config import common_options, selection_options
from moe_parallel.config.option import Option
from moe_parallel.errors import InputError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.yaml"


def parse(file: Path, text: str, *flags: str) -> Config:
    file.write_text(text, encoding="utf-8")
    return parse_command_line(["--config", str(file), *flags])


def message_of(file: Path, text: str, *flags: str) -> str:
    with pytest.raises(InputError) as caught:
        parse(file, text, *flags)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 500
    return message


def random_value(option: Option, rng: random.Random) -> Any:
    if option.optional and rng.random() < 0.2:
        return None
    word = rng.choice(["a", "run 1", "true", "null", "12", "1e3", "0.5", "a~", "é/ü", "a: b", "#x"])
    if option.many and option.kind is int:
        return tuple(rng.choice([0, -7, 2**40]) for _ in range(rng.randint(1, 4)))
    if option.many:
        return tuple(rng.choice([word, "x", "0.3"]) for _ in range(rng.randint(1, 4)))
    if option.choices:
        return rng.choice(option.choices)
    if option.kind is bool:
        return rng.random() < 0.5
    if option.kind is int:
        return rng.choice([0, 1, -7, rng.randint(0, 10**6), 2**40])
    if option.kind is float:
        return rng.choice([0.0, 1.0, 2e-4, 1.28e-5, 1e-300, 1e300, rng.random(), -rng.random()])
    return word


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("system", ["topk", "aoe"])
def test_what_is_written_is_read_back(file: Path, system: str, seed: int) -> None:
    rng = random.Random(seed)
    options = common_options() | selection_options()[system]
    raw = {
        name: list(value) if isinstance(value := random_value(option, rng), tuple) else value
        for name, option in options.items()
        if rng.random() < 0.8
    }
    config = make_config({"expert_selection": system, **raw})
    for name, value in raw.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert {k: v for _, part in config.values() for k, v in part.items()}[name] == expected
    assert parse(file, config.to_yaml()) == config


def test_what_is_written_names_every_option_in_its_section() -> None:
    text = make_config({"expert_selection": "aoe"}).to_yaml()
    keys = yaml.safe_load(text)
    expected = {**common_options(), **selection_options()["aoe"]}
    assert set(keys) == {name.replace("_", "-") for name in expected} | {"expert-selection"}
    sections = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    assert sections == [section for section, _ in Config().values()]


@pytest.mark.parametrize(
    ("yaml_text", "flags"),
    [
        ("num-layers: 6", ["--num-layers", "6"]),
        ("num_layers: 6", ["--num-layers", "6"]),
        ("num-layers: '6'", ["--num-layers", "6"]),
        ("lr: 2e-4", ["--lr", "2e-4"]),
        ("bf16: yes", ["--bf16", "true"]),
        ("tensorboard: 'false'", ["--tensorboard", "false"]),
        ("moe-layer-freq: 2", ["--moe-layer-freq", "2"]),
        ("moe-layer-freq: '[0]+[1]*3'", ["--moe-layer-freq", "[0]+[1]*3"]),
        ("num-query-groups:", []),
        ("seed: &n 6\nnum-layers: *n", ["--seed", "6", "--num-layers", "6"]),
        ("save: 12", ["--save", "12"]),
        ("data-path: 0.3 a 0.7 b", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("data-path: [0.3, a, 0.7, b]", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("data-path: [with space]", ["--data-path", "with space"]),
        (
            "expert-selection: aoe\naoe-low-rank-size: 8",
            ["--aoe-low-rank-size", "8", "--expert-selection", "aoe"],
        ),
        ("# nothing\n---\n", []),
        ("\ufeffnum-layers: 6", ["--num-layers", "6"]),
    ],
)
def test_keys_are_flags(file: Path, yaml_text: str, flags: list[str]) -> None:
    assert parse(file, yaml_text) == parse_command_line(flags)


def test_flags_win_over_the_file(file: Path) -> None:
    config = parse(file, "num-layers: 6\nhidden-size: 64\nbf16: true", "--num-layers", "7")
    assert (config.model.num_layers, config.model.hidden_size) == (7, 64)
    assert parse(file, "bf16: true", "--bf16", "false").training.bf16 is False
    assert parse(file, "num-experts: 4", "--num-experts", "none").moe.num_experts is None


AOE = "expert-selection: aoe\nnum-experts: 4\naoe-low-rank-size: 8\nmoe-router-topk: 3\nseed: 7"


def warnings_of(file: Path, text: str, *flags: str) -> tuple[Config, list[str]]:
    file.write_text(text, encoding="utf-8")
    line = read_command_line(["--config", str(file), *flags])
    return line.over(read_yaml(file), "FILE")


def test_flags_can_change_the_selection_of_the_file(file: Path) -> None:
    config, warnings = warnings_of(file, AOE, "--expert-selection", "topk")
    assert config == parse_command_line(
        ["--num-experts", "4", "--moe-router-topk", "3", "--seed", "7"]
    )
    assert warnings == ["--expert-selection topk leaves out --aoe-low-rank-size 8, which FILE has"]
    assert parse(file, AOE, "--expert-selection", "topk") == config


def test_flags_can_make_the_model_of_the_file_dense(file: Path) -> None:
    text = AOE + "\nexpert-model-parallel-size: 2\nmoe-ffn-hidden-size: 64\nmoe-backend: reference"
    config, (warning,) = warnings_of(file, text, "--num-experts", "none")
    assert config == parse_command_line(["--seed", "7", "--moe-backend", "reference"])
    assert warning == (
        "--num-experts none leaves out --expert-selection aoe, --aoe-low-rank-size 8, "
        "--moe-router-topk 3, --expert-model-parallel-size 2, --moe-ffn-hidden-size 64, which "
        "FILE has"
    )


def test_what_goes_with_both_selections_stays(file: Path) -> None:
    text = "expert-selection: top_p\nmoe-top-p: 0.3\nmoe-shared-expert-intermediate-size: 8"
    config, warnings = warnings_of(file, text, "--expert-selection", "aoe_top_p")
    assert (config.selection.moe_top_p, warnings) == (0.3, [])
    config, warnings = warnings_of(file, text, "--expert-selection", "top_p")
    assert (config.selection.moe_top_p, warnings) == (0.3, [])


@pytest.mark.parametrize(
    ("text", "flags", "start"),
    [
        # On the command line, and in a file that contradicts itself, it is still an error.
        (
            AOE,
            ["topk", "--aoe-low-rank-size", "8"],
            "--aoe-low-rank-size is 8, but it belongs to .* aoe",
        ),
        (
            AOE + "\nmoe-top-p: 0.3",
            ["topk"],
            "--moe-top-p is 0.3, but it belongs to .* topk is selected",
        ),
        (AOE + "\naoe-rank: 8", ["topk"], "--aoe-rank is not a flag"),
        (AOE, ["tokp"], "--expert-selection is 'tokp': it takes one of"),
        ("expert-selection: [aoe]", ["tokp"], "--expert-selection is 'tokp': it takes one of"),
    ],
)
def test_what_does_not_go_with_either_selection(
    file: Path, text: str, flags: list[str], start: str
) -> None:
    with pytest.raises(InputError, match=f"^{start}"):
        parse(file, text, "--expert-selection", *flags)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "num-layrs: 3",
            "--num-layrs is not a flag or YAML key of this program: did you mean --num-l",
        ),
        *(
            (f"{key}: 2", f"--{key} belongs to the command line: .* start with --{key} 2$")
            for key in ("nproc-per-node", "max-restarts", "config", "help")
        ),
        ("null: 2", "--None is not a flag"),
        ('"two\\nlines": 2', "'--two.nlines' is not a flag"),
        (
            "moe-z-loss-coeff: 1\nexpert-selection: aoe",
            "--moe-z-loss-coeff is 1, but it belongs to .* topk",
        ),
        ("expert-selection: [aoe]", "--expert-selection is .'aoe'.: it takes one of"),
        ("bf16:", "--bf16 needs a value: give it true or false"),
        ("bf16: 1", "--bf16 is 1: it takes true or false"),
        ("num-layers: 4.0", "--num-layers is 4.0: it takes an integer"),
        ("num-layers: {a: 4}", "--num-layers is {'a': 4}: it takes an integer"),
        ("lr: -.inf", "--lr is -inf: it takes a finite number"),
        (
            "split: [9, 1, 0]",
            "--split is .9, 1, 0.: it takes text of one line, in YAML best in quo",
        ),
        ("save: |\n  two\n  lines", "--save is .*: it takes text"),
        ("data-path: 5", "--data-path is 5: it takes words on one line, or a YAML list of them"),
        ("data-path: [a, [b]]", "--data-path is .'b'.: it takes words"),
        ("data-path: [null]", "--data-path is None: it takes words"),
    ],
)
def test_wrong_keys_and_values(file: Path, text: str, start: str) -> None:
    with pytest.raises(InputError, match=f"^{start}"):
        parse(file, text)
    assert message_of(file, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "must hold lines of the form `key: value`"),
        ("a: b: c", "is not valid YAML: mapping values are not allowed here"),
        ("moe-layer-freq: [0]+[1]*3", "is not valid YAML: .*line 1"),
        ("a: \x01", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML: could not determine"),
        ("---\na: 1\n---\nb: 1", "is not valid YAML: expected a single document"),
        ("a: &a [*a]", "is not valid YAML: an alias stands for a list or a map: write it out"),
        ("x: &x {a: 1}\n<<: [*x, *x]", "is not valid YAML: an alias stands for"),
        ("num-layers: 4\nnum_layers: 4", "gives num-layers twice: keep one of the lines"),
    ],
)
def test_wrong_files(file: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"^--config .*file.yaml {problem}"):
        parse(file, text)
    assert message_of(file, text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def message_for(path: Path | str) -> str:
        with pytest.raises(InputError) as caught:
            parse_command_line(["--config", str(path)])
        assert str(caught.value).isprintable()
        return str(caught.value)

    absent = tmp_path / "absent.yaml"
    assert message_for(absent) == f"--config {absent} does not exist: name a YAML file"
    assert message_for(tmp_path) == f"--config {tmp_path} cannot be read: Is a directory"
    reader, writer = os.pipe()
    os.write(writer, b"seed: 6")
    os.close(writer)
    given = f"/dev/fd/{reader}"
    assert parse_command_line(["--config", given]).training.seed == 6
    assert message_for(given).endswith(
        "cannot be read: it is a pipe, and was read before: name a file"
    )
    os.close(reader)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("save: caf\u00e9".encode("latin-1"))
    assert message_for(latin) == f"--config {latin} is not UTF-8 text (byte 9)"
    assert "does not exist" in message_for(tmp_path / "two\nlines")
    assert "cannot be read" in message_for(tmp_path / ("x" * 5000))
    assert "cannot be read" in message_for("")
