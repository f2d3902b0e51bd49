"""The position in the data is kept together with the data in which it is one."""

import json
import shutil

import pytest

from moe_parallel.errors import InputError
from tests.data.small_text import small_bpe, words, write_texts
from tests.distributed import run_distributed
from tests.program import SMALL, pretrain_here

pytestmark = pytest.mark.full

#: An epoch of the training text is between 6 and 10 iterations of 8 x 32 tokens.
RUN = SMALL | {
    "train_iters": 6,
    "num_layers": 1,
    "lr_decay_style": "constant",
    "lr_decay_iters": 6,
    "eval_iters": 0,
    "full_evaluation": False,
    "exit_interval": "none",  # also where the run that is continued had one
}
HALF = {"train_iters": 6, "exit_interval": 3}


def _run(options, save, **more):
    """The losses in the metrics of a run that starts or continues in `save`, or its error."""
    try:
        ((_, printed),) = pretrain_here([options | {"save": save, "load": save} | more])
    except InputError as error:
        return str(error)
    if "warning: --load" in printed:
        return printed
    lines = (save / "metrics.jsonl").read_text().splitlines()
    return [record["lm_loss"] for record in map(json.loads, lines) if "lm_loss" in record]


def _journeys(options, place):
    """What each way to go on after three of six iterations says, or its losses."""
    found = {"straight": _run(options, place / "straight")}
    _run(options | HALF, place / "half")

    def went_on(name, **more):
        save = place / name
        shutil.copytree(place / "half", save)
        found[name] = _run(options, save, **more)
        return save

    other, moved = [place / "other"], place / "elsewhere"
    went_on("the same")
    went_on("another seed", seed=7)
    went_on("another split", split="8,2,0")
    went_on("other data", data_path=other)
    went_on("a weight", data_path=[0.5, *options["data_path"], 0.5, *other])
    went_on("another length", seq_length=16)
    moved.mkdir()
    for file in place.glob("text.*"):
        shutil.copy(file, moved / file.name.replace("text", "renamed"))
    went_on("moved", data_path=[moved / "renamed"], data_cache_path=moved / "cache")
    extended = went_on("extended", train_iters=14)
    found["extended again"] = _run(options, extended, train_iters=24)
    save = went_on("extended, stopped", train_iters=14, exit_interval=8)
    found["extended, stopped, extended"] = _run(options, save, train_iters=24)
    save = went_on("overridden", seed=7, override_data=True, exit_interval=5)
    found["overridden, continued"] = _run(options, save, seed=7)
    fresh = {"finetune": True, "load": place / "half", "seed": 7}
    found["fine-tuned"] = _run(options, place / "tuned", **fresh)
    split = {"load": place / "half", "split": "8,2,0"}
    found["split: fine-tuned"] = _run(options, place / "tuned 2", finetune=True, **split)
    found["split: evaluated"] = _run(options, None, skip_train=True, eval_iters=1, **split)
    went_on("split: overridden", split="8,2,0", override_data=True)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    place = tmp_path_factory.mktemp("stream")
    tokenizer = small_bpe()
    tokenizer.save(place / "tokenizer")
    for name, seed in (("text", 0), ("other", 100)):
        write_texts(place / name, [words(60, seed + n) for n in range(20)], tokenizer)
    options = RUN | {
        "data_path": [place / "text"],
        "split": "9,1,0",
        "tokenizer_model": place / "tokenizer",
        "data_cache_path": place / "cache",
    }
    return run_distributed(1, _journeys, options, place)[0]


def test_the_same_data_are_gone_on_with(found):
    assert len(found["straight"]) == 6
    assert found["the same"] == found["moved"] == found["straight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("another seed", "--seed is 1234 in the checkpoint and 7 here; "),
        ("another split", "--split is 9,1,0 in the checkpoint and 8,2,0 here; "),
        ("another length", "--seq-length is 32 in the checkpoint and 16 here; "),
        ("other data", "--data-path is text ("),
        ("a weight", ") in the checkpoint and 0.5 text ("),
    ],
)
def test_other_data_are_refused(found, change, said):
    assert said in found[change] and "\n" not in found[change]
    assert found[change].endswith("of the data given here by --override-data")


def test_an_extension_goes_on_with_every_sample(found):
    """Also one of another, after any stop: the iterations after an end are those after that end."""
    assert found["extended"][:6] == found["straight"]
    assert found["extended again"][:14] == found["extended"]
    assert found["extended, stopped, extended"] == found["extended again"]
    assert len(found["extended again"]) == 24


def test_other_data_by_the_flag_begin_with_their_first_sample(found):
    overridden = found["overridden, continued"]
    assert overridden[:3] == found["straight"][:3] and overridden[3:] != found["straight"][3:]
    assert found["overridden"] == overridden[:5] and len(overridden) == 6
    assert overridden[3] == found["fine-tuned"][0]


@pytest.mark.parametrize("way", ["fine-tuned", "evaluated", "overridden"])
def test_held_out_text_that_may_have_been_trained_on_is_told(found, way):
    assert found[f"split: {way}"].count("held out here may be text that it was trained on") == 1
