import pytest

from moe_parallel.data.sources import Source, blend_sources
from moe_parallel.errors import InputError

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


def test_domains_of_one_name_are_told_apart() -> None:
    assert [name for name, _, _ in blend("a/text", "b/text", "text_2", "c/text")] == [
        "text",
        "text_2",
        "text_2_2",
        "text_3",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"--data-path is empty"),
        (["0.5", "a", "b"], r"a weight or a prefix is missing"),
        (["a", "0.5"], r"the weight 'a' of 0\.5 is not a number above 0"),
        (["1", "a", "b", "2"], r"the weight 'b' of 2"),
        (["1", "a", "0", "b"], r"the weight '0' of b is not a number above 0"),
        (["1", "a", "-1", "b"], r"the weight '-1' of b"),
    ],
)
def test_wrong_weights_are_told(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        blend_sources(words, SPLIT)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("0,100,0", r"--split 0,100,0 leaves nothing to train on"),
        ("9,x,1", r"--split 9,x,1 is not three numbers"),
        ("9,-1", r"is not three numbers"),
        ("9,1,1,1", r"is not three numbers"),
        ("", r"is not three numbers"),
        ("9..5", r"is not three numbers"),
        ("1e2,1", r"is not three numbers"),
    ],
)
def test_a_wrong_split_is_told(split: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        blend_sources(["a"], split)


@pytest.mark.parametrize("split", ["100", "99.5,.5", "969,30,1"])
def test_a_right_split(split: str) -> None:
    assert blend_sources(["a"], split) == [Source("a", None, "a", "a", split)]
