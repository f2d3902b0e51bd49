"""Loss and bits per byte: compared with a direct computation, in every layout."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.utils import unwrap_model
from torch import distributed as dist

from moe_parallel.config import parse_command_line, validate
from moe_parallel.data.datasets import texts
from moe_parallel.evaluation.text_loss import TextLoss, measure_text_loss
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.engine import Engine
from moe_parallel.training.pretrain import seed_everything
from moe_parallel.training.run_folder import open_checkpoints
from moe_parallel.training.text import open_text
from tests.distributed import run_distributed
from tests.program import AOE, SMALL, flags, pretrain_here, small_data

MODEL = SMALL | AOE | {"num_layers": 4, "aoe_wide_size": 40}
LAYOUTS = {
    "dp": {},
    "dp, large micro-batches": {"micro_batch_size": 4},
    "ep": {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "vpp": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1},
}
SAMPLES = 7  # not divisible into micro-batches
FIRST_PART = 10  # tokens of each sequence that `later` omits


class _Model:
    """A trained model in a layout, with its held-out text."""

    def __init__(self, options):
        config = parse_command_line(flags(options))
        validate(config, dist.get_world_size())
        groups = initialize_groups(config.parallel, config.virtual_stages)
        seed_everything(config, groups)
        self.text = open_text(config)
        self.datasets = self.text.datasets(config)
        self.engine = Engine(config, self.text.vocab_size, groups)
        checkpoints = open_checkpoints(config, self.text.vocab_size, groups)
        checkpoints.load(Path(config.checkpoint.load), self.engine.chunks, None, None)
        self.config, self.groups = config, groups

    def close(self):
        destroy_groups()
        destroy_num_microbatches_calculator()

    def evaluate(self, domain, samples, micro_batch_size=None):
        """The loss of the text and of its later part, and the choices of experts in each layer."""
        training = self.config.training
        if micro_batch_size is not None:
            training = replace(training, micro_batch_size=micro_batch_size)
        with self.engine.statistics.evaluating() as routing:
            found = measure_text_loss(
                self.engine.chunks,
                self.datasets.valid[domain],
                self.text.bytes_per_token(self.engine.device),
                training,
                self.groups,
                samples,
                FIRST_PART,
                self.engine.statistics,
            )
        layers = routing.reduced([None]).summaries()
        return [
            *((part.nats, part.tokens, part.num_bytes) for part in (found, found.later)),
            [layer["tokens_per_expert"] for layer in layers],
        ]

    def directly(self, domain, samples):
        return [self._directly(domain, samples, start) for start in (0, FIRST_PART)]

    @torch.no_grad()
    def _directly(self, domain, samples, start):
        """The same sums from logits, sample by sample; bytes and tokens are those of the text."""
        (chunk,) = unwrap_model(self.engine.chunks)
        chunk.eval()
        dataset, tokenizer = self.datasets.valid[domain], self.text.tokenizer
        nats, tokens, num_bytes = 0.0, 0, 0
        for number in range(len(dataset) if samples is None else samples):
            sample = dataset[number]
            logits_1SV = chunk(sample["tokens"][None], sample["position_ids"][None], None)
            log_p_SV = logits_1SV[0].double().log_softmax(-1)
            for place, label in enumerate(sample["labels"].tolist()):
                if sample["loss_mask"][place] and place >= start:
                    nats -= log_p_SV[place, label].item()
                    tokens += 1
                    ending = label == tokenizer.eod
                    num_bytes += 0 if ending else tokenizer.bytes_per_token[label]
        return nats, tokens, int(num_bytes)

    def held_out(self, domain):
        """(tokens, bytes) of the held-out documents; a document's end is a token without bytes."""
        dataset, tokenizer = self.datasets.valid[domain], self.text.tokenizer
        documents = list(texts(dataset, tokenizer))
        tokens = sum(len(tokenizer.tokenize(text)) + 1 for text in documents)
        return tokens, sum(len(text.encode()) for text in documents)


