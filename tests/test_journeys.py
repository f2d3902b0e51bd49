"""The journeys of a user, in their order, each by the commands of its page, in one folder.

What each step computes is tested elsewhere. Here the steps fit together: what one command writes,
the next one reads. Models are tiny, and text is made here.
"""

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.program import give_user, run_as_user

ROOT = Path(__file__).parents[1]

#: The flags that every model here has; `tiny.yaml` of the folder.
TINY = """
num-layers: 2
hidden-size: 32
num-attention-heads: 4
num-query-groups: 2
ffn-hidden-size: 48
num-experts: 4
moe-ffn-hidden-size: 48
moe-layer-freq: 1
seq-length: 32
micro-batch-size: 2
global-batch-size: 8
train-iters: 4
lr: 1e-2
lr-warmup-iters: 1
lr-decay-iters: 8
log-interval: 1
save-interval: 2
eval-interval: 4
eval-iters: 1
data-path: data/my_text_document
tokenizer-model: data/my_tokenizer
split: 90,10
"""
#: A system of one's own, in a module on Python's path.
MINE = (ROOT / "docs/systems/adding.md").read_text().split("```python\n")[1].split("```")[0]


class Journey(NamedTuple):
    """What a user wants, and the commands that lead there."""

    name: str
    commands: list[str]
    leaves: list[str] = []  # files, from the folder


TRAIN = "python pretrain_gpt_moe.py --config tiny.yaml"
TWO = "--nproc-per-node 2"
JOURNEYS = [
    Journey(
        "own text becomes a data set",
        [
            "python tools/preprocess_data.py --input my_texts --output-prefix data/my "
            "--vocab-size 300 --append-eod",
            "python tools/inspect_data.py data/my_text_document "
            "--tokenizer-model data/my_tokenizer",
        ],
        ["data/my_text_document.bin", "data/my_text_document.idx", "data/my_tokenizer"],
    ),
    Journey(
        "a model is trained on two ranks, and goes on in another layout",
        [
            f"{TRAIN} {TWO} --expert-model-parallel-size 2 --save runs/my --load runs/my "
            "--exit-interval 2",
            f"{TRAIN} {TWO} --tensor-model-parallel-size 2 --save runs/my --load runs/my",
        ],
        ["runs/my/metrics.jsonl", "runs/my/iter_0000004"],
    ),
    Journey(
        "another system, by one flag",
        [f"{TRAIN} --expert-selection aoe --aoe-low-rank-size 8 --save runs/aoe"],
    ),
    Journey(
        "a model is evaluated, talks, and is looked into",
        [
            "python tools/evaluate.py --load runs/my --documents",
            'python tools/generate.py --load runs/aoe --prompt "one two" --tokens 4',
            "python tools/analyze.py --load runs/my",
            "python tools/probe_causality.py --load runs/my",
            "python tools/probe_autonomy.py --load runs/my --eval-iters 1",
            "python tools/report.py runs/my runs/aoe --output report.html",
        ],
        ["runs/my/analysis/selections.parquet", "report.html"],
    ),
    Journey(
        "a model leaves for transformers and comes back",
        [
            "python tools/export_hf.py --load runs/my --output exported/my",
            "python load_export.py exported/my",
            "python make_llama.py models/llama",
            "python tools/import_hf.py --input models/llama --output runs/llama",
        ],
        ["runs/llama/config.yaml"],
    ),
    Journey(
        "a trained MoE becomes an AoE, and heals",
        [
            "python tools/convert.py --to aoe --load runs/my --save runs/start "
            "--aoe-low-rank-size 8 --train-iters 2",
            f"python pretrain_gpt_moe.py {TWO} --config runs/start/config.yaml --load runs/start "
            "--save runs/healed",
        ],
        ["runs/healed/iter_0000002"],
    ),
    Journey(
        "dense layers become experts",
        [
            f"{TRAIN} --num-experts none --save runs/dense",
            f"{TRAIN} --moe-use-upcycling --load runs/dense --save runs/experts",
            f"{TRAIN} --moe-dense-warmup-percent 50 --save runs/warm",
        ],
        ["runs/experts/iter_0000004", "runs/warm/iter_0000004"],
    ),
    Journey(
        "documents that are alike follow one another",
        [
            "python tools/order_by_similarity.py --data-path data/my_text_document "
            "--output-prefix data/similar --seq-length 32",
            f"{TRAIN} --data-path data/similar --expert-selection lory --lory-segment-length 8 "
            "--save runs/lory",
        ],
        ["runs/lory/iter_0000004"],
    ),
    Journey(
        "choices are recorded, replayed and forced",
        [
            f"{TRAIN} --save runs/traced --moe-router-trace runs/traced/trace",
            f"{TRAIN} --save runs/replayed --moe-router-replay runs/traced/trace",
            f"{TRAIN} --save runs/forced --moe-router-force-routing hot:1",
        ],
        ["runs/replayed/iter_0000004"],
    ),
    Journey(
        "a system of one's own is trained, evaluated and planned",
        [
            f"{TRAIN} {TWO} --expert-selection my_router:lucky --save runs/lucky",
            "python tools/evaluate.py --load runs/lucky --documents",
            "python tools/plan.py --config tiny.yaml --vocab-size 300 --cluster h100x8:1 --top 1 "
            "--expert-selection my_router:lucky",
        ],
    ),
    Journey(
        "sizes, checkpoints and plans are told",
        [
            "python tools/count_parameters.py --config tiny.yaml --save runs/none",
            "python tools/checkpoint.py show runs/my/iter_0000004 --tensors",
            "python tools/checkpoint.py diff runs/my/iter_0000002 runs/my/iter_0000004 || true",
            "python tools/plan.py --config tiny.yaml --vocab-size 300 --cluster h100x8:2 --top 3",
        ],
    ),
    Journey(
        "systems are compared, with intervals and a page",
        [
            "python tools/study/compare_selection.py --config study.yaml "
            "--selections topk,aoe,dense --seeds 2 --output studies/first",
        ],
        ["studies/first/table.md"],
    ),
    Journey(
        "a layer is a module of one's own model",
        ["python use_layer.py"],
    ),
]

SCRIPTS = {
    "load_export.py": """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer("one two", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=4)[0]))
""",
    "make_llama.py": """
import sys
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

tokenizer = AutoTokenizer.from_pretrained("data/my_tokenizer")
tokenizer.save_pretrained(sys.argv[1])
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )
).save_pretrained(sys.argv[1])
""",
    "use_layer.py": """
import torch
from moe_parallel import AoE

layer = AoE(16, num_experts=4, ffn_hidden_size=24, low_rank_size=4)
y = layer(torch.randn(2, 5, 16))
(y.square().mean() + layer.aux_loss).backward()
layer.after_step()
""",
    "my_router.py": MINE,
    "tiny.yaml": TINY,
    "study.yaml": TINY.replace("save-interval: 2\n", "") + "aoe-low-rank-size: 8\n",
}


@pytest.mark.full
def test_a_user_gets_there(tmp_path: Path) -> None:
    """One test, because each journey begins where others ended."""
    give_user(tmp_path)
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    for journey in JOURNEYS:
        print(f"\n{journey.name}")
        for command in journey.commands:
            run_as_user(["bash", "-ec", command], tmp_path)
        for file in journey.leaves:
            assert (tmp_path / file).exists(), f"{journey.name}: {file} is missing"
