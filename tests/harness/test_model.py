"""Answers to the harness: compared with those of its own `hf`, by system, in layouts."""

import math

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_parallel.data.tokenizer import END_OF_DOCUMENT, Extras, FastTokenizer
from moe_parallel.errors import InputError
from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.parallel import destroy_groups
from tests import systems
from tests.data.small_text import small_bpe, words
from tests.distributed import run_distributed
from tests.generation.small_models import small_model
from tests.generation.test_decode import LAYOUTS, MODELS
from tests.harness import requests
from tests.harness.requests import PAIRS, PROMPTS, SEQ_LENGTH, TEXTS, TOKENIZER
from tests.huggingface.models import build, save
from tests.tiers import selected_values
from tests.tools.running import run_tool_forked

#: Each kind of layer, and each reason for which sequences are not padded.
NAMES = ["topk", "aoe", "segment_expert_choice", "lory", "lory, by the prompt", "smear", "capacity"]


def harness_model(options, batch_size=2):
    from moe_parallel.harness.model import HarnessModel

    return HarnessModel(small_model(options), TOKENIZER, batch_size, seed=5)


class Alone:
    """Answers by whole sequences without padding, one at a time, from logits of a function.

    The vocabulary is that of the tokenizer, without padding either.
    """

    def __init__(self, logits_of):
        self.logits_of = logits_of

    def log_p(self, tokens, first):
        """ln p of the tokens from `first` on, and whether each is the most probable."""
        logits = self.logits_of(torch.tensor([tokens[:-1]]))[0, :, : TOKENIZER.vocab_size]
        log_p = logits.double().log_softmax(-1)[first - 1 :]
        labels = torch.tensor(tokens[first:])
        greedy = bool((log_p.argmax(-1) == labels).all())
        return log_p[range(len(labels)), labels].sum().item(), greedy

    def pair(self, context, answer):
        answer = TOKENIZER.tokenize(answer)
        tokens = (TOKENIZER.tokenize(context) or [TOKENIZER.eod]) + answer
        tokens = tokens[-SEQ_LENGTH - 1 :]
        return self.log_p(tokens, len(tokens) - len(answer))

    def text(self, text):
        """By windows of SEQ_LENGTH tokens, the last of which begins earlier, to be full."""
        tokens = [TOKENIZER.eod, *TOKENIZER.tokenize(text)]
        total, done = 0.0, 1
        while done < len(tokens):
            end = min(done + SEQ_LENGTH, len(tokens))
            start = max(0, end - SEQ_LENGTH - 1) if done > 1 else 0
            total += self.log_p(tokens[start:end], done - start)[0]
            done = end
        return total

    def go_on(self, prompt, options):
        tokens = TOKENIZER.tokenize(prompt)[-(SEQ_LENGTH - options["max_gen_toks"]) :]
        text = ""
        for _ in range(options["max_gen_toks"]):
            logits = self.logits_of(torch.tensor([tokens]))[0, -1, : TOKENIZER.vocab_size]
            tokens.append(int(logits.argmax()))
            if tokens[-1] == TOKENIZER.eod:
                break
            text += f" {tokens[-1]}"
            found = [text.find(stop) for stop in options["until"] if stop in text]
            if found:
                return text[: min(found)]
        return text

    def answers(self):
        return {
            "loglikelihood": [self.pair(*pair) for pair in PAIRS],
            "loglikelihood_rolling": [self.text(text) for text in TEXTS],
            "generate_until": [self.go_on(*prompt) for prompt in PROMPTS],
        }


def _of_one_rank(names):
    found = {}
    for name in names:
        lm = harness_model(MODELS[name])
        found[name] = requests.answers(lm)
        if name == "topk":
            found["sampled"] = [
                lm.generate_until(requests.instances("generate_until", [requests.SAMPLED]), True)
                for _ in range(2)
            ]
        if "by the prompt" not in name:
            chunk = lm.model.chunk
            alone = Alone(
                lambda tokens, chunk=chunk: chunk(tokens, torch.arange(tokens.shape[1])[None], None)
            )
            with torch.no_grad():
                found[f"{name}, alone"] = alone.answers()
        destroy_groups()
    return found


@pytest.fixture(scope="module")
def on_one_rank():
    (found,) = run_distributed(1, _of_one_rank, NAMES)
    return found


