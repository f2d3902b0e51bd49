"""Lory learns domains if adjacent segments share one, and hardly anything if they do not.

There are eight languages of bigrams, each a random table. An instance has one of them throughout
(as with similarity batching), or another one in every segment (random batching). A dense layer
must learn all eight in the width of one expert; merged experts can divide them.

Losses are means over the segments after the first, in nats, on held-out instances.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import make_config
from moe_parallel.model.forward import language_model_loss, run_micro_batches
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.engine import Engine
from tests.distributed import run_distributed

DOMAINS, VOCABULARY, LENGTH, SEGMENT = 8, 64, 128, 32
STEPS, HELD_OUT, SEQUENCES = 320, 16, 8  # SEQUENCES: in a batch

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 32,
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 32,
    "init_method_std": 0.1,
    "seq_length": LENGTH,
    "micro_batch_size": SEQUENCES,
    "global_batch_size": SEQUENCES,
    "train_iters": STEPS,
    "lr": 2e-2,
    "min_lr": 1e-3,
    "lr_warmup_iters": 20,
    "weight_decay": 0.0,
}
SEGMENTS = {"num_experts": 8, "lory_segment_length": SEGMENT}
DENSE: dict[str, Any] = {}
LORY = SEGMENTS | {"expert_selection": "lory"}
PREFIX = SEGMENTS | {"expert_selection": "lory_prefix"}
SEGMENT_EXPERT_CHOICE = SEGMENTS | {"expert_selection": "segment_expert_choice"}

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batching:
    """How often the domain changes within an instance."""

    segments_alike: int

    def batches(self, seed: int) -> list[Batch]:
        """The same batches for every system: first those for training, then those held out."""
        generator = torch.Generator().manual_seed(seed)
        logits = 3 * torch.randn(DOMAINS, VOCABULARY, VOCABULARY, generator=generator)
        tables = torch.softmax(logits, dim=2)
        return [self._batch(tables, generator) for _ in range(STEPS + HELD_OUT)]

    def _batch(self, tables: torch.Tensor, generator: torch.Generator) -> Batch:
        stretch = self.segments_alike * SEGMENT
        domains = torch.randint(DOMAINS, (SEQUENCES, LENGTH // stretch), generator=generator)
        domains = domains.repeat_interleave(stretch, dim=1)
        text = [torch.randint(VOCABULARY, (SEQUENCES,), generator=generator)]
        for position in range(LENGTH):
            following = tables[domains[:, position], text[-1]]
            text.append(torch.multinomial(following, 1, generator=generator)[:, 0])
        tokens = torch.stack(text, dim=1)
        return {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(LENGTH).expand(SEQUENCES, -1),
            "loss_mask": torch.ones(SEQUENCES, LENGTH),
        }


SIMILAR, RANDOM = Batching(LENGTH // SEGMENT), Batching(1)


def losses(seed: int, batching: Batching, systems: list[dict[str, Any]]) -> list[float]:
    """The loss of each system after training."""
    batches = batching.batches(seed)
    return [_loss(seed, system, batches) for system in systems]


def _loss(seed: int, system: dict[str, Any], batches: list[Batch]) -> float:
    config = make_config(SIZES | system | {"seed": seed + 1})
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(config.training.seed)
    engine = Engine(config, VOCABULARY, groups)
    for batch in batches[:STEPS]:
        engine.step(iter([batch]))
    for chunk in engine.chunks:
        chunk.eval()
    with torch.no_grad():
        reported = run_micro_batches(
            engine.chunks,
            _after_first_segment(batches[STEPS:]),
            config.training,
            HELD_OUT,
            language_model_loss,
            forward_only=True,
        )
    loss, _ = engine.global_loss([report["sums"] for report in reported])
    destroy_groups()
    return loss


def _after_first_segment(batches: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        mask = batch["loss_mask"].clone()
        mask[:, :SEGMENT] = 0
        yield {**batch, "loss_mask": mask}


# Measured (seeds 0, 1, 2; the test runs the first):
#   similar  dense 2.552 2.633 2.413   lory 2.258 2.337 2.167
#            prefix 2.455 2.547 2.317   segment-level expert choice 2.374 2.444 2.270
#   random   dense 3.269 3.260 3.123   lory 3.257 3.252 3.091
@pytest.mark.full
def test_domains_are_divided_where_neighbors_are_similar() -> None:
    systems = [DENSE, LORY, PREFIX, SEGMENT_EXPERT_CHOICE]
    ((dense, lory, prefix, choice),) = run_distributed(1, losses, 0, SIMILAR, systems, timeout=900)
    ((dense_random, lory_random),) = run_distributed(
        1, losses, 0, RANDOM, [DENSE, LORY], timeout=900
    )
    gain, gain_random = dense - lory, dense_random - lory_random
    assert gain > 0.2  # 0.294, 0.296, 0.246
    assert gain > 3 * gain_random  # 0.012, 0.008, 0.032
    assert lory < prefix - 0.05  # 0.197, 0.210, 0.150 below
    assert lory < choice - 0.03  # 0.116, 0.107, 0.103 below
