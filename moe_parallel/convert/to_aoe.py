"""Converts a routed model to an autonomous one: factorizes W_g so that norms rank as the router.

W_p, W_o and all weights outside the experts are copied. Layers are converted from the first to the
last. Each is fitted to the input that it receives from the converted layers before it.

Shape suffixes: T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_parallel.convert.calibration import Batches, Calibration, inputs_of
from moe_parallel.convert.factors import Factors
from moe_parallel.convert.gate import GateOptions, convert_gate
from moe_parallel.convert.routing_overlap import RoutingOverlap, routing_overlap
from moe_parallel.errors import InputError
from moe_parallel.experts.experts import SwiGLUExperts
from moe_parallel.layers import AutonomousLayer, RoutedLayer
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens


@dataclass(frozen=True)
class ConvertedLayer:
    """Measurements of a converted layer on held-out tokens."""

    number: int  # counted from 1
    ranking: str
    condition: float
    before: RoutingOverlap  # with the router, for the plain result of the SVD
    after: RoutingOverlap
    gate_error: float  # relative error of x W_g


def convert_layers(
    source: Any, target: Any, calibration: Calibration, k: int, options: GateOptions
) -> Iterator[ConvertedLayer]:
    """Convert the weights of `source` into `target`, a GPTModel of autonomous layers, by layer."""
    names = {
        f"decoder.layers.{number}.mlp.{part}"
        for number, layer in enumerate(source.decoder.layers)
        if isinstance(layer.mlp, RoutedLayer)
        for part in ("w_router_ED", "w_down_EDR", "experts.")
    }
    copy_weights(source, target, elsewhere=names)
    for number, layer in enumerate(source.decoder.layers):
        if isinstance(layer.mlp, RoutedLayer):
            mlp = target.decoder.layers[number].mlp
            assert isinstance(mlp, AutonomousLayer)
            yield _convert_layer(layer.mlp, mlp, target, calibration, k, options)


@torch.no_grad()
def _convert_layer(
    routed: RoutedLayer,
    autonomous: AutonomousLayer,
    model: Any,
    calibration: Calibration,
    k: int,
    options: GateOptions,
) -> ConvertedLayer:
    assert isinstance(routed.experts, SwiGLUExperts)
    w_gate_EDF, w_p_EDF = routed.experts.w_gate_up_LD2F.unbind(2)
    autonomous.experts.w_p_LDW.copy_(w_p_EDF)
    autonomous.experts.w_out_LWD.copy_(routed.experts.w_out_LFD)
    x_TD = inputs_of(autonomous, model, calibration.fitted)
    gate = convert_gate(w_gate_EDF, routed.w_router_ED, x_TD, k, options)

    x_TD = inputs_of(autonomous, model, calibration.held_out)
    routed.eval()
    wanted = _choices(routed, x_TD, calibration.held_out)

    def measured(factors: Factors) -> RoutingOverlap:
        autonomous.w_down_EDR.copy_(factors.columns_EDR)
        autonomous.experts.w_up_LRW.copy_(factors.rows_ERF)
        return routing_overlap(wanted, _choices(autonomous, x_TD, calibration.held_out))

    before = measured(gate.before)
    return ConvertedLayer(
        number=routed.layer_number,
        ranking=gate.ranking,
        condition=gate.condition,
        before=before,
        after=measured(gate.factors),  # last, because these factors stay in the layer
        gate_error=gate.factors.error(w_gate_EDF.double(), x_TD.double()),
    )


def _choices(layer: RoutedLayer | AutonomousLayer, x_TD: torch.Tensor, batches: Batches) -> Choices:
    sequences = sum(len(batch["tokens"]) for batch in batches)
    return layer.choose(x_TD, Tokens(sequences))


@torch.no_grad()
def copy_weights(source: Any, target: Any, elsewhere: Collection[str] = ()) -> None:
    """Copy every parameter of `source` to the one of the same name in `target` (complete models).

    `elsewhere`: beginnings of names, in either model, that are converted in another way. Raises
    InputError for any other weight that only one model has, or whose shapes differ.
    """
    theirs, ours = (
        {
            name: parameter
            for name, parameter in model.named_parameters()
            if not name.startswith(tuple(elsewhere))
        }
        for model in (source, target)
    )
    for name in theirs.keys() | ours.keys():
        if name not in theirs or name not in ours:
            where = "the new model" if name not in theirs else "the checkpoint"
            raise InputError(f"--to: only {where} has the weight {name}: leave out what adds it")
        if theirs[name].shape != ours[name].shape:
            raise InputError(
                f"--to: {name} is {list(theirs[name].shape)} in the checkpoint and "
                f"{list(ours[name].shape)} in the new model: leave the sizes as they are"
            )
        ours[name].copy_(theirs[name])
