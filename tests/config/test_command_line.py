"""Flags: the interface that users' scripts depend on, the help, and every kind of wrong flag."""

import re
from pathlib import Path
from typing import Any

import pytest

from moe_parallel.config import Config, parse_command_line
from moe_parallel.config.config import common_options, expert_selection, selection_options
from moe_parallel.config.option import Option
from moe_parallel.config.parser import launching_flags
from moe_parallel.errors import InputError


def a_system_with(flag: str) -> str:
    """An expert-selection system that has the option; topk if every system has it."""
    by_system = selection_options()
    owners = [name for name, known in by_system.items() if flag in {o.flag for o in known.values()}]
    return owners[0] if owners else "topk"


def every_option() -> dict[str, Option]:
    options = {expert_selection().flag: expert_selection()}
    for known in (common_options(), *selection_options().values()):
        options |= {option.flag: option for option in known.values()}
    return options


def value_of(config: Config, flag: str) -> Any:
    name = flag.lstrip("-").replace("-", "_")
    return {name: value for _, part in config.values() for name, value in part.items()}[name]


def parse_one(flag: str, *words: str) -> Any:
    system = ["--expert-selection", a_system_with(flag)] if flag != "--expert-selection" else []
    return value_of(parse_command_line([*system, flag, *words]), flag)


def message_of(*arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_command_line(arguments)
    message = str(caught.value)
    assert message.isprintable() and len(message) < 400
    return message


#: Of each kind of option, some whose flags the scripts of users have; their values, by word.
KINDS: dict[type, tuple[str, dict[str, Any], list[str]]] = {
    int: ("--num-layers --seed --vocab-size", {"12": 12, "-3": -3}, ["1.5", "nan", ""]),
    float: (
        "--lr --moe-aux-loss-coeff --clip-grad",
        {"2e-4": 0.0002, "1": 1.0, ".5": 0.5, "1E3": 1000.0, "-0.5": -0.5},
        ["nan", "-inf", "1e999", "0.1.2", "abc", ""],
    ),
    bool: ("--bf16 --sequence-parallel", {"true": True, "False": False}, ["maybe", "1"]),
    str: ("--save --moe-layer-freq --split", {"my_run": "my_run"}, ["", "two\nlines", "nul\0"]),
    tuple: ("--data-path", {"one": ("one",), "0.3 a 0.7 b": ("0.3 a 0.7 b",)}, [""]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_each_kind(kind: type) -> None:
    flags, right, wrong = KINDS[kind]
    for flag in flags.split():
        for word, value in right.items():  # a negative number is a value; validate() rejects it
            assert parse_one(flag, word) == value and type(parse_one(flag, word)) is kind
        for word in wrong:
            with pytest.raises(InputError, match=f"^{flag} is .*: it takes "):
                parse_one(f"{flag}={word}")


def test_words_and_switches() -> None:
    assert parse_one("--data-path", "0.3", "a", "0.7", "b") == ("0.3", "a", "0.7", "b")
    assert parse_one("--bf16") is True
    assert parse_command_line(["--bf16", "false", "--seed", "1"]).training.bf16 is False
    choices = ", ".join(every_option()["--lr-decay-style"].choices)
    said = f"--lr-decay-style is 'other': it takes one of {choices}"
    assert message_of("--lr-decay-style", "other").startswith(said)


def test_none_is_a_value_of_what_may_be_left_out_alone() -> None:
    for flag, option in every_option().items():
        if option.optional:
            assert parse_one(flag, "none") is None
        else:
            with pytest.raises(InputError, match=f"^{flag} needs a value: give it "):
                parse_one(flag, "none")


SECTIONS = (
    "config model moe selection parallel training fp8 optimizer data checkpoint logging launching"
).split()


def help_text(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_command_line(["--help", *words])
    assert ended.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> list[str]:
    return re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)


def test_help_has_each_flag_once_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "all")
    assert sorted(flags_in(text)) == sorted({*every_option(), "--config", *launching_flags()})
    bodies = re.split(r"^  --[a-z0-9-]+", text, flags=re.MULTILINE)[1:]
    for flag, body in zip(flags_in(text), bodies, strict=True):
        if option := every_option().get(flag):
            default, *others = re.findall(r"\(default: (.*?)\)", " ".join(body.split()))[0].split(
                ";"
            )
            # As a user would write it; `others`: of other systems.
            assert option.parse(default) == option.default or others, flag


def test_the_first_page_of_help_tells_how_to_find_a_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_text(capsys)
    assert len(text.splitlines()) <= 26
    assert re.findall(r"^  ([a-z0-9]+) ", text, re.MULTILINE) == SECTIONS
    assert "--help WORD" in text and "--help router" in text and "--help all" in text


def test_help_of_a_section_a_system_or_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    data = flags_in(help_text(capsys, "data"))
    assert data[0] == "--data-path" and "--seed" not in data
    assert flags_in(help_text(capsys, "smear")) == [
        option.flag for option in selection_options()["smear"].values()
    ]
    router = help_text(capsys, "router")
    assert "--moe-router-topk" in flags_in(router) and "--num-layers" not in router
    assert "--lr" in flags_in(help_text(capsys, "--learning"))
    assert flags_in(help_text(capsys, "--nproc_per_node")) == ["--nproc-per-node"]
    assert message_of("--help", "num-layer-s").endswith("did you mean --num-layers?")
    assert "no section, system or flag has this" in message_of("--help=zzz")


def test_help_is_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys, "all")
    groups = re.findall(r"^([a-z0-9 ]+):$", text, re.MULTILINE)
    assert groups == SECTIONS
    groups_text = dict(zip(groups, re.split(r"^[a-z0-9 ]+:$", text, flags=re.M)[1:], strict=True))
    assert "--num-layers" in groups_text["model"]
    selection = " ".join(groups_text["selection"].split())
    assert (
        "[aoe, aoe_top_p, aoe_threshold, aoe_expert_choice, routing_free] d_low, the rank of W_g"
        in selection
    )
    assert "[topk, aoe, uoe, hash, corm] number of experts per token" in selection
    assert "[all but lory, lory_prefix, smear] total width of the shared expert" in selection
    assert "sum to p (default: 0.4; aoe_top_p: 0.6)" in " ".join(text.split())


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("--num-layer", "--num-layers"),
        ("--NUM_LAYERS", "--num-layers"),
        ("--hiden-size=3", "--hidden-size"),
        ("--no-bf16", "--bf16"),
        ("--confg", "--config"),
        # as other programs of the field call it
        ("--moe-top-k", "--moe-router-topk"),
        (
            "--num-experts-per-tok",
            "--moe-router-topk or --num-experts or --moe-ffn-experts-per-token",
        ),
        ("--num-key-value-heads", "--num-query-groups"),
        ("--learning-rate", "--lr"),
        ("--batch-size", "--micro-batch-size or --global-batch-size"),
        ("--nproc-per-nod", "--nproc-per-node"),
    ],
)
def test_an_unknown_flag_suggests_the_nearest(wrong: str, near: str) -> None:
    name = wrong.split("=")[0]
    assert message_of(wrong, "3") == f"{name} is not a flag of this program: did you mean {near}?"


