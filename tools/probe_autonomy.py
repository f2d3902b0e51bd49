"""Evaluate a trained MoE with norms of its experts' activations in place of its routers.

    python tools/probe_autonomy.py --load runs/my [--eval-iters 10]

This is the *routerless probe* (moe_parallel/evaluation/routerless_probe.py), the experiment in
section 3.1 of the AoE paper. The norm of an expert's activation is taken at five nodes of the
expert, as three norms, with two kinds of routing probabilities, and compared with the router and
with random selection. The tool prints the held-out loss in nats per token on --eval-iters global
batches of each domain. It runs on one process, in fp32, whatever layout trained the model, and
changes and writes nothing. Besides its own flags, it accepts those of pretrain_gpt_moe.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moe_parallel.errors import InputError
from moe_parallel.tool import Tool, check_load, load_torch

if TYPE_CHECKING:
    from moe_parallel.config import Config
    from moe_parallel.evaluation.routerless_probe import Probe
    from moe_parallel.parallel import Groups
    from moe_parallel.training.text import Text


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    tool.add_argument("--load", metavar="RUN", help="run folder, or one of its checkpoints")
    tool.add_argument(
        "--config", metavar="FILE.yaml", help="configuration (default: the checkpoint's own)"
    )
    tool.add_argument(
        "--topk", metavar="K", type=int, help="experts per token (default: the checkpoint's K)"
    )
    return tool.run_with_training_flags(arguments, _probe)


def _probe(own: argparse.Namespace, flags: list[str]) -> None:
    check_load(own)
    load_torch()

    from moe_parallel.evaluation.routerless_probe import Table, probes, probing
    from moe_parallel.training.standalone import (
        single_process,
        standalone_config,
        standalone_model,
    )
    from moe_parallel.training.text import open_text

    config = standalone_config(flags, config=own.config, load=own.load)
    router, random, *others = probes(_topk(config, own.topk), config.training.seed)
    text = open_text(config)
    with single_process(config) as groups:
        model, _ = standalone_model(config, text.vocab_size, groups)
        losses = _evaluation(config, text, model, groups)

        def measure(probe: Probe) -> dict[str, float]:
            with probing(model, probe):
                return losses()

        table = Table(measure(router), measure(random))
        print(table.head())
        print(table.row(router, table.router))
        print(table.row(random, table.random), flush=True)
        for probe in others:
            print(table.row(probe, measure(probe)), flush=True)


def _topk(config: Config, asked: int | None) -> int:
    """Experts per token."""
    experts = config.moe.num_experts
    k = config.selection.choices_per_token if asked is None else asked
    if experts is None:
        raise InputError("the model is dense: probe one with experts and routers")
    if k is None:
        raise InputError(
            "--topk is not set: experts per token vary in this model, and the probe takes a number"
        )
    if not 1 <= k <= experts:
        raise InputError(f"--topk is {k}: choose from 1 to the {experts} experts of a layer")
    return k


def _evaluation(
    config: Config, text: Text, model: Any, groups: Groups
) -> Callable[[], dict[str, float]]:
    """A function that measures the model in its current state: nats/token by domain, and over all
    domains if there are several."""
    from moe_parallel.config import LoggingConfig
    from moe_parallel.evaluation.text_loss import measure_text_loss
    from moe_parallel.platform.device import device

    datasets = text.datasets(config).valid
    if not datasets:
        raise InputError(f"--split {config.data.split} leaves no validation text: change it")
    sizes = text.bytes_per_token(device())
    # A model is measured here even if its run had no evaluation.
    iters = config.logging.eval_iters or LoggingConfig().eval_iters
    samples = iters * config.training.global_batch_size

    def losses() -> dict[str, float]:
        found = {
            domain: measure_text_loss([model], dataset, sizes, config.training, groups, samples)
            for domain, dataset in datasets.items()
        }
        by_text = {domain: each.loss for domain, each in found.items()}
        if len(found) > 1:
            tokens = sum(each.tokens for each in found.values())
            by_text["all"] = sum(each.nats for each in found.values()) / tokens
        return by_text

    return losses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
