import pytest
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

from moe_parallel.config import Config, DataConfig, validate
from moe_parallel.data.datasets import Source, blend_sources
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
    ("split", "plain", "shares"),
    [
        ("100", "100", [1, 0, 0]),
        ("969,30,1", "969,30,1", [0.969, 0.03, 0.001]),
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
