"""Test whether a token changes an earlier output, or an output of another sequence.

    python tools/probe_causality.py --config examples/quickstart.yaml --seq-length 32
    python tools/probe_causality.py --load runs/quickstart

The tool perturbs tokens of a random micro-batch of --micro-batch-size sequences of --seq-length
tokens, one at a time. It compares all outputs, in training and in evaluation mode, in fp64 on one
process. Exit codes: 0 every output depends only on the tokens up to it, 1 some output does not, 2
wrong input. Besides its own flags, the tool accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from moe_parallel.tool import Tool, check_positive, load_torch

if TYPE_CHECKING:
    from moe_parallel.config import Config
    from moe_parallel.evaluation.causality import Influence, Leak


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--config", metavar="FILE.yaml", help="probe this model with initial weights")
    tool.add_argument("--load", metavar="RUN", help="probe this checkpoint")
    tool.add_argument(
        "--perturbations", metavar="N", type=int, default=32,
        help="number of tokens to perturb, each twice (default: 32)",
    )  # fmt: skip
    return tool.run_with_training_flags(arguments, _probe)


def _probe(own: argparse.Namespace, flags: list[str]) -> int:
    check_positive(own, "perturbations")
    load_torch()

    import torch

    from moe_parallel.evaluation.causality import logits_of_gpt, measure_influence, sample_places
    from moe_parallel.platform.device import device
    from moe_parallel.training.standalone import (
        single_process,
        standalone_config,
        standalone_model,
        vocab_size_of,
    )

    config = standalone_config(flags, config=own.config, load=own.load)
    vocab_size, seed = vocab_size_of(config), config.training.seed
    shape = config.training.micro_batch_size, config.training.seq_length
    places = sample_places(*shape, own.perturbations, seed)
    print(f"{_model(config, own.load)}: {shape[0]} x {shape[1]} tokens, {len(places)} perturbed")
    sound = True
    with single_process(config) as groups:
        model, _ = standalone_model(config, vocab_size, groups)
        model.double()
        tokens_BS = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        for mode in ("training", "evaluation"):
            model.train(mode == "training")
            influence = measure_influence(
                logits_of_gpt(model), tokens_BS.to(device()), vocab_size, places=places
            )
            print(_verdict(mode, influence))
            sound = sound and not influence.future and not influence.across and influence.felt > 0
    return 0 if sound else 1


def _model(config: Config, load: str | None) -> str:

    experts = "dense" if config.moe.num_experts is None else config.selection.system
    return f"{experts}, {load or 'initial weights'}"


def _verdict(mode: str, influence: Influence) -> str:
    if not influence.felt:
        return f"{mode:<11} no verdict: no output changed with its own token"
    inside, between = influence.future, influence.across
    causal = "NOT CAUSAL" if inside else "causal"
    lines = [
        f"{mode:<11} {causal}: {_count(inside, influence.future_pairs)} (later token, earlier "
        f"output) pairs changed{_example(inside)}"
    ]
    if influence.across_pairs:
        apart = "INSTANCES MIX" if between else "instances apart"
        lines.append(
            f"{'':<11} {apart}: {_count(between, influence.across_pairs)} (token, output of "
            f"another instance) pairs changed{_example(between)}"
        )
    lines.append(
        f"{'':<11} rounding: {influence.noise:.1e}; a change counts above {influence.tolerance:.1e}"
    )
    return "\n".join(lines)


def _count(leaks: list[Leak], pairs: int) -> str:
    return f"{len(leaks):,} of {pairs:,}"


def _example(leaks: list[Leak]) -> str:
    if not leaks:
        return ""
    worst = max(leaks, key=lambda leak: leak.change)
    (b, s), (to_b, to_s) = worst.source, worst.target
    where = f"position {to_s}" if b == to_b else f"position {to_s} of instance {to_b}"
    return f"; most: position {s} of instance {b} changes {where} by {worst.change:.2g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
