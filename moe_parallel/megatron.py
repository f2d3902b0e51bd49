"""The layers in Megatron-LM, whose own program stays as it is.

    MOE_PARALLEL_CONFIG=aoe.yaml python pretrain_gpt.py --spec moe_parallel.megatron layer_spec ...

`layer_spec` is a transformer layer of Megatron-Core that takes attention, norms and dense layers
from Megatron-Core's own specification, and its experts from here. Sizes, layout and whatever else
Megatron-LM has a flag for come from its TransformerConfig; the file has the rest (`read_options`).
docs/megatron.md is for users.

What a layer does besides its forward and backward pass has a place in Megatron-Core's schedules:

- Auxiliary losses start with the backward pass of the tokens (`MoEAuxLossAutoScaler`), and their
  values go to its tracker (`Losses`).
- Biases, cutoffs and controllers move when the gradients of a step are final (`EndOfStep`), as
  Megatron-Core's own bias does. The optimizer's step, which follows, does not touch them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    get_transformer_layer_offset,
)

from moe_parallel.balancing.controller import Controller, end_step
from moe_parallel.config import Config, make_config, read_yaml, validate_layer
from moe_parallel.config.config import EXPERT_SELECTION, selection_options
from moe_parallel.config.message import as_typed, flag, shown
from moe_parallel.config.option import options
from moe_parallel.errors import InputError
from moe_parallel.layers import DispatchedLayer
from moe_parallel.layers.dispatched import build_context
from moe_parallel.layers.expert_layer import in_backward_pass
from moe_parallel.layers.system import system_of
from moe_parallel.model.initialization import initialize_weights
from moe_parallel.parallel import Groups, current_groups
from moe_parallel.platform.device import device
from moe_parallel.platform.megatron import UNKNOWN_MLP, has_muon, suppress_message

FILE = "MOE_PARALLEL_CONFIG"
#: The argument with the content of the file, which Megatron-LM saves in checkpoints with its own.
ARGUMENT = "moe_parallel_config"

#: Options that a layer reads and that Megatron-LM has under the same name in its configuration.
_SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "init_method_std",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_token_drop_policy",
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "bf16",
)
#: Options besides those of the system that only the file has.
_OF_FILE = (
    "moe_backend",
    "moe_activation_budget",
    "moe_capacity_counts_topk",
    "moe_dispatch_parts",
)
#: What Megatron-LM's arguments have and its TransformerConfig does not: from the file, where
#: Megatron-Core is used without Megatron-LM.
OF_RUN = ("seed", "train_iters")
#: Megatron-LM takes a balancing bias with sigmoid scores only, so the file may set it without them.
BIAS = ("moe_router_enable_expert_bias", "moe_router_bias_update_rate")
#: Megatron-LM needs a value of these, also if the system has no such option.
_NEEDED = ("moe_router_topk", "moe_router_load_balancing_type", "moe_router_pre_softmax")

#: Fields of TransformerConfig that must keep their defaults, where there is such a field.
_REFUSED = (
    "activation_func_clamp_value",
    "cuda_graph_impl",
    "experimental_attention_variant",
    "expert_gtp_weight_remat_size",
    "fp4",
    "fp8",
    "glu_linear_offset",
    "gtp_weight_remat_size",
    "heterogeneous_block_specs",
    "init_model_with_meta_device",
    "moe_apply_probs_on_input",
    "moe_enable_routing_replay",
    "moe_expert_rank_capacity_factor",
    "moe_latent_size",
    "moe_paged_stash",
    "moe_router_force_biased",
    "moe_router_topk_limited_devices",
    "moe_router_topk_scaling_factor",
    "mtp_num_layers",
    "overlap_moe_expert_parallel_comm",
    "use_mup",
)


def read_options(megatron: TransformerConfig) -> Config:
    """The configuration of the layers of a model.

    The file that MOE_PARALLEL_CONFIG names has the system and its options, by the names of
    `config.yaml`. What Megatron-LM has a flag for comes from the flag; the file may repeat it.

    Raises InputError for a contradiction between the two, and for what the layers do not support.
    """
    path = os.environ.get(FILE)
    if not path:
        raise InputError(
            f"{FILE} is not set: let it name a YAML file with expert-selection and the options of "
            "that system"
        )
    file = read_yaml(Path(path), f"{FILE}=")
    selection = make_config(file).selection
    system = {option.name for option in options(type(selection))}
    theirs = _of_megatron(megatron, system, selection.system)
    for name in file.keys() - theirs.keys() - system - {EXPERT_SELECTION, *_OF_FILE, *OF_RUN}:
        raise InputError(
            f"{FILE}={path}: {as_typed(name)} belongs to Megatron-LM's flags: remove it there"
        )
    for name in file.keys() & set(BIAS):
        if getattr(megatron, name) == _default(name):
            del theirs[name]
    config = make_config(file | theirs)
    _check_equal(make_config(theirs | file), config, file.keys() & theirs.keys(), path)
    validate_layer(config)
    _check_supported(config)
    if "train_iters" not in file | theirs:
        raise InputError(
            f"{FILE}={path}: add train-iters, the number of optimizer steps of the run, which no "
            "--train-iters gives"
        )
    if (arguments := _arguments()) is not None:
        setattr(arguments, ARGUMENT, json.dumps(file))
    return config


def _of_megatron(megatron: TransformerConfig, system: set[str], word: str) -> dict[str, Any]:
    """The raw values of the options of a system that Megatron-LM has, too, and of the sizes.

    Raises InputError for values that the layers do not support.
    """
    known = {field.name for field in fields(megatron)}
    for name in known & set(_REFUSED):
        if getattr(megatron, name) != _default(name):
            raise InputError(
                f"{flag(name)} is {shown(getattr(megatron, name))}, which the layers of "
                "moe_parallel do not support: leave it out"
            )
    if megatron.num_moe_experts is None:
        raise InputError("--spec moe_parallel.megatron builds layers of experts: set --num-experts")
    swiglu = megatron.gated_linear_unit and megatron.activation_func is torch.nn.functional.silu
    if not swiglu or megatron.add_bias_linear:
        raise InputError(
            "the experts of moe_parallel are SwiGLU layers without biases: add --swiglu and "
            "--disable-bias-linear"
        )
    if megatron.init_method is torch.nn.init.xavier_uniform_:
        raise InputError(
            "--init-method-xavier-uniform: weights of experts start with a normal distribution of "
            "--init-method-std here: leave it out"
        )
    everywhere = {name for its_options in selection_options().values() for name in its_options}
    for name in known & everywhere - system - set(_NEEDED + BIAS[1:]):
        if getattr(megatron, name) not in (_default(name), None, 0):
            raise InputError(
                f"{flag(name)} is {shown(getattr(megatron, name))}, but --expert-selection {word} "
                "has no such option: leave it out"
            )
    theirs = {name: getattr(megatron, name) for name in (*_SIZES, *(known & system))}
    theirs["num_experts"] = megatron.num_moe_experts
    theirs["moe_layer_freq"] = str(megatron.moe_layer_freq)
    for name in ("moe_z_loss_coeff", "moe_input_jitter_eps"):
        if name in theirs:
            theirs[name] = theirs[name] or 0.0
    if theirs.get("moe_router_load_balancing_type") == "none":
        theirs |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}
    arguments = _arguments()
    return theirs | {
        name: getattr(arguments, name)
        for name in OF_RUN
        if getattr(arguments, name, None) is not None
    }


def _check_equal(mine: Config, theirs: Config, names: Collection[str], path: str) -> None:
    """Raise InputError unless the options of the file have the values of Megatron-LM's flags."""
    for name in names:
        by_file, by_flag = (
            next(values[name] for _, values in each.values() if name in values)
            for each in (mine, theirs)
        )
        same_layers = name == "moe_layer_freq" and mine.moe_layers == theirs.moe_layers
        if by_file != by_flag and not same_layers:
            raise InputError(
                f"{FILE}={path}: {flag(name)[2:]} is {shown(by_file)}, but Megatron-LM's "
                f"{flag(name)} is {shown(by_flag)}: make them equal, or remove it from the file"
            )


