"""A chat model's tokenizer and its rules of generation go in, through a run, and out again."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from moe_parallel.data.tokenizer import CONFIG_FILE
from moe_parallel.huggingface.importing import import_folder, plan_import
from moe_parallel.training.standalone import standalone_config
from moe_parallel.training.text import open_tokenizer
from tests.huggingface.exporting import export_run
from tests.huggingface.models import build, save, text_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|turn|>{{ message['role'] }}: "
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
TALK = [{"role": "user", "content": "the expert reads"}, {"role": "assistant", "content": "yes"}]
MORE = ["<s>", "<pad>", "<unk>", "<|turn|>"]


def _chat_folder(folder: Path, template: str = TEMPLATE) -> tuple[Path, dict[str, int]]:
    """A small Mixtral with a tokenizer for dialogs; and the ids of its special tokens."""
    model = text_tokenizer().model
    backend = type(model).from_str(model.to_str())
    backend.add_special_tokens([AddedToken(token, special=True) for token in MORE])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|turn|>"],
        chat_template=template,
    )
    ids = {token: backend.token_to_id(token) for token in [*MORE, "<|endoftext|>"]}
    theirs = build("mixtral", vocab_size=len(tokenizer), eos_token_id=ids["<|endoftext|>"])
    theirs.generation_config = transformers.GenerationConfig(
        bos_token_id=ids["<s>"],
        eos_token_id=[ids["<|endoftext|>"], ids["<|turn|>"]],
        temperature=0.6,
        do_sample=True,
    )
    save(theirs, folder)
    tokenizer.save_pretrained(folder)
    return folder, ids


def _in_and_out(folder: Path, tmp_path: Path) -> Path:
    import_folder(plan_import(folder, []), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    return tmp_path / "out"


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_chat_model_answers_as_before(tmp_path: Path) -> None:
    folder, ids = _chat_folder(tmp_path / "theirs")
    output = _in_and_out(folder, tmp_path)
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(f) for f in (folder, output))
    for of_start in (False, True):
        talks = [
            each.apply_chat_template(TALK, add_generation_prompt=of_start)["input_ids"]
            for each in (theirs, ours)
        ]
        assert talks[0] == talks[1]
        assert talks[0][0] == ids["<s>"] and talks[0].count(ids["<|turn|>"]) == 2 + of_start
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.bos_token, ours.pad_token, ours.unk_token) == ("<s>", "<pad>", "<unk>")
    assert ours.all_special_ids == theirs.all_special_ids and len(ours) == len(theirs)
    first, again = (_read(each / "generation_config.json") for each in (folder, output))
    assert again == first | {"pad_token_id": ids["<pad>"]}
    assert again["eos_token_id"] == [ids["<|endoftext|>"], ids["<|turn|>"]]
    of_model = _read(output / "config.json")
    assert of_model["eos_token_id"] == again["eos_token_id"]
    assert of_model["bos_token_id"] == ids["<s>"]

    # Both end a text at the second of the ids, which the tokenizer does not name.
    prompt = torch.tensor([[ids["<s>"], 3, 4]])
    texts = []
    for each in (folder, output):
        model = transformers.AutoModelForCausalLM.from_pretrained(each)
        with torch.no_grad():
            model.model.norm.weight.zero_()  # all logits are equal, but for this token
            bias = torch.zeros(len(ours))
            bias[ids["<|turn|>"]] = 1.0
            model.lm_head.bias = torch.nn.Parameter(bias)
        texts.append(model.generate(prompt, max_new_tokens=5, do_sample=False)[0].tolist())
    assert texts[0] == texts[1] == [*prompt[0].tolist(), ids["<|turn|>"]]


@pytest.mark.parametrize("adds", [False, True])
def test_a_text_begins_as_in_transformers(adds: bool, tmp_path: Path) -> None:
    """With the BOS that tokenizer.json adds, whatever tokenizer_config.json says."""
    folder, ids = _chat_folder(tmp_path / "theirs")
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if adds:
        special = [("<s>", ids["<s>"])]
        file.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
        file.save(str(folder / "tokenizer.json"))
    said = {"add_bos_token": not adds}
    (folder / CONFIG_FILE).write_text(json.dumps(_read(folder / CONFIG_FILE) | said))
    plan = plan_import(folder, [])
    output = _in_and_out(folder, tmp_path)
    theirs, ours = (transformers.AutoTokenizer.from_pretrained(f) for f in (folder, output))
    here = open_tokenizer(standalone_config([], load=str(tmp_path / "run")))
    for text in ("a", "the expert reads"):
        wanted = theirs(text)["input_ids"]
        for tokenizer in (plan.tokenizer, here):
            assert [*tokenizer.beginning, *tokenizer.tokenize(text)] == wanted
        assert ours(text)["input_ids"] == wanted
    assert "add_special_tokens=False" not in (output / "README.md").read_text()


def test_a_template_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    template = f"{{{{ cycler.__init__.__globals__.os.mkdir('{marker}') }}}}{{% never closed"
    folder, _ = _chat_folder(tmp_path / "theirs", template)
    output = _in_and_out(folder, tmp_path)
    assert _read(output / CONFIG_FILE)["chat_template"] == template
    assert not marker.exists()
