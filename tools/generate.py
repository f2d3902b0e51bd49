"""Continue texts with a trained model, or talk to it.

    python tools/generate.py --load runs/my --prompt "def read(self" [--tokens 100]
    python tools/generate.py --load runs/my --input prompts.jsonl --output texts.jsonl
    python tools/generate.py --load runs/my --chat

The tool runs on one process, in fp32, whatever layout trained the model: it builds the model that
tools/export_hf.py would write, in memory, and transformers generates. A Lory model merges its
experts once, by the mean of the prompt, and uses them for the prompt and the new text. With
--lory-inference segment it routes each segment, as in training. Besides its own flags, the tool
accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, check_output, check_positive, load_torch, progress

if TYPE_CHECKING:
    from moe_parallel.generation import TextWriter


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    add = tool.add_argument
    add("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    add("--prompt", metavar="TEXT", nargs="+", help="texts that the model continues")
    add("--input", metavar="FILE", help="JSON lines with a prompt under the key `text`")
    add("--output", metavar="FILE", help="write JSON lines with `prompt` and `text` to this file")
    add("--chat", action="store_true", help="talk to the model in the terminal")
    add("--system", metavar="TEXT", default="", help="the text that begins a chat")
    add("--names", metavar="NAME", nargs=2, default=["User", "Model"],
        help="the speakers of a chat (default: User Model)")  # fmt: skip
    add("--tokens", metavar="N", type=int, default=100,
        help="max. number of new tokens of a text (default: 100)")  # fmt: skip
    add("--stop", metavar="TEXT", nargs="+", default=[], help="end a text before one of these")
    add("--temperature", metavar="X", type=float, default=0.8,
        help="number that divides the logits; 0: always the most probable token "
        "(default: 0.8)")  # fmt: skip
    add("--top-k", metavar="N", type=int,
        help="draw from the N most probable tokens (default: all)")  # fmt: skip
    add("--top-p", metavar="P", type=float, default=1.0,
        help="draw from the most probable tokens that together have probability P "
        "(default: 1, all)")  # fmt: skip
    add("--min-p", metavar="P", type=float, default=0.0,
        help="draw from tokens at least P times as probable as the most probable one "
        "(default: 0, all)")  # fmt: skip
    add("--repetition-penalty", metavar="X", type=float, default=1.0,
        help="number above 1 that makes repeated tokens less probable "
        "(default: 1, off)")  # fmt: skip
    add("--batch-size", metavar="N", type=int, default=8,
        help="number of texts at a time (default: 8)")  # fmt: skip
    add("--no-cache", action="store_true", help="compute all tokens again for each new one")
    return tool.run_with_training_flags(arguments, _write)


def _check(own: argparse.Namespace) -> dict[str, Any]:
    """The options of sampling. Raises InputError for a wrong flag."""
    check_load(own)
    given = [flag for flag in ("prompt", "input", "chat") if getattr(own, flag)]
    if not given:
        raise InputError("--prompt is not set: give a text to continue, or --input, or --chat")
    if len(given) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} exclude each other: give one of them")
    if own.output and own.chat:
        raise InputError("--output is for --prompt and --input: leave it out with --chat")
    check_positive(own, "tokens", "batch-size", "top-k")
    check_output(own)
    if "" in own.stop:
        raise InputError("--stop contains an empty text, which ends every text: leave it out")
    ranges = {
        "temperature": (0 <= own.temperature < float("inf"), "at least 0"),
        "top_p": (0 < own.top_p <= 1, "above 0 and at most 1"),
        "min_p": (0 <= own.min_p <= 1, "at least 0 and at most 1"),
        "repetition_penalty": (0 < own.repetition_penalty < float("inf"), "above 0"),
    }
    for name, (valid, rule) in ranges.items():
        if not valid:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} is {getattr(own, name)}: it must be {rule}")
    return {name: getattr(own, name) for name in ("top_k", *ranges)}


def _write(own: argparse.Namespace, flags: list[str]) -> None:
    sampling = _check(own)
    prompts = _prompts(own)
    load_torch()

    from moe_parallel.generation import TextWriter
    from moe_parallel.huggingface.export import model_in_memory, source_of

    source = source_of(own.load, flags)
    selection: Any = source.config.selection
    asked = any(flag.partition("=")[0] == "--lory-inference" for flag in flags)
    by_segment = asked and selection.lory_inference == "segment"
    if own.no_cache and selection.system == "lory" and not by_segment:
        raise InputError(
            "--no-cache: without a cache each new token would change the merge that Lory makes for "
            "the prompt: leave it out, or route each segment by --lory-inference segment"
        )
    writer = TextWriter(
        model_in_memory(source),
        source.tokenizer,
        source.config.training.seq_length,
        sampling,
        seed=source.config.training.seed,
        cache=not (own.no_cache or by_segment),
    )
    if own.chat:
        _chat(own, writer)
    else:
        _continue(own, prompts, writer)


def _prompts(own: argparse.Namespace) -> list[str]:
    from moe_parallel.data.text_files import read_texts

    prompts = list(read_texts(Path(own.input))) if own.input else own.prompt or []
    if own.input and not prompts:
        raise InputError(f"--input {own.input} has no lines: give a prompt on each")
    if "" in prompts:
        raise InputError(f"--{'input' if own.input else 'prompt'} has an empty text: write one")
    return list(prompts)


def _continue(own: argparse.Namespace, prompts: list[str], writer: TextWriter) -> None:
    from moe_parallel.data.atomic_files import write_atomically

    tokenizer = writer.tokenizer
    tokens = [[*tokenizer.beginning, *ids] for ids in tokenizer.tokenize_all(prompts)]
    longest = max(map(len, tokens))
    if longest >= writer.seq_length:
        raise InputError(
            f"--{'input' if own.input else 'prompt'} has {longest} tokens, and the model reads "
            f"--seq-length {writer.seq_length}: shorten it"
        )
    if len(prompts) == 1 and not own.output:
        print(prompts[0], end="", flush=True)
        writer.write(tokens, own.tokens, own.stop, show=_show)
        print()
        return
    with progress("texts", len(prompts), "text") as advance:
        texts = writer.write(tokens, own.tokens, own.stop, own.batch_size, done=advance)
    pairs = list(zip(prompts, texts, strict=True))
    if own.output:
        lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in pairs]
        write_atomically(Path(own.output), "\n".join(lines) + "\n")
    else:
        print("\n\n".join(prompt + text for prompt, text in pairs))


def _chat(own: argparse.Namespace, writer: TextWriter) -> None:
    from moe_parallel.generation import Chat, converse

    def answer(tokens: list[int], stop: str) -> str:
        (text,) = writer.write([tokens], own.tokens, (stop, *own.stop), show=_show)
        return text

    chat = Chat(own.system, *own.names)
    converse(chat, writer.tokenizer, writer.seq_length - 1, input, _show, answer)


def _show(text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
