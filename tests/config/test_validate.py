"""Every rule between options is broken once; each error is one line with a remedy."""

from typing import Any

import pytest

from moe_parallel.config import Config, make_config, validate
from moe_parallel.errors import InputError

#: A small model that every rule accepts, on one rank.
VALID: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "num_experts": 4,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 20,
    "lr_warmup_iters": 2,
}
AOE = {"expert_selection": "aoe", "aoe_low_rank_size": 8}
PROFILE = {"profile": True, "save": "run"}
FUSED = {"gradient_accumulation_fusion": True}
VIRTUAL = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}


def config(**options: Any) -> Config:
    return make_config({**VALID, **options})


@pytest.mark.parametrize(
    ("options", "world"),
    [
        ({}, 1),
        (AOE, 1),
        ({"num_experts": None, "moe_ffn_hidden_size": None}, 4),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 4),
        ({"expert_tensor_parallel_size": 2, "moe_dispatch_parts": 4}, 2),
        ({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, 4),
        (VIRTUAL, 4),
        ({"num_query_groups": 2}, 1),
        ({"hidden_size": 30, "kv_channels": 10, "qk_layernorm": True, "add_qkv_bias": True}, 1),
        ({"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}, 1),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 18}, 1),
        ({"lr_decay_iters": 40}, 1),
        ({"split": "1"}, 1),
        ({"split": "0.9, 0.1, 0"}, 1),
        ({"save": "runs/x", "save_interval": 5, "keep_last": 2, "async_save": True}, 1),
        ({**FUSED, "num_experts": None}, 1),
        ({**AOE, **FUSED, "bf16": True, "moe_backend": "reference"}, 1),
        ({"deterministic_mode": True, "attention_backend": "flash"}, 1),
        ({"clip_grad": 0, "moe_aux_loss_coeff": 0, "min_lr": 0, "weight_decay": 0}, 1),
    ],
)
def test_valid(options: dict[str, Any], world: int) -> None:
    validate(config(**options), world)


#: Options that break a rule, by the error.
BROKEN: dict[str, dict[str, Any]] = {
    # heads, widths, vocabulary
    "--hidden-size is 30, which --num-attention-heads 4 .* multiple of 4": {"hidden_size": 30},
    "--hidden-size 12 .* --num-attention-heads 4 .* odd.* change one": {"hidden_size": 12},
    "--kv-channels is 7, .* an even number": {"kv_channels": 7},
    "--qk-layernorm-all-heads .* --qk-layernorm .* too": {"qk_layernorm_all_heads": True},
    "--num-attention-heads is 4, which --num-query-groups 3 .*choose": {"num_query_groups": 3},
    "--num-attention-heads is 2, which --tensor-model-parallel-size 4 .* multiple of 4": {
        "num_attention_heads": 2,
        "tensor_model_parallel_size": 4,
    },
    "--num-query-groups is 1, which --tensor-model-parallel-size 2 .* multiple of 2": {
        "num_query_groups": 1,
        "tensor_model_parallel_size": 2,
    },
    "--ffn-hidden-size is 49, which --tensor-model-parallel-size 2 .* multiple of 2": {
        "ffn_hidden_size": 49,
        "moe_ffn_hidden_size": 48,
        "tensor_model_parallel_size": 2,
    },
    "--make-vocab-size-divisible-by is 1, which --tensor-model-parallel-size 2 .* multiple": {
        "make_vocab_size_divisible_by": 1,
        "tensor_model_parallel_size": 2,
    },
    # experts
    "--moe-router-topk is 5, above --num-experts 4: choose at most 4": {"moe_router_topk": 5},
    "--moe-router-topk is 5, above --num-experts 4": {**AOE, "moe_router_topk": 5},
    "--expert-model-parallel-size is 2, but the model is dense: set --num-experts": {
        "num_experts": None,
        "expert_model_parallel_size": 2,
    },
    "--moe-router-topk is 1, but .*num-experts": {"num_experts": None, "moe_router_topk": 1},
    "--expert-selection is 'aoe', but the model is dense: set --n": {**AOE, "num_experts": None},
    "--moe-layer-freq is '2', but the model is dense: set --num-experts, or leave": {
        "num_experts": None,
        "moe_layer_freq": "2",
    },
    "--num-experts is 6, which --expert-model-parallel-size 4 .* multiple of 4": {
        "num_experts": 6,
        "expert_model_parallel_size": 4,
    },
    "--moe-dispatch-parts is 2, but --expert-model-parallel-size is 1, .*: raise it or leave": {
        "moe_dispatch_parts": 2
    },
    "--moe-dispatch-parts is 4, which does not divide the 2 experts of a rank .*: choose a d": {
        "moe_dispatch_parts": 4,
        "expert_model_parallel_size": 2,
    },
    "--moe-dispatch-parts is 2, but --expert-selection lory merges .*: leave the parts out": {
        "moe_dispatch_parts": 2,
        "expert_selection": "lory",
        "lory_segment_length": 8,
        "tensor_model_parallel_size": 2,
    },
    "--moe-dispatch-parts is 2, but the model is dense: set --num-experts": {
        "num_experts": None,
        "moe_dispatch_parts": 2,
    },
    "expert width is 47, which --expert-tensor-parallel-size 2 .* --moe-ffn-hidden-size": {
        "moe_ffn_hidden_size": 47,
        "expert_tensor_parallel_size": 2,
    },
    "expert width is 47, which --expert-tensor-parallel-size 2 .* --aoe-wide-size": {
        **AOE,
        "aoe_wide_size": 47,
        "tensor_model_parallel_size": 2,
    },
    "Eq. 5 .* width of -7: lower --aoe-low-rank-size": {**AOE, "aoe_low_rank_size": 200},
    "--moe-layer-freq .* leaves no MoE layer.* remove --num-exp": {"moe_layer_freq": "[0]*4"},
    "--moe-layer-freq is '.1.*5': .* 4 zeros and ones such as": {"moe_layer_freq": "[1]*5"},
    "--moe-activation-budget is 2.5, .*--moe-pad-expert-input-to-capacity .*: remove one": {
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_activation_budget": 2.5,
    },
    "--moe-pad-expert-input-to-capacity needs a capacity: set --moe-expert-capacity-factor": {
        "moe_pad_expert_input_to_capacity": True
    },
    "--moe-token-drop-policy needs a capacity: set": {"moe_token_drop_policy": "position"},
    "--moe-capacity-counts-topk needs a capacity: set": {"moe_capacity_counts_topk": False},
    # layout
    "--seq-length is 15, which --tensor-model-parallel-size 2 .* multiple of 2": {
        "seq_length": 15,
        "tensor_model_parallel_size": 2,
    },
    "--seq-length is 18. --context-parallel-size 2 .* 4 chunks: choose a multiple of 4": {
        "seq_length": 18,
        "context_parallel_size": 2,
    },
    "--seq-length is 12.* 4 chunks, and --tensor-model-parallel-size 4 .* a multiple of 8": {
        "seq_length": 12,
        "context_parallel_size": 2,
        "tensor_model_parallel_size": 4,
    },
    "--attention-backend is local, .* --context-parallel-size is 2: choose auto, flash,": {
        "context_parallel_size": 2,
        "attention_backend": "local",
    },
    "--attention-backend is transformer_engine, .* --context-parallel-size is 2: choose auto,": {
        "context_parallel_size": 2,
        "attention_backend": "transformer_engine",
    },
    "--overlap-param-gather .* add --use-distributed-optimizer": {"overlap_param_gather": True},
    "--overlap-param-gather .* --overlap-grad-reduce .* add that flag": {
        "overlap_param_gather": True,
        "use_distributed_optimizer": True,
    },
    "--ddp-bucket-size is 9, but without --overlap-grad-reduce": {"ddp_bucket_size": 9},
    "--sequence-parallel .* --tensor-model-parallel-size is 1:": {"sequence_parallel": True},
    "--num-layers is 5, which --pipeline-model-parallel-size 2 .* multiple of 2": {
        "num_layers": 5,
        "pipeline_model_parallel_size": 2,
    },
    "--num-layers-per-virtual-pipeline-stage is 1, but --pipeline-model-parallel-size is 1": {
        "num_layers_per_virtual_pipeline_stage": 1
    },
    "--num-layers-per-virtual-pipeline-stage is 2: it must divide the 3 layers": {
        **VIRTUAL,
        "num_layers": 6,
        "num_layers_per_virtual_pipeline_stage": 2,
    },
    "--num-layers-per-virtual-pipeline-stage is 2: it must divide the 2 layers": {
        **VIRTUAL,
        "num_layers_per_virtual_pipeline_stage": 2,
    },
    # batch
    "--global-batch-size 3 makes 3 micro-batches, but virtual .* a multiple of --pipeline": {
        **VIRTUAL,
        "global_batch_size": 3,
    },
    "--deterministic-mode: --attention-backend fused .* is not deterministic: choose auto": {
        "deterministic_mode": True,
        "attention_backend": "fused",
    },
    # schedule
    "--min-lr is 0.0001, above --lr 1e-05: choose at most --lr": {"lr": 1e-5, "min_lr": 1e-4},
    "--lr-warmup-iters is 20: it must be below the 20 iterations": {"lr_warmup_iters": 20},
    "--lr-warmup-iters is 2: it must be below the 2 iterations": {"lr_decay_iters": 2},
    "--lr-wsd-decay-iters is 19: it must be at most the 18 iter": {"lr_wsd_decay_iters": 19},
    "--adam-beta1 is 1.0: it must be below 1": {"adam_beta1": 1.0},
    "--adam-beta2 is 1.5: it must be below 1": {"adam_beta2": 1.5},
    "--muon-momentum is 0.95, and --optimizer is adam: remove it, or choose muon": {
        "muon_momentum": 0.95
    },
    "--use-distributed-optimizer divides Adam's state, and --optimizer is muon: remove one": {
        "optimizer": "muon",
        "use_distributed_optimizer": True,
    },
    # data and checkpoints
    "--split is 'garbage': it takes up to three parts such as 969,30,1": {"split": "garbage"},
    "--split is '0,1,0': .* the first above 0": {"split": "0,1,0"},
    "--split is '9,-1,0': .* none of them negative": {"split": "9,-1,0"},
    "--split is '1,nan,1'": {"split": "1,nan,1"},
    "--split is '1,inf,1'": {"split": "1,inf,1"},
    "--keep-last .*: also set --save": {"keep_last": 2},
    "--save-interval .*: set --save too": {"save_interval": 2},
    "--async-save needs a folder to save in: set --save too": {"async_save": True},
    "--profile needs a folder to write to: set --save": {"profile": True},
    "--profile-step-end is 4: it must be greater than --profile-step-start, which is 4": {
        **PROFILE,
        "profile_step_start": 4,
        "profile_step_end": 4,
    },
    "--profile-step-start is 21, after the last of --train-iters 20": {
        **PROFILE,
        "profile_step_start": 21,
        "profile_step_end": 22,
    },
    "--profile-ranks has 1, but the ranks are 0 to 0": {**PROFILE, "profile_ranks": [0, 1]},
    "--profile-ranks is -1: it must be at least 0": {**PROFILE, "profile_ranks": [0, -1]},
    "--gradient-accumulation-fusion .* --fp8-format hybrid .* Engine: remove one of them": FUSED
    | {"bf16": True, "fp8_format": "hybrid"},
    "--cuda-graph-warmup-steps 5, but no step is recorded: set --cuda-graph-impl": {
        "cuda_graph_warmup_steps": 5
    },
    # ranges
    "--num-layers is 10001: it must be at most 10000": {"num_layers": 10_001},
    "--vocab-size is 2147483648: it must be at most 2147483647": {"vocab_size": 2**31},
    "--seed is 0x1000.*: it must be at most 2147483647": {"seed": 1 << 20_000},
    "--distributed-timeout-minutes is .* at most": {"distributed_timeout_minutes": 1e300},
}
#: Options, and a number of ranks that does not go with them.
OF_RANKS: list[tuple[dict[str, Any], int, str]] = [
    (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        2,
        "2 ranks cannot .* --tensor-model-parallel-size 2 x --pipeline-.*: start a multiple of 4",
    ),
    (
        {"expert_model_parallel_size": 4},
        2,
        "2 ranks cannot .* --expert-model-parallel-size 4 .*start a multiple of 4 ranks",
    ),
    (
        {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2},
        2,
        "2 ranks cannot .* --expert-tensor-parallel-size 2 x --expert-model-parallel-size 2",
    ),
    (
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
        2,
        "2 ranks cannot .* --context-parallel-size 2 x --pipeline-.* a multiple of 4 ranks",
    ),
    (
        {"global_batch_size": 9},
        2,
        "--global-batch-size is 9, not a multiple of --micro-batch-size 1 x 2 .*: choose",
    ),
]
AT_LEAST_0 = """
seed lr min_lr lr_warmup_iters weight_decay adam_beta1 adam_beta2 clip_grad moe_aux_loss_coeff
moe_z_loss_coeff eval_iters loss_chunk_size
""".split()
AT_LEAST_1 = """
num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size rotary_base
max_position_embeddings make_vocab_size_divisible_by num_experts moe_ffn_hidden_size moe_router_topk
tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
context_parallel_size
expert_model_parallel_size expert_tensor_parallel_size micro_batch_size global_batch_size seq_length
train_iters exit_interval lr_decay_iters lr_wsd_decay_iters vocab_size save_interval keep_last
cuda_graph_warmup_steps
moe_dispatch_parts log_interval eval_interval ddp_bucket_size profile_step_start
aoe_low_rank_size aoe_wide_size muon_num_ns_steps
""".split()
ABOVE_0 = """
norm_epsilon rope_scaling_factor init_method_std moe_expert_capacity_factor moe_activation_budget
distributed_timeout_minutes hang_timeout adam_eps
exit_duration_in_mins machine_sample_seconds peak_tflops muon_extra_scale_factor
""".split()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse(options: dict[str, Any], message: str, world: int = 0) -> None:
    """`world`: the number of ranks; 0 stands for as few as the layout needs."""
    whole = config(**options)
    parallel = whole.parallel
    dense = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    experts = parallel.expert_model_parallel_size * (parallel.expert_tensor_parallel_size or 1)
    with pytest.raises(InputError, match=message) as caught:
        validate(whole, world or max(dense * parallel.context_parallel_size, experts))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("message", BROKEN)
def test_broken(message: str) -> None:
    refuse(BROKEN[message], message)


@pytest.mark.parametrize(("options", "world", "message"), OF_RANKS)
def test_broken_by_the_number_of_ranks(options: dict[str, Any], world: int, message: str) -> None:
    refuse(options, message, world)


def test_out_of_range() -> None:
    for names, value, bound in (
        (AT_LEAST_0, -1, "at least 0"),
        (AT_LEAST_1, 0, "at least 1"),
        (ABOVE_0, 0, "above 0"),
    ):
        for name in names:
            needed = AOE if name.startswith("aoe") else {}
            refuse(needed | {name: value}, f"{flag(name)} is {value}.*: it must be {bound}", 1)


def test_a_collective_that_gives_up_before_a_hang_is_named() -> None:
    assert config(hang_timeout=120, distributed_timeout_minutes=3).warnings == []
    assert config(hang_timeout=None, distributed_timeout_minutes=0.1).warnings == []
    (warning,) = config(hang_timeout=120, distributed_timeout_minutes=2).warnings
    assert warning.startswith("--hang-timeout 120 is not below the 120 s of --distributed-timeout")