def test_a_flag_like_none() -> None:
    listed = "pretrain_gpt_moe.py --help all lists all flags"
    assert message_of("--qqqqq") == f"--qqqqq is not a flag of this program: {listed}"
    assert "is not a flag" in message_of("--two\nlines")
    assert "is not a flag" in message_of("--" + "x" * 5000)
    assert "--seq is not a flag" in message_of("--seq", "128")  # not an abbreviation
    assert message_of("--_").startswith("--_ is not a flag of this program: pretrain_gpt_moe.py")


def test_the_file_of_an_old_run_may_have_an_option_that_is_gone(tmp_path: Path) -> None:
    said = "--log-digest is gone: compare checkpoints by tools/checkpoint.py diff"
    assert message_of("--log-digest", "5") == said
    for value in ("null", "5"):
        (tmp_path / "old.yaml").write_text(f"num-layers: 3\nlog-digest: {value}\n")
        assert parse_command_line(["--config", str(tmp_path / "old.yaml")]).model.num_layers == 3


def test_flags_may_have_underscores() -> None:
    with_underscores = ["--num_layers", "2", "--expert_selection=aoe", "--aoe-low_rank_size", "8"]
    with_dashes = ["--num-layers", "2", "--expert-selection=aoe", "--aoe-low-rank-size", "8"]
    assert parse_command_line(with_underscores) == parse_command_line(with_dashes)
    assert parse_command_line(["--save=my_run"]).checkpoint.save == "my_run"


def test_the_last_of_equal_flags_counts() -> None:
    config = parse_command_line(["--num-layers", "2", "--bf16", "--num-layers", "3"])
    assert (config.model.num_layers, config.training.bf16) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-layers"], "--num-layers: expected one argument"),
        (["--num-layers", "--seed", "3"], "--num-layers: expected one argument"),
        (["--num-layers", "4", "5"], "unrecognized arguments: 5"),
        (["stray\nline"], "unrecognized arguments: stray line"),
        (["-x"], "unrecognized arguments: -x"),
        (["--", "x"], "-- is not a flag"),
        (["--num-layers", "9" * 5000], "--num-layers is '999.*it takes an integer"),
        (["--config", "a", "--config=b"], "--config is given twice"),
        (["--config"], "--config: expected one argument"),
    ],
)
def test_a_line_that_cannot_be_cut(arguments: list[str], message: str) -> None:
    assert re.search(f"^{message}", message_of(*arguments))


@pytest.mark.parametrize(
    ("system", "flag", "owners"),
    [
        (
            "topk",
            "--aoe-low-rank-size",
            "aoe or aoe_top_p or aoe_threshold or aoe_expert_choice or routing_free",
        ),
        ("lory", "--aoe-gate", "aoe"),
        ("expert_choice", "--moe-router-topk", "topk or aoe or uoe or hash or corm"),
    ],
)
def test_an_option_of_another_selection(system: str, flag: str, owners: str) -> None:
    assert message_of("--expert-selection", system, flag, "1") == (
        f"{flag} is 1, but it belongs to --expert-selection {owners}, and {system} is selected: "
        f"remove {flag}, or change --expert-selection"
    )
