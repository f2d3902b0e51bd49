"""Continue texts with a trained model, or talk to it.

    python tools/generate.py --load runs/my --prompt "def read(self" [--tokens 100]
    python tools/generate.py --load runs/my --input prompts.jsonl --output texts.jsonl
    python tools/generate.py --load runs/my --chat

The tool runs on one process, in fp32, whatever layout trained the model. A Lory model merges its
experts once, by the mean of the prompt, and uses them for the prompt and the new text. With
--lory-inference segment it routes each segment, as in training. Besides its own flags, the tool
accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, check_output, check_positive, load_torch, progress

if TYPE_CHECKING:
    from moe_parallel.generation.continuation import TextWriter
    from moe_parallel.generation.sampling import Sampling


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


def _check(own: argparse.Namespace) -> Sampling:
    from moe_parallel.generation.sampling import Sampling

    check_load(own)
    given = [flag for flag in ("prompt", "input", "chat") if getattr(own, flag)]
    if not given:
        raise InputError("--prompt is not set: give a text to continue, or --input, or --chat")
    if len(given) > 1:
        raise InputError(f"--{given[0]} and --{given[1]} exclude each other: give one of them")
    if own.output and own.chat:
        raise InputError("--output is for --prompt and --input: leave it out with --chat")
    check_positive(own, "tokens", "batch-size")
    check_output(own)
    if "" in own.stop:
        raise InputError("--stop contains an empty text, which ends every text: leave it out")
    names = (field.name for field in dataclasses.fields(Sampling))
    sampling = Sampling(**{name: getattr(own, name) for name in names})
    sampling.check()
    return sampling


def _write(own: argparse.Namespace, flags: list[str]) -> None:
    sampling = _check(own)
    prompts = _prompts(own)
    load_torch()

    from moe_parallel.generation.continuation import TextWriter
    from moe_parallel.generation.decode import Reuse, generation_config
    from moe_parallel.generation.language_model import GenerationModel
    from moe_parallel.training.standalone import (
        single_process,
        standalone_config,
        standalone_model,
        vocab_size_of,
    )
    from moe_parallel.training.text import open_tokenizer

    config = standalone_config(flags, load=own.load)
    config = generation_config(config, by_prompt="--lory-inference" not in flags)
    tokenizer = open_tokenizer(config)
    with single_process(config) as groups:
        vocab_size = vocab_size_of(config)
        chunk, _ = standalone_model(config, vocab_size, groups)
        chunk.eval()
        model = GenerationModel(chunk, groups, tokenizer.vocab_size, config, vocab_size)
        reuse = Reuse.of(config, cache=not own.no_cache)
        writer = TextWriter(model, tokenizer, sampling, reuse, config.training.seed)
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
    from moe_parallel.generation.continuation import Continuation

    tokenizer = writer.tokenizer
    tokens = [[*tokenizer.beginning, *ids] for ids in tokenizer.tokenize_all(prompts)]
    longest = max(map(len, tokens))
    if longest >= writer.seq_length:
        raise InputError(
            f"--{'input' if own.input else 'prompt'} has {longest} tokens, and the model reads "
            f"--seq-length {writer.seq_length}: shorten it"
        )
    limits = [Continuation(own.tokens, tuple(own.stop))] * len(prompts)
    streams = len(prompts) == 1 and not own.output
    if streams:
        print(prompts[0], end="", flush=True)
        writer.write(tokens, limits, 1, lambda _, text: print(text, end="", flush=True))
        print()
        return
    with progress("texts", len(prompts), "text") as advance:
        texts = writer.write(tokens, limits, own.batch_size, done=lambda _: advance(1))
    pairs = list(zip(prompts, texts, strict=True))
    if own.output:
        lines = [json.dumps({"prompt": p, "text": t}, ensure_ascii=False) for p, t in pairs]
        write_atomically(Path(own.output), "\n".join(lines) + "\n")
    else:
        print("\n\n".join(prompt + text for prompt, text in pairs))


def _chat(own: argparse.Namespace, writer: TextWriter) -> None:
    from moe_parallel.generation.chat import Chat, converse
    from moe_parallel.generation.continuation import Continuation

    def show(text: str) -> None:
        print(text, end="", flush=True)

    def answer(tokens: list[int], stops: Sequence[str]) -> str:
        limit = Continuation(own.tokens, (*stops, *own.stop))
        (text,) = writer.write([tokens], [limit], 1, lambda _, text: show(text))
        return text

    chat = Chat(own.system, *own.names)
    converse(chat, writer.tokenizer, writer.seq_length - 1, input, show, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
