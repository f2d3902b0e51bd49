"""The minimum memory of a plan is never above the built size; too little memory is an error."""

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from moe_parallel.config import make_config, validate
from moe_parallel.errors import InputError
from moe_parallel.model import memory, parameters
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.training.engine import Engine
from moe_parallel.training.optimizer import optimizer_parts
from tests.distributed import run_distributed
from tests.model.test_parameters import AOE, MODELS, MOE, SHARED, VOCABULARY

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2, "moe_layer_freq": "[0]*6+[1]*6"},
    "pp 2, virtual": {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 3,
        "moe_layer_freq": "[1]*3+[0]*3+[0]*3+[1]*3",
    },
    "pp 2, untied": {
        "pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
    },
    "ep 2": {"expert_model_parallel_size": 2},
    "etp 2": {"expert_tensor_parallel_size": 2},
    "tp 2, etp 1, ep 2": {
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
}
SYSTEMS = {
    "topk": MOE | SHARED,
    "aoe": AOE,
    "aoe, gathered": AOE | {"aoe_gather_w_down": True},
}

Counts = dict[str, tuple[int, int, int, int]]


def _count(models: dict[str, dict[str, Any]], world_size: int) -> Counts:
    """By model: (counted dense, counted expert, built dense, built expert) on this rank."""
    counts: Counts = {}
    for name, options in models.items():
        config = make_config({"moe_backend": "reference", **options})
        validate(config, world_size)
        groups = initialize_groups(config.parallel, config.virtual_stages)
        model_parallel_cuda_manual_seed(1)
        built = {True: 0, False: 0}
        for chunk in parameters.model_without_storage(config, VOCABULARY, groups):
            for weight in chunk.parameters():
                built[not getattr(weight, "allreduce", True)] += weight.numel()
        held = memory.parameters_of_rank(config, VOCABULARY, groups)
        counts[name] = (held.dense, held.expert, built[False], built[True])
        destroy_groups()
    return counts


def _check(counts: Counts) -> None:
    for name, (dense, expert, built_dense, built_expert) in counts.items():
        counted, built = dense + expert, built_dense + built_expert
        assert 0.999 * built <= counted <= built, (name, counted, built)
        # Without ep, gradients of experts are reduced like those of dense layers.
        assert built_expert in (0, expert), (name, expert, built_expert)


def test_every_system_on_one_rank() -> None:
    models = {name: {"smear_sees_the_future": True, **o} if "smear" in name else o
              for name, o in MODELS.items()}  # fmt: skip
    models = {
        name: {"lory_segment_length": 64, **o} if "lory" in str(o) else o
        for name, o in models.items()
    }
    _check(run_distributed(1, _count, models, 1)[0])


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_rank_of_a_layout(system: str) -> None:
    models = {name: SYSTEMS[system] | layout for name, layout in LAYOUTS.items()}
    for of_rank in run_distributed(2, _count, models, 2):
        _check(of_rank)


SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "num_experts": 4,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
}
PRECISIONS = {
    "fp32": {},
    "fp32, distributed": {"use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "bf16, distributed": {"bf16": True, "use_distributed_optimizer": True},
}


def _engine_bytes(options: dict[str, Any]) -> tuple[int, int]:
    """(counted bytes, bytes of the engine's tensors after Adam has its state)."""
    config = make_config(SMALL | options)
    groups = initialize_groups(config.parallel)
    model_parallel_cuda_manual_seed(1)
    engine = Engine(config, 512, groups)
    for optimizer in optimizer_parts(engine.optimizer):
        optimizer.init_state_fn(optimizer.optimizer)
    tensors: list[torch.Tensor] = []
    for chunk in engine.chunks:
        tensors += [*chunk.parameters(), *(p.main_grad for p in chunk.parameters())]
    for optimizer in optimizer_parts(engine.optimizer):
        for weight, state in optimizer.optimizer.state.items():
            tensors += [weight, *(t for t in state.values() if isinstance(t, torch.Tensor))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return memory.least_memory(config, 512, groups), sum(storages.values())


@pytest.mark.parametrize("name", PRECISIONS)
def test_weights_gradients_and_optimizer_state(name: str) -> None:
    for counted, held in run_distributed(2, _engine_bytes, PRECISIONS[name]):
        assert 0.95 * held <= counted <= held


def _told(options: dict[str, Any], free: int) -> str | None:
    memory.free_memory = memory.free_host_memory = lambda: free
    config = make_config(SMALL | options)
    groups = initialize_groups(config.parallel)
    try:
        memory.check_memory(config, 512, groups)
    except InputError as error:
        return str(error)
    finally:
        destroy_groups()
    return None


def test_what_does_not_fit_is_one_line_on_every_rank() -> None:
    first, second = run_distributed(2, _told, {"hidden_size": 32768}, 20 << 30)
    assert first == second and first is not None and first.isprintable()
    assert first.startswith(
        "the model, its gradients and optimizer state take 259.5 GiB or more on 2 ranks, and "
        "20.0 GiB are free there: lower --num-layers, --hidden-size"
    )
