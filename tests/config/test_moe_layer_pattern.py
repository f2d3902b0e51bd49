"""--moe-layer-freq: its syntax. No value is executed, and none exhausts the memory."""

import tracemalloc
from pathlib import Path

import pytest

from moe_parallel.config import moe_layer_pattern
from moe_parallel.errors import InputError


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("1", "1111"),
        ("2", "1010"),
        ("3", "1001"),
        ("9", "1000"),
        ("[0]+[1]*3", "0111"),
        ("[0] * 1 + [1] * 3", "0111"),
        ("2*([0]+[1])", "0101"),
        ("[0, 1, 1, 0]", "0110"),
        ("0,1,1,0", "0110"),
        ("[0]*0+[1]*4", "1111"),
    ],
)
def test_patterns(pattern: str, layers: str) -> None:
    assert moe_layer_pattern(pattern, 4) == tuple(layer == "1" for layer in layers)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", " ", "0", "-1", "1.0", "true", "True", "None", "x", "abc", "1 2", "[", "[1", "1]"),
        *("[1]", "[1]*3", "[1]*5", "[]", "[0]+[1]*4", "[0,1,1,2]", "[0,1,1,-1]"),
        *("[True]*4", "['1']*4", "[1.0]*4", "[[1]]*4", "[[1],1,1,1,1]", "[1]*4+0", "[1]*[4]"),
        *("[1]*-4", "[1]**4", "[1]*4-1", "{0:1}", "{1}", "[1 for _ in '1234']", "[1]*4;1", "[1]=1"),
        *("\x00", "é", "[1]*4 if 1 else [1]", "lambda: 1", "f'{1}'", "[*[1]*4]"),
    ],
)
def test_malformed_patterns(pattern: str) -> None:
    with pytest.raises(InputError, match=r"^--moe-layer-freq is .*N >= 1.*\[0\]\+\[1\]\*3$"):
        moe_layer_pattern(pattern, 4)


@pytest.mark.parametrize(
    "pattern",
    [
        "[1]*1000000000",
        "[1]*(10**10**10)",
        "((([1]*1000)*1000)*1000)*1000",
        "9" * 10_000,
        "[" * 100_000,
        "1+" * 100_000 + "1",
        "[1]*4#" + "x" * 1_000_000,
        "__import__('os').mkdir('executed')",
        "[print('executed')]*4",
    ],
)
def test_hostile_patterns_are_refused_unexecuted(
    pattern: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="--moe-layer-freq is") as caught:
            moe_layer_pattern(pattern, 4)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 300
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""
