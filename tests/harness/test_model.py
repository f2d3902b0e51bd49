"""Answers to the harness, compared with the training model's and with the harness' own `hf`."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.errors import InputError
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.standalone import standalone_model
from tests import systems
from tests.data.small_text import words
from tests.distributed import run_distributed
from tests.huggingface.exporting import save_runs, source_of

LENGTH = 32
#: (context, answer): of unequal lengths; one without a context, one longer than the model reads.
PAIRS = [
    ("the expert reads", " a token,"),
    ("the expert reads", " 12"),
    ("naïve façade 漢字", " 🙂 writes"),
    ("", "the expert"),
    (words(60, 7), " tokens; 12"),
    ("a", " token, writes"),
]
TEXTS = ["the expert reads a token,", words(30, 3), "naïve"]
PROMPTS = [
    ("the expert reads", {"until": ["\n"], "max_gen_toks": 6}),
    (words(60, 1), {"until": [" a"], "max_gen_toks": 5, "do_sample": False}),
]
#: A system with each way to pad, and the flags of the evaluation.
SYSTEMS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "aoe": (systems.options("aoe, by bias"), []),
    "dense": ({"num_experts": None, "moe_ffn_hidden_size": None}, []),
    "lory": (systems.options("lory") | {"lory_segment_length": 5}, []),
    "lory, uniform": (systems.options("lory, uniform first segment"), []),
    "lory, by the prompt": (systems.options("lory"), ["--lory-inference", "prompt"]),
    "lory_prefix": (systems.options("lory_prefix"), []),
}


def instances(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def answers(lm: Any) -> dict[str, list[Any]]:
    texts = [(text,) for text in TEXTS]
    return {
        "loglikelihood": lm.loglikelihood(instances("loglikelihood", PAIRS), True),
        "loglikelihood_rolling": lm.loglikelihood_rolling(
            instances("loglikelihood_rolling", texts), True
        ),
        "generate_until": lm.generate_until(instances("generate_until", PROMPTS), True),
    }


class Alone:
    """Log-likelihoods of whole sequences, one at a time, from the logits of the training model."""

    def __init__(self, model: Any, tokenizer: Any, vocab_size: int) -> None:
        self.model, self.tokenizer, self.vocab_size = model, tokenizer, vocab_size

    @torch.no_grad()
    def log_p(self, tokens: list[int], first: int) -> tuple[float, bool]:
        """ln p of the tokens from `first` on, and whether each is the most probable."""
        positions = torch.arange(len(tokens) - 1)[None]
        logits = self.model(torch.tensor([tokens[:-1]]), positions, None)[0]
        log_p = logits[:, : self.vocab_size].double().log_softmax(-1)[first - 1 :]
        labels = torch.tensor(tokens[first:])
        greedy = bool((log_p.argmax(-1) == labels).all())
        return log_p[range(len(labels)), labels].sum().item(), greedy

    def pair(self, context: str, answer: str) -> tuple[float, bool]:
        whole = self.tokenizer.tokenize(context + answer)
        first = len(self.tokenizer.tokenize(context))
        if not first:
            whole, first = [self.tokenizer.eod, *whole], 1
        cut = max(0, len(whole) - LENGTH - 1)
        return self.log_p(whole[cut:], first - cut)

    def text(self, text: str) -> float:
        """By windows of LENGTH tokens, the last of which begins earlier, to be full."""
        tokens = [self.tokenizer.eod, *self.tokenizer.tokenize(text)]
        total, done = 0.0, 1
        while done < len(tokens):
            end = min(done + LENGTH, len(tokens))
            start = max(0, end - LENGTH - 1) if done > 1 else 0
            total += self.log_p(tokens[start:end], done - start)[0]
            done = end
        return total


def _answers_of_systems(folder: Any) -> dict[str, Any]:
    from moe_parallel.harness.model import harness_model

    found: dict[str, Any] = {}
    for name, (options, flags) in SYSTEMS.items():
        run = folder / name
        save_runs([(run, options)])
        found[name] = answers(harness_model(str(run), flags, 3))
        source = source_of(run)
        groups = initialize_groups(source.config.parallel)
        model_parallel_cuda_manual_seed(1)
        model, _ = standalone_model(source.config, source.vocab_size, groups)
        alone = Alone(model.eval(), source.tokenizer, source.vocab_size)
        found[f"{name}, alone"] = {
            "loglikelihood": [alone.pair(*pair) for pair in PAIRS],
            "loglikelihood_rolling": [alone.text(text) for text in TEXTS],
        }
        destroy_groups()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (answered,) = run_distributed(1, _answers_of_systems, tmp_path_factory.mktemp("runs"))
    return answered


def assert_same(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert given["loglikelihood_rolling"] == pytest.approx(
        expected["loglikelihood_rolling"], rel=1e-5
    )
    for (log_p, greedy), other in zip(
        given["loglikelihood"], expected["loglikelihood"], strict=True
    ):
        assert (log_p, greedy) == (pytest.approx(other[0], rel=1e-5), other[1])


@pytest.mark.parametrize("name", [name for name in SYSTEMS if "by the prompt" not in name])
def test_likelihoods_are_those_of_the_training_model(found, name):
    assert_same(found[name], found[f"{name}, alone"])


def test_lory_by_the_prompt_merges_by_the_context(found):
    """Which has other tokens than the first segment, and at most those of the answer are new."""
    by_prompt, by_segment = found["lory, by the prompt"], found["lory, by the prompt, alone"]
    for (mine, _), (other, _) in zip(
        by_prompt["loglikelihood"][:3], by_segment["loglikelihood"][:3], strict=True
    ):
        assert mine != pytest.approx(other, rel=1e-4)


def _what_it_cannot_do(folder: Any) -> list[str]:
    from moe_parallel.harness.model import harness_model

    save_runs([(folder / "smear", systems.options("smear")), (folder / "topk", {})])
    lm = harness_model(str(folder / "topk"))
    assert lm.max_gen_toks == LENGTH // 2
    told = []
    for ask in (
        lambda: harness_model(str(folder / "smear")),
        lambda: lm.loglikelihood(instances("loglikelihood", [("1", " 12" * 40)]), True),
    ):
        with pytest.raises(InputError) as raised:
            ask()
        told.append(str(raised.value))
    return told


def test_what_the_model_cannot_do(tmp_path):
    (told,) = run_distributed(1, _what_it_cannot_do, tmp_path)
    assert told[0].startswith("--load: --expert-selection smear has no form in transformers")
    assert told[1].startswith("an answer has") and "reads --seq-length 32: leave" in told[1]