def assert_same(found, expected):
    assert found["generate_until"] == expected["generate_until"]
    assert found["loglikelihood_rolling"] == pytest.approx(
        expected["loglikelihood_rolling"], rel=1e-5
    )
    for (log_p, greedy), (expected_log_p, expected_greedy) in zip(
        found["loglikelihood"], expected["loglikelihood"], strict=True
    ):
        assert log_p == pytest.approx(expected_log_p, rel=1e-5) and greedy == expected_greedy


@pytest.mark.parametrize("name", [name for name in NAMES if "by the prompt" not in name])
def test_batches_change_nothing(on_one_rank, name):
    assert_same(on_one_rank[name], on_one_rank[f"{name}, alone"])


def test_lory_by_the_prompt_merges_by_the_context(on_one_rank):
    by_prompt, by_segment = on_one_rank["lory, by the prompt"], on_one_rank["lory"]
    # The context of two tokens, whose segments have four.
    assert by_prompt["loglikelihood"][0][0] != pytest.approx(by_segment["loglikelihood"][0][0])
    assert all(math.isfinite(log_p) for log_p, _ in by_prompt["loglikelihood"])


def test_sampling_of_a_task_is_repeatable(on_one_rank):
    first, second = on_one_rank["sampled"]
    assert first == second != on_one_rank["topk"]["generate_until"][:1]


WITH_DP = {"dp": {}, **LAYOUTS}


def fits(name, layout):
    """Merged experts are not divided, and a capacity is counted on each rank."""
    divides_experts = "expert" in str(WITH_DP[layout])
    return name != "capacity" and not (divides_experts and name.startswith(("lory", "smear")))


CASES = [(name, layout) for name in NAMES for layout in WITH_DP if fits(name, layout)]


def _of_two_ranks(cases):
    found = []
    for name, layout in cases:
        found.append(requests.answers(harness_model(MODELS[name] | WITH_DP[layout])))
        destroy_groups()
    return found


def _of_layout(cases):
    ranks = run_distributed(2, _of_two_ranks, cases)
    assert ranks[0] == ranks[1]
    return dict(zip(cases, ranks[0], strict=True))


@pytest.fixture(scope="module")
def on_two_ranks(request):
    return _of_layout(selected_values(request, "case", CASES))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_layouts(on_one_rank, on_two_ranks, case):
    assert_same(on_two_ranks[case], on_one_rank[case[0]])


def _in_turn():
    """Each system in one of the layouts that it allows, in turn."""
    for number, name in enumerate(systems.SYSTEMS):
        allowed = [layout for layout in WITH_DP if fits(name, layout)]
        yield name, allowed[number % len(allowed)]


@pytest.mark.full
def test_every_system_in_a_layout():
    cases = list(_in_turn())
    assert {layout for _, layout in cases} == set(WITH_DP)
    (alone,) = run_distributed(1, _of_two_ranks, [(name, "dp") for name, _ in cases])
    spread = _of_layout(cases)
    for case, expected in zip(cases, alone, strict=True):
        assert_same(spread[case], expected)


def _bad_requests():
    lm = harness_model({})
    messages = []
    for options in (
        {"until": [], "max_gen_toks": 32},
        {"until": [], "max_gen_toks": -1},
        {"until": [], "num_beams": 4},
        {"until": [], "do_sample": True, "temperature": 1.0, "top_p": 3.0},
    ):
        with pytest.raises(InputError) as raised:
            lm.generate_until(requests.instances("generate_until", [("1 2", options)]), True)
        messages.append(str(raised.value))
    for pair in (("1", " 2" * 40), ("1 2", ""), ("", " ")):
        with pytest.raises(InputError) as raised:
            lm.loglikelihood(requests.instances("loglikelihood", [pair]), True)
        messages.append(str(raised.value))
    destroy_groups()
    return messages


def test_what_the_model_cannot_do():
    (messages,) = run_distributed(1, _bad_requests)
    expected = [
        "max_gen_toks is 32, and the model reads --seq-length 32",
        "max_gen_toks is -1, and the model reads --seq-length 32",
        "generation_kwargs has num_beams 4, which this project lacks",
        "--top-p is 3.0: it must be above 0",
        "an answer has 40 tokens, and the model reads --seq-length 32",
        "the answer '' has no tokens",
        "the answer ' ' has no tokens",
    ]
    for message, text in zip(messages, expected, strict=True):
        assert text in message and "\n" not in message


