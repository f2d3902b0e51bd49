"""The documented path: Mixtral of transformers -> topk -> AoE -> healed -> transformers."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from moe_parallel.data.tokenizer import CONFIG_FILE
from moe_parallel.huggingface.importing import import_folder, plan_import
from tests.convert.converting import convert_here
from tests.data.small_text import words
from tests.distributed import run_distributed
from tests.huggingface.exporting import export_run
from tests.huggingface.models import MODELS, save_with_text, text_tokenizer
from tests.program import flags, pretrain_here, small_data
from tests.test_readme import ROOT, run_block
from tests.tiers import rest_in_full
from tests.tools.running import run_tool_forked

TRAINING = {
    "seq_length": 32,
    "micro_batch_size": 4,
    "global_batch_size": 8,
    "lr_warmup_iters": 2,
    "eval_iters": 1,
    "tensorboard": False,
}
HEALING = {"train_iters": 30, "lr": 1e-2, "min_lr": 1e-3}

TEMPLATE = "{{ messages[0]['content'] }}"
SECTION = (ROOT / "docs/huggingface.md").read_text().split("## From Mixtral to AoE and back\n")[1]
COMMANDS = "".join(line for line in SECTION.split("\n#")[0].splitlines(True) if line[:4] == " " * 4)
#: The numbers that are others here: the length of the sequences and of the training, the rank, the
#: size of the batch, and the number of processes.
SMALLER = {
    "--seq-length 4096": "--seq-length 32",
    "--train-iters 2000 --global-batch-size 64": "--train-iters 12 --global-batch-size 16",
    "--nproc-per-node 8": "--nproc-per-node 2",
    "--expert-model-parallel-size 8": "--expert-model-parallel-size 2",
    "--aoe-low-rank-size 256": "--aoe-low-rank-size 16",
    "    vllm serve exported/aoe --trust-remote-code\n": "",
}


def _converted(run: Path, aoe: Path, options: dict[str, Any], rank: int) -> tuple[Any, Any]:
    options = options | {"aoe_low_rank_size": rank}
    done = convert_here(run, aoe, "aoe", options, rank, samples=8)
    return [layer.number for layer in done.layers], dict(done.losses)


@pytest.mark.parametrize("model_type", rest_in_full(list(MODELS), "qwen2_moe"))
def test_in_and_out_again_has_the_same_bits(model_type: str, tmp_path: Path) -> None:
    saved = save_with_text(model_type, tmp_path / "theirs", torch.bfloat16)
    import_folder(
        plan_import(saved.folder, ["--seq-length", "16", "--make-vocab-size-divisible-by", "64"]),
        tmp_path / "run",
    )
    exported = export_run(tmp_path / "run", tmp_path / "back")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert again.max_position_embeddings == 64
    config = transformers.AutoConfig.from_pretrained(saved.folder)
    assert [exported.architecture] == config.architectures
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert tensor.dtype == again[name].dtype == torch.bfloat16
        assert torch.equal(tensor.view(torch.int16), again[name].view(torch.int16)), name


#: By model_type: the layers of experts, and the rank of W_g, below the width of the experts.
FAMILIES = {
    "mixtral": ([1, 2], 24),
    "qwen2_moe": ([2], 12),
    "qwen3_moe": ([1, 2], 12),
    "olmoe": ([1, 2], 24),
}


@pytest.mark.full
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_becomes_aoe_heals_and_answers_in_generate(
    model_type: str, tmp_path: Path
) -> None:
    moe_layers, rank = FAMILIES[model_type]
    saved = save_with_text(model_type, tmp_path / "theirs", max_position_embeddings=32)
    _with_template(saved.folder)
    data = small_data(tmp_path)
    data["data_path"] = [tmp_path / "cycle"]
    data["tokenizer_model"] = None  # the run's own
    import_folder(plan_import(saved.folder, flags(TRAINING)), tmp_path / "run")

    # In: the same answer as transformers' own.
    prompt = "zero one two three"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved.folder)
    assert _asked(tmp_path / "run", prompt) == _generated(theirs, prompt)

    # To AoE, and healed in another layout.
    aoe, healed = tmp_path / "aoe", tmp_path / "healed"
    ((layers, losses),) = run_distributed(
        1, _converted, tmp_path / "run", aoe, data | HEALING, rank
    )
    assert layers == moe_layers
    new = {"config": aoe / "config.yaml", "load": aoe, "save": healed}
    new |= {"expert_model_parallel_size": 2}
    ((code, printed),) = run_distributed(2, pretrain_here, [new])[0]
    assert code == 0
    ((_, converted),) = losses.values()
    (line,) = [line for line in printed.splitlines() if "validation |" in line]
    assert float(line.split("cycle ")[1].split()[0]) < 0.7 * converted

    # Out: transformers answers as the run does.
    exported = tmp_path / "exported"
    export_run(healed, exported)
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    assert type(model).__name__ == "MoeParallelForCausalLM"
    answer = _asked(healed, prompt)
    assert answer == _generated(model, prompt)
    assert answer.startswith(f"{prompt} four five")  # it has learned to count
    # The template came along through the conversion and the training.
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, trust_remote_code=True)
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.full
def test_the_documented_commands(tmp_path: Path) -> None:
    for name in ("tools", "pretrain_gpt_moe.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    save_with_text("mixtral", tmp_path / "models/mixtral")
    records = [json.dumps({"text": words(100, seed)}) + "\n" for seed in range(60)]
    (tmp_path / "my.jsonl").write_text("".join(records))
    commands = COMMANDS
    for documented, here in SMALLER.items():
        assert commands.count(documented) == 1, documented
        commands = commands.replace(documented, here)
    printed = run_block(commands, "", tmp_path)
    assert "iteration 12/12" in printed
    assert "saved exported/aoe: MoeParallelForCausalLM, " in printed
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported/aoe", trust_remote_code=True
    )
    prompt = "the expert reads"
    assert _asked(tmp_path / "runs/healed", prompt) == _generated(model, prompt)


def _with_template(folder: Path) -> None:
    file = folder / CONFIG_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))


def _asked(run: Path, prompt: str) -> str:
    """What tools/generate.py prints."""
    line = ["--load", run, "--prompt", prompt, "--tokens", 12, "--temperature", 0]
    result = run_tool_forked("generate.py", *line)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.rstrip("\n")


@torch.no_grad()
def _generated(model: Any, prompt: str) -> str:
    tokenizer = text_tokenizer()
    ids = torch.tensor([tokenizer.tokenize(prompt)])
    answer = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0]
    new = answer[ids.shape[1] :].tolist()
    if tokenizer.eod in new:
        new = list(islice(new, new.index(tokenizer.eod)))
    return prompt + tokenizer.detokenize(new)
