"""A trainer written like Megatron-LM's, with Megatron-Core's objects alone, for `layer_spec`.

Its options are those of our program, so that both train the same model. `core_transformer_config`
translates them, and leaves the rest to the file of MOE_PARALLEL_CONFIG.
"""

import os
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from moe_parallel.config import Config
from moe_parallel.config.option import options
from moe_parallel.megatron import FILE
from moe_parallel.model.initialization import initialize_weights
from tests.model.small_gpt import VOCABULARY, Options, micro_batches

SPEC = ["moe_parallel.megatron", "layer_spec"]

_FIELDS = {field.name for field in fields(TransformerConfig)}


class Trainer:
    """A model in training. The methods are Megatron-LM's functions of about these names."""

    batches = staticmethod(micro_batches)

    def __init__(self, given: Config, file: Path, flags: Options) -> None:
        """
        Args:
            given: the options of the model, the layout and the system, of our program.
            file: the YAML file to write.
            flags: fields of TransformerConfig besides those that follow from `given`.
        """
        self.options = given
        self.initialize_megatron()
        self.config = core_transformer_config(given, file, flags)
        chunks = [self.model_provider(stage) for stage in self.stages]
        self.config.hetereogenous_dist_checkpoint = True  # the names by which our program draws
        for chunk in chunks:
            initialize_weights(chunk, self.options.training.seed, 0.1)
        self.config.hetereogenous_dist_checkpoint = False
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.options.parallel.use_distributed_optimizer,
        )
        self.model = [
            DistributedDataParallel(self.config, ddp, chunk, disable_bucketing=stage > 0)
            for stage, chunk in enumerate(chunks)
        ]
        for chunk in self.model:
            chunk.broadcast_params()
        self.setup_optimizer()
        self.iteration = 0
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads

    def initialize_megatron(self) -> None:
        parallel = self.options.parallel
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=self.options.virtual_stages,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        )
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1)
        self.stages = range(self.options.virtual_stages or 1)

    def model_provider(self, stage: int) -> GPTModel:
        vp_stage = None if len(self.stages) == 1 else stage
        return GPTModel(
            self.config,
            transformer_layer_spec=import_module(SPEC),
            vocab_size=self.options.padded_vocab_size(VOCABULARY),
            max_sequence_length=self.options.training.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage() and stage == self.stages[0],
            post_process=parallel_state.is_pipeline_last_stage() and stage == self.stages[-1],
            parallel_output=True,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )

    def setup_optimizer(self) -> None:
        ours, batch = self.options.optimizer, self.options.training.global_batch_size
        muon = {name: value for name, value in vars(ours).items() if name.startswith("muon_")}
        config = OptimizerConfig(
            optimizer=ours.optimizer,
            lr=ours.lr,
            min_lr=ours.min_lr,
            weight_decay=ours.weight_decay,
            adam_beta1=ours.adam_beta1,
            adam_beta2=ours.adam_beta2,
            adam_eps=ours.adam_eps,
            clip_grad=ours.clip_grad,
            use_distributed_optimizer=self.options.parallel.use_distributed_optimizer,
            **(muon | {"muon_tp_mode": "duplicated"} if ours.optimizer == "muon" else {}),
        )
        overrides = get_standard_config_overrides(config)
        self.optimizer = get_megatron_optimizer(config, self.model, overrides)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=ours.lr,
            min_lr=ours.min_lr,
            lr_warmup_steps=ours.lr_warmup_iters * batch,
            lr_decay_steps=self.options.training.train_iters * batch,
            lr_decay_style=ours.lr_decay_style,
            start_wd=ours.weight_decay,
            end_wd=ours.weight_decay,
            wd_incr_steps=batch,
            wd_incr_style="constant",
        )

    def train_step(self) -> float:
        """One step: the loss per token of the global batch."""
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.forward_backward(forward_only=False)
        succeeded, _, _ = self.optimizer.step()
        assert succeeded
        self.scheduler.step(increment=self.options.training.global_batch_size)
        self.iteration += 1
        return loss

    def training_log(self) -> dict[str, float]:
        """What Megatron-LM's function of this name makes of the auxiliary losses of a step."""
        total: dict[str, Any] = {}
        training, dp = self.options.training, parallel_state.get_data_parallel_world_size()
        arguments: dict[str, Any] = {
            "loss_scale": training.micro_batch_size * dp / training.global_batch_size,
            "iteration": self.iteration,
            "total_loss_dict": total,
            "force_initialize": True,
            "track_names": ["load_balancing_loss"]
            + ["z_loss"] * bool(self.config.moe_z_loss_coeff),
            "num_layers": self.config.num_layers,
            "moe_layer_freq": self.config.moe_layer_freq,
        }
        if hasattr(moe_utils, "get_moe_metrics_tracker"):
            moe_utils.get_moe_metrics_tracker().report(**arguments)
        else:
            moe_utils.track_moe_metrics(**arguments)
        return {name: float(value) for name, value in total.items()}

    def evaluate(self) -> float:
        """The loss per token of the next global batch; nothing changes."""
        for chunk in self.model:
            chunk.eval()
        with torch.no_grad():
            return self.forward_backward(forward_only=True)

    def forward_backward(self, forward_only: bool) -> float:
        training = self.options.training
        dp = parallel_state.get_data_parallel_world_size()
        per_step = training.global_batch_size // training.micro_batch_size
        batches = [
            list(self.batches(self.options, self.iteration * per_step, self)) for _ in self.stages
        ]
        iterators = [iter(each) for each in batches]
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.model,
            num_microbatches=per_step // dp,
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
        )
        sums = torch.zeros(2)
        if reported and parallel_state.get_tensor_model_parallel_rank() == 0:
            sums = torch.stack([each["lm loss"] for each in reported]).sum(0)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    @property
    def groups(self) -> Any:
        """What `micro_batches` asks for: the data-parallel group."""

        class Groups:
            dp = parallel_state.get_data_parallel_group()

        return Groups

    def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(
            self.generate_state_dict(False) | {"iteration": self.iteration}, str(folder)
        )

    def load_checkpoint(self, folder: Path) -> None:
        state = dist_checkpointing.load(self.generate_state_dict(True), str(folder))
        for number, chunk in enumerate(self.model):
            chunk.module.load_state_dict(state[f"model{number}"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["opt_param_scheduler"])
        self.iteration = dist_checkpointing.load_common_state_dict(str(folder))["iteration"]

    def generate_state_dict(self, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state: dict[str, Any] = {
            f"model{number}": chunk.module.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(self.model)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state | {"opt_param_scheduler": self.scheduler.state_dict()}


def forward_step(data: Iterator[Any], model: torch.nn.Module) -> Any:
    """Megatron-LM's, without what reads global arguments."""
    batch = next(data)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return losses, partial(loss_func, batch["loss_mask"])


def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    mask = mask.view(-1).float()
    loss = torch.sum(losses.view(-1).float() * mask)
    tokens = mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.clone().detach(), tokens.float()])}