#: (context, answer, its tokens). ` token` is one, and ` tok` alone is ` t`, `o`, `k`.
TEXT_PAIRS = [
    ("the expert", " reads a token", None),
    ("the expert reads a ", "token", None),
    ("", "writes 12", None),
    ("\n", "the token", None),
    (" ", "the token", None),
    (words(100, 5), " reads", None),  # longer than the model reads
    ("the expert reads a tok", "en", [" token"]),
    ("the expert reads a tok", "ens", [" token", "s"]),
    ("the expert reads a tok", "x", ["x"]),
]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The folder of a Mixtral whose tokenizer begins each text with <s>, and what a run that was
    imported from it answers in batches of 1 and of 8."""
    folder = tmp_path_factory.mktemp("imported")
    model = small_bpe().model
    model.add_special_tokens(["<s>"])
    bos = model.token_to_id("<s>")
    model.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = FastTokenizer(model, END_OF_DOCUMENT, "HuggingFaceTokenizer")
    tokenizer.extras = Extras({"bos_token": "<s>"})
    ids = {"vocab_size": tokenizer.vocab_size, "bos_token_id": bos, "eos_token_id": tokenizer.eod}
    save(build("mixtral", **ids), folder / "theirs")
    tokenizer.save(folder / "theirs")
    import_folder(plan_import(folder / "theirs", []), folder / "run")
    (found,) = run_distributed(1, _of_text, folder / "run")
    return folder / "theirs", found


def _of_text(run):
    from moe_parallel.harness.model import HarnessModel

    loads = [{"load": run, "batch_size": size} for size in (1, 8)]
    return [_answers_in_text(HarnessModel.create_from_arg_obj(load)) for load in loads]


def _answers_in_text(lm, pairs=TEXT_PAIRS):
    pairs = [pair[:2] for pair in pairs]
    texts = [(words(200, 3),), ("the expert",)]
    prompts = [("the expert", {"until": [], "max_gen_toks": 8}),
               (words(200, 1), {"until": [" "], "max_gen_toks": 5})]  # fmt: skip
    texts = requests.instances("loglikelihood_rolling", texts)
    prompts = requests.instances("generate_until", prompts)
    return {
        "loglikelihood": lm.loglikelihood(requests.instances("loglikelihood", pairs), True),
        "loglikelihood_rolling": lm.loglikelihood_rolling(texts, True),
        "generate_until": lm.generate_until(prompts, True),
    }


def test_an_answer_has_a_token_that_it_shares_with_its_context(imported):
    folder, (one_by_one, together) = imported
    assert_same(one_by_one, together)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for (context, answer, tokens), (log_p, _) in zip(
        TEXT_PAIRS, one_by_one["loglikelihood"], strict=True
    ):
        whole = torch.tensor([tokenizer(context + answer)["input_ids"]])
        assert whole[0, 0] == tokenizer.bos_token_id
        whole = whole[:, -65:]
        if tokens is None:
            tokens = tokenizer.tokenize(context[len(context.rstrip()) :] + answer)
        else:
            assert tokens == [tokenizer.decode(i) for i in whole[0, -len(tokens) :]]
        with torch.no_grad():
            all_log_p = model(whole).logits[0].log_softmax(-1)
        expected = sum(all_log_p[i - 1, whole[0, i]] for i in range(-len(tokens), 0))
        assert log_p == pytest.approx(float(expected), rel=1e-5), (context, answer)


@pytest.mark.full
def test_an_imported_model_answers_as_in_the_harness_own_hf(imported):
    from lm_eval.models.huggingface import HFLM

    folder, (found, _) = imported
    # Its cache of logits gives other numbers where a batch is padded.
    peer = HFLM(pretrained=str(folder), device="cpu", batch_size=2, logits_cache=False)
    pairs = [pair for pair in TEXT_PAIRS if pair[2] is None]
    shared = found | {"loglikelihood": found["loglikelihood"][: len(pairs)]}
    assert_same(shared, _answers_in_text(peer, pairs))
    line = ["--load", folder.parent / "run", "--tokens", 8, "--temperature", 0]
    printed = run_tool_forked("generate.py", *line, "--prompt", "the expert").stdout
    assert printed == f"the expert{found['generate_until'][0]}\n"