def _check_supported(config: Config) -> None:
    """Raise InputError for what a system needs of a run and Megatron-LM's does not give it."""
    selection = config.selection
    if selection.reads_token_ids:
        raise InputError(
            f"expert-selection {selection.system} needs the ids of the tokens, which Megatron-LM's "
            "model does not pass to its layers: use pretrain_gpt_moe.py"
        )
    for name in ("moe_router_trace", "moe_router_replay"):
        if getattr(selection, name, None) is not None:
            raise InputError(f"{flag(name)} works in pretrain_gpt_moe.py alone: leave it out")


def _check_stages(megatron: TransformerConfig) -> None:
    """Raise InputError unless the first chunk of every pipeline rank has a layer, whose forward
    pass sees to the end of the step."""
    layout, virtual = (
        megatron.pipeline_model_parallel_layout,
        megatron.virtual_pipeline_model_parallel_size,
    )
    for rank in range(megatron.pipeline_model_parallel_size):
        if layout is not None:
            layers = layout.layout[rank][0].count(LayerType.decoder)
        else:
            layers = get_num_layers_to_build(megatron, None if virtual is None else 0, rank)
        if layers == 0:
            raise InputError(
                f"the first chunk of pipeline rank {rank} has no transformer layer: change "
                "--pipeline-model-parallel-layout, --account-for-embedding-in-pipeline-split or "
                "--account-for-loss-in-pipeline-split"
            )


