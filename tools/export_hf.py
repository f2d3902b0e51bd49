"""Export a run to a folder that Hugging Face's transformers loads.

    python tools/export_hf.py --load runs/my --output exported/my
    python tools/export_hf.py --load runs/aoe/iter_0000200 --output exported/aoe --fold

The tool reads a checkpoint of any layout, a few tensors at a time, and writes safetensors, the
tokenizer, and a model card. A dense or top-k model becomes a plain architecture of transformers if
one computes the same (Llama, Mixtral, Qwen2-MoE, ...). Any other becomes MoeParallelForCausalLM,
whose code is copied next to the weights for trust_remote_code=True; `import moe_parallel.hf`
registers the same code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, load_torch, progress

GIB = 2**30


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument("--output", metavar="DIR", help="new folder for the exported model")
    tool.add_argument(
        "--architecture",
        metavar="NAME",
        default="auto",
        help="a class of transformers (MixtralForCausalLM, ...), own (MoeParallelForCausalLM), or "
        "auto: the first class of transformers that computes the same, otherwise own "
        "(default: auto)",
    )
    tool.add_argument(
        "--fold",
        action="store_true",
        help="store the product W_g = W_down W_up of each expert in place of W_up, so that fused "
        "kernels for SwiGLU experts compute it. AoE keeps W_down for the selection, and the "
        "experts become larger",
    )
    tool.add_argument(
        "--dtype",
        metavar="auto|float32|bfloat16",
        default="auto",
        help="data type of the exported weights, to which the fp32 masters of a run in bf16 are "
        "rounded; auto: that of the run (default: auto)",
    )
    tool.add_argument(
        "--max-file-size",
        metavar="GIB",
        type=float,
        default=4.0,
        help="maximum size of a file, in GiB; the tool needs this much memory and that of two "
        "tensors (default: 4)",
    )
    return tool.run(arguments, _export)


def _check(own: argparse.Namespace) -> None:
    check_load(own)
    if own.output is None:
        raise InputError("--output is not set: name a new folder")
    if own.dtype not in ("auto", "float32", "bfloat16"):
        raise InputError(f"--dtype is {own.dtype}: use auto, float32 or bfloat16")
    if not 0 < own.max_file_size < 2**20:
        raise InputError(f"--max-file-size is {own.max_file_size}: it must be above 0, in GiB")


def _export(own: argparse.Namespace) -> None:
    _check(own)
    load_torch()

    from moe_parallel.huggingface.export import ExportOptions, export, source_of

    options = ExportOptions(own.architecture, own.dtype, own.fold, int(own.max_file_size * GIB))
    with progress("weights", None, "B") as advance:
        done = export(source_of(own.load), Path(own.output), options, advance)
    for note in done.notes:
        print(note)
    written = done.written
    print(
        f"saved {own.output}: {done.architecture}, {written.parameters:,} parameters, "
        f"{written.dtype}, {written.size / 2**20:,.1f} MiB in {len(written.files)} "
        f"{'file' if len(written.files) == 1 else 'files'}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