def _on_one_rank(options, start):
    pretrain_here([start])
    model = _Model(options)
    found = {
        domain: {
            samples: (model.evaluate(domain, samples), model.directly(domain, samples))
            for samples in (None, SAMPLES)
        }
        | {
            "text": model.held_out(domain),
            "samples": len(model.datasets.valid[domain]),
            "micro-batches": [model.evaluate(domain, SAMPLES, size)[2] for size in (1, 4, 5, 7)],
        }
        for domain in ("cycle", "noise")
    }
    model.close()
    return found


def _on_two_ranks(runs):
    found = []
    for options in runs:
        model = _Model(options)
        found.append([model.evaluate("noise", samples) for samples in (None, SAMPLES)])
        model.close()
    return found


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perplexity")
    return MODEL | small_data(folder) | {"load": folder / "run"}


@pytest.fixture(scope="module")
def on_one_rank(options):
    """By domain: the results of `evaluate` and of a direct computation, of all and some samples."""
    start = {name: value for name, value in options.items() if name != "load"}
    start |= {"save": options["load"], "train_iters": 20, "exit_interval": 15}
    return run_distributed(1, _on_one_rank, options, start)[0]


@pytest.mark.parametrize("domain", ["cycle", "noise"])
@pytest.mark.parametrize("samples", [None, SAMPLES])
def test_evaluate_is_what_the_model_says_of_each_token(on_one_rank, domain, samples):
    (whole, later, _), both = on_one_rank[domain][samples]
    for (nats, *counts), direct in zip((whole, later), both, strict=True):
        assert nats == pytest.approx(direct[0], rel=1e-6)
        assert counts == list(direct[1:])
    assert 0 < later[1] < whole[1]


@pytest.mark.parametrize("domain", ["cycle", "noise"])
def test_every_held_out_token_counts_once(on_one_rank, domain):
    found = on_one_rank[domain]
    (_, tokens, num_bytes), *_ = found[None][0]
    all_tokens, all_bytes = found["text"]
    length = MODEL["seq_length"]
    assert tokens == all_tokens - 1  # no token precedes the first
    assert 0 < all_bytes - num_bytes < 10  # the bytes of that first token
    assert found["samples"] == math.ceil(tokens / length)
    assert tokens % length  # so the last sample is partly masked


@pytest.mark.parametrize("domain", ["cycle", "noise"])
def test_no_padding_counts_in_the_routing(on_one_rank, domain):
    alone, *others = on_one_rank[domain]["micro-batches"]
    assert others == [alone] * 3
    choices = SAMPLES * MODEL["seq_length"] * 2
    assert [sum(layer) for layer in alone] == [choices] * MODEL["num_layers"]


@pytest.fixture(scope="module")
def on_two_ranks(options, on_one_rank):
    layouts = [options | layout for layout in LAYOUTS.values()]
    return run_distributed(2, _on_two_ranks, layouts)


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_does_not_matter(on_one_rank, on_two_ranks, name):
    place = list(LAYOUTS).index(name)
    assert on_two_ranks[0][place] == on_two_ranks[1][place]
    for samples, found in zip((None, SAMPLES), on_two_ranks[0][place], strict=True):
        expected, _ = on_one_rank["noise"][samples]
        # Rounding may exchange the experts of a token.
        assert list(map(sum, found[2])) == list(map(sum, expected[2]))
        for part, wanted in zip(found[:2], expected[:2], strict=True):
            assert part[0] == pytest.approx(wanted[0], rel=1e-6)
            assert part[1:] == wanted[1:]


def test_bits_per_byte_by_hand():
    # 6 tokens of 2 nats for 8 bytes: 12 nats are 12 / 0.6931 = 17.312 bits.
    text = TextLoss(nats=12.0, tokens=6, num_bytes=8)
    assert text.loss == 2.0
    assert text.bits_per_byte == pytest.approx(17.312340 / 8, rel=1e-6)