def _described(config: Config) -> str:
    """What the layers are, for Megatron-LM's log, which lists its own arguments alone."""
    selection = config.selection
    values = {option: getattr(selection, option.name) for option in options(type(selection))}
    given = [f"{each.flag} {value}" for each, value in values.items() if value != each.default]
    width = f"{config.num_experts} experts of width {config.expert_width}"
    lines = [" ".join([f"{width}: {selection.system}", *given]), *config.notes, *config.warnings]
    return "\n".join(f"moe_parallel: {line}" for line in lines)


@cache
def _default(name: str) -> Any:
    """The default of a field of TransformerConfig."""
    (field,) = (field for field in fields(TransformerConfig) if field.name == name)
    return field.default


def _arguments() -> Any:
    """Megatron-LM's arguments. None: its program does not run."""
    variables = sys.modules.get("megatron.training.global_vars")
    return getattr(variables, "_GLOBAL_ARGS", None)


class Layer(TransformerLayer):  # type: ignore[misc]
    """One of Megatron-Core's transformer layers, or one with our experts, by --moe-layer-freq.

    `steps`, int64 [1], is the number of optimizer steps so far, and is saved with the model.
    """

    steps: torch.Tensor

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        pg_collection: Any = None,
        vp_stage: int | None = None,
        **named: Any,
    ) -> None:
        """`layer_number`: within this chunk of the model, from 1."""
        groups = current_groups()
        number = layer_number + get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
        ours = read_options(config)
        _check_stages(config)
        if number == 1 and dist.get_rank() == 0:
            print(_described(ours), flush=True)
        specs = get_gpt_decoder_layer_specs(
            config,
            use_transformer_engine=config.transformer_impl == "transformer_engine",
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
        )
        submodules = specs[number - 1].submodules
        self.has_experts = ours.moe_layers[number - 1]
        self.is_controlled = ours.selection.controlled is not None  # also without experts
        if self.has_experts:
            suppress_message(*UNKNOWN_MLP)
            submodules = replace(submodules, mlp=self._experts(config, ours, groups))
            if has_muon():
                from moe_parallel.platform.muon import orthogonalize_stacks

                orthogonalize_stacks()
        # Megatron-Core names the device of each weight of its own.
        with nullcontext() if config.use_cpu_initialization else device():
            super().__init__(
                config=config,
                submodules=submodules,
                layer_number=layer_number,
                pg_collection=pg_collection,
                vp_stage=vp_stage,
                **named,
            )
        self._steps = 0
        if not self.has_experts:
            return
        self.recompute_mlp = False  # `mlp` is a dense layer among --recompute-modules
        for weight in self.mlp.experts.parameters():
            # Megatron-Core then has an optimizer of experts in every layout, and a checkpoint of a
            # run with ep can be resumed without.
            weight.allreduce = False
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_load_state_dict_post_hook(lambda *_: self._read_steps())
        if config.perform_initialization:
            std = config.init_method_std
            smaller = std / math.sqrt(2 * config.num_layers)  # Megatron-Core's, of output layers
            initialize_weights(self.mlp, f"{ours.training.seed} {number}", std, smaller)

    def _experts(self, config: TransformerConfig, ours: Config, groups: Groups) -> ModuleSpec:
        """The specification of the layer of experts."""
        selective = config.recompute_granularity == "selective"
        modules = (config.recompute_modules or ()) if selective else ()

        def add_loss(x_TD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
            if config.calculate_per_token_loss:  # the gradients are divided by all tokens later
                loss = loss * (len(x_TD) * groups.tp_cp.size())
            return in_backward_pass(x_TD, loss)

        context = build_context(
            ours,
            groups,
            Losses(config.num_layers, groups),
            add_loss=add_loss,
            iteration=lambda: self._steps,
            recomputes_layers="moe" in modules,
            recomputes_shared="shared_experts" in modules,
        )
        selection = ours.selection.rescaled(ours)
        system = system_of(selection)
        return ModuleSpec(
            module=system.layer.variant(selection),
            params=system.arguments(selection, ours.expert_width, context),
        )

    def forward(self, *arguments: Any, **named: Any) -> Any:
        finalize = self.config.finalize_model_grads_func  # set after the model is built
        if self.training and finalize is not None and not isinstance(finalize, EndOfStep):
            self.config.finalize_model_grads_func = EndOfStep(finalize)
        return super().forward(*arguments, **named)

    def end_step(self) -> None:
        """Called when the gradients of a step are final. Collective over the pipeline stage."""
        if self.has_experts:
            self.mlp.after_step()
            self._steps += 1
            self.steps += 1

    def _read_steps(self) -> None:
        self._steps = int(self.steps)


class EndOfStep:
    """Megatron-Core's `finalize_model_grads`, and then what our layers do after each step."""

    def __init__(self, finalize: Callable[..., None]) -> None:
        self._finalize = finalize
        self._others: list[str] | None = None  # losses that Megatron-LM's log does not look for

    def __call__(self, model: Sequence[torch.nn.Module], *arguments: Any, **named: Any) -> None:
        """Megatron-Core's schedules call it with the chunks of the model. Collective."""
        self._finalize(model, *arguments, **named)
        modules = [module for chunk in model for module in chunk.modules()]
        layers = [module for module in modules if isinstance(module, Layer)]
        for layer in layers:
            layer.end_step()
        if layers[0].is_controlled:
            controllers = [module for module in modules if isinstance(module, Controller)]
            end_step(controllers, next(layers[0].parameters()).device)
        if self._others is None:
            self._others = _other_losses(layers)
            _show_in_log(self._others, layers[0])
        if _get_tracker is None:  # it shows all losses, and sums over ranks those it looks for
            moe_utils.reduce_aux_losses_tracker_across_ranks(self._others)


def _other_losses(layers: Sequence[Layer]) -> list[str]:
    """The losses of all pipeline stages for which Megatron-LM's log does not look. Collective."""
    here = {
        loss.name
        for layer in layers
        if isinstance(layer.mlp, DispatchedLayer)
        for loss in layer.mlp.losses
    }
    everywhere: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(everywhere, here)
    return sorted(set().union(*everywhere) - {"load_balancing_loss", "z_loss"})


class Losses:
    """Receives the statistics of a layer, of which the auxiliary losses go to Megatron-Core's
    tracker, without their coefficients."""

    def __init__(self, num_layers: int, groups: Groups) -> None:
        self._num_layers = num_layers
        self._groups = groups

    def recipient(self) -> Losses | None:
        return self if torch.is_grad_enabled() else None

    def add(self, layer_number: int, *_: Any, losses: dict[str, torch.Tensor], **__: Any) -> None:
        """Adds one micro-batch of a layer."""
        for name, value in losses.items():
            _track(name, value, layer_number, self._num_layers, self._groups)

    def add_loss(self, *_: Any) -> None:
        """Numbers beside a loss are left out."""

    def add_merges(self, *_: Any) -> None:
        """Merged layers have no losses."""


#: Megatron-Core's tracker since 0.17. None: functions of `moe_utils` in its place.
_get_tracker: Callable[[], Any] | None = getattr(moe_utils, "get_moe_metrics_tracker", None)


def _track(
    name: str, value: torch.Tensor, layer_number: int, num_layers: int, groups: Groups
) -> None:
    """Add a loss of one micro-batch to the tracker. It is the same on the ranks of tp and cp."""
    if _get_tracker is not None:
        _get_tracker().record(name, value, layer_number, num_layers, avg_group=groups.dp)
    else:
        moe_utils.save_to_aux_losses_tracker(
            name, value, layer_number, num_layers, avg_group=groups.dp
        )


def _show_in_log(names: Sequence[str], layer: Layer) -> None:
    """Let Megatron-LM's log show other losses, too."""
    nothing = torch.zeros((), device=next(layer.parameters()).device)
    for name in names:  # a pipeline stage without experts has no entry yet
        _track(name, nothing, 1, layer.config.num_layers, current_groups())
    if _get_tracker is None or not names:
        return
    tracker = _get_tracker()
    report = tracker.report

    def report_all(*arguments: Any, track_names: Sequence[str] = (), **named: Any) -> Any:
        all_names = dict.fromkeys([*track_names, *names])  # each once: its sum is over ranks
        return report(*arguments, track_names=list(all_names), **named)

    tracker.report = report_all


#: What --spec names.
layer_spec = ModuleSpec(module=Layer)
