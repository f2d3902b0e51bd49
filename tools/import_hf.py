r"""Import a model of Hugging Face's transformers as a run folder.

    python tools/import_hf.py --input Mixtral-8x7B-v0.1 --output runs/mixtral
    python tools/generate.py --load runs/mixtral --prompt "Once"
    python pretrain_gpt_moe.py --nproc-per-node 8 --load runs/mixtral --finetune --save runs/tuned

--input is a folder with config.json, safetensors and a tokenizer. The architectures are Mixtral,
Qwen2-MoE, Qwen3-MoE and OLMoE, and dense Llama, Qwen2 and Qwen3 models, from which
--moe-use-upcycling makes experts. The run folder loads in any parallel layout. It has the weights
and no optimizer state, so training starts with --finetune.

The tensors are read and written one at a time, so the memory does not grow with the model. Besides
its own flags, the tool accepts those of pretrain_gpt_moe.py, which go into config.yaml; they cannot
change the model. docs/huggingface.md describes the path to AoE and back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, load_torch, progress


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--input", metavar="DIR", help="folder that save_pretrained wrote")
    tool.add_argument("--output", metavar="RUN", help="new run folder")
    tool.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="accept a folder with code of its own (auto_map). The code is not run: the weights "
        "are read as its model_type says",
    )
    return tool.run_with_training_flags(arguments, _import)


def _import(own: argparse.Namespace, flags: list[str]) -> None:
    for name in ("input", "output"):
        if getattr(own, name) is None:
            raise InputError(f"--{name} is not set: name a folder")
    load_torch()

    from moe_parallel.huggingface.importing import import_folder, import_summary, plan_import

    plan = plan_import(Path(own.input), flags, trust_remote_code=own.trust_remote_code)
    with progress("import", None, "B") as advance:
        imported = import_folder(plan, Path(own.output), advance)
    for name, value in import_summary(plan, imported).items():
        print(f"{name}: {value}")
    for name in imported.not_finite:
        print(f"warning: {name} has a NaN or an infinity, as in --input", file=sys.stderr)
    print(f"train on: --load {own.output} --finetune --save ANOTHER --data-path ...")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