def core_transformer_config(given: Config, file: Path, flags: Options) -> TransformerConfig:
    """Megatron-Core's configuration. What it has no field for is written to the YAML file."""
    ours = {name: value for _, values in given.values() for name, value in values.items()}
    system = [option.name for option in options(type(given.selection))]
    others = {name: ours[name] for name in system if name not in _FIELDS}
    bias = {name: ours[name] for name in system if name.startswith("moe_router_enable_expert")}
    text = {"expert_selection": given.selection.system} | others | bias
    text |= {"train_iters": given.training.train_iters, "seed": given.training.seed}
    file.write_text(yaml.dump({name: value for name, value in text.items() if value is not None}))
    os.environ[FILE] = str(file)
    shared = {name: ours[name] for name in system if name in _FIELDS and name not in bias}
    parallel = {
        name: value
        for _, values in given.values()
        for name, value in values.items()
        if name.endswith("_parallel_size") or name == "sequence_parallel"
    }
    layers = [int(layer) for layer in given.moe_layers]
    fields_of_model: Options = {
        "num_layers": given.model.num_layers,
        "hidden_size": given.model.hidden_size,
        "num_attention_heads": given.model.num_attention_heads,
        "num_query_groups": given.model.query_groups,
        "ffn_hidden_size": given.model.ffn_hidden_size,
        "num_moe_experts": given.num_experts,
        "moe_layer_freq": 1 if all(layers) else layers,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": given.model.init_method_std,
        "transformer_impl": "local",
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "virtual_pipeline_model_parallel_size": given.virtual_stages,
        "overlap_p2p_comm": given.virtual_stages is not None,
        "batch_p2p_comm": given.virtual_stages is None,
        "pipeline_dtype": torch.float32,
    }
    return TransformerConfig(**(fields_of_model | shared | parallel | flags))
