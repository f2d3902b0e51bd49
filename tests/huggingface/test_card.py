"""What a model card says of a token's output, and of the differences from the run."""

import pytest

from moe_parallel.config import parse_command_line
from moe_parallel.huggingface.card import Facts, export_notes, model_card
from tests.program import SMALL, flags
from tests.systems import options

PAST = "A token's output depends on this token and earlier ones."
PROMPT = "The mean of the prompt merges the experts, once in each layer, for"


@pytest.mark.parametrize(
    ("of_run", "beginnings"),
    [
        ({"num_experts": None, "moe_ffn_hidden_size": None}, [PAST]),
        (options("aoe_top_p") | {"moe_expert_capacity_factor": 1.5}, [PAST, "The run had a cap"]),
        (options("expert_choice"), ["In training each expert chose among all tokens of a micro-"]),
        (options("hash"), [PAST, "The ids of the tokens choose the experts, so the model needs"]),
        (
            options("lory"),
            [PROMPT, "The run's evaluations merge the experts anew for each segment, as"],
        ),
        (options("lory, uniform first segment") | {"lory_inference": "prompt"}, [PROMPT]),
        (
            options("lory_prefix"),
            [
                "The mean of the first 3 tokens of the prompt merges the",
                "If a prompt has fewer than 3 tokens, tools/generate.py merges anew for each",
            ],
        ),
    ],
)
def test_notes(of_run, beginnings):
    found = export_notes(parse_command_line(flags(SMALL | of_run)))
    assert len(found) == len(beginnings)
    for note, beginning in zip(found, beginnings, strict=True):
        assert note.startswith(beginning) and "\n" not in note


def _card(of_run="topk", **facts):
    known = {
        "name": "my",
        "architecture": "MixtralForCausalLM",
        "parameters": 1_234_567,
        "dtype": "bfloat16",
        "training": {"iteration": 300, "consumed_tokens": 9600, "consumed_samples": 30},
        "validation": {"all": {"loss": 1.5, "bits_per_byte": None, "layers": []}},
        "folded": False,
        "has_tokenizer": True,
        "adds_special_tokens": False,
    }
    config = parse_command_line(flags(SMALL | options(of_run)))
    return model_card(config, Facts(**known | facts)).splitlines()


def test_a_card():
    card = _card()
    assert card[0] == "---" and card[card.index("---", 1) + 2] == "# my"
    assert "| parameters | 1,234,567, bfloat16 |" in card
    assert "| trained for | 300 iterations, 9,600 tokens |" in card
    assert "| all | 1.5000 | - |" in card
    assert 'prompt = tokenizer("Once", return_tensors="pt")' in card
    assert not any("trust_remote_code" in line for line in card)
