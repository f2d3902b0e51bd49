"""Converts a routed model to an autonomous one: factorizes W_g so that norms rank as the router.

W_p, W_o and all weights outside the experts are copied. Layers are converted from the first to the
last. Each is fitted to the input that it receives from the converted layers before it.

Shape suffixes: B sequences, S tokens of a sequence, T tokens, K choices per token, E experts,
D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from moe_parallel.convert.gate import Factors, convert_gate
from moe_parallel.errors import InputError
from moe_parallel.experts.experts import SwiGLUExperts
from moe_parallel.layers import AutonomousLayer, RoutedLayer
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.tokens import Tokens

Batches = list[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Calibration:
    """Random training text in two parts: one for the fit, and one held out for measurements."""

    fitted: Batches  # tokens and position_ids, int64 [B, S]
    held_out: Batches

    @property
    def tokens(self) -> tuple[int, int]:
        """The number of tokens of each part."""
        first, second = (
            sum(batch["tokens"].numel() for batch in batches)
            for batches in (self.fitted, self.held_out)
        )
        return first, second


def draw_calibration(
    dataset: Any, samples: int, batch_size: int, seed: int, device: torch.device
) -> Calibration:
    """Draw `samples` samples of a dataset for the fit, and a third as many others to measure.

    Raises InputError if the dataset has too few.
    """
    held_out = -(-samples // 3)
    if samples < 1:
        raise InputError(
            f"--calibration-samples is {samples}: the norms are fitted to training text, so draw "
            "at least 1"
        )
    if samples + held_out > len(dataset):
        most = max(n for n in range(len(dataset) + 1) if n + -(-n // 3) <= len(dataset))
        fewer = f"draw at most {most}, or " if most else ""
        raise InputError(
            f"--calibration-samples is {samples}, and {held_out} more are held out, but the "
            f"training text has {len(dataset)}: {fewer}name more text by --data-path"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(dataset), generator=generator)[: samples + held_out].tolist()

    def batches(numbers: list[int]) -> Iterator[dict[str, torch.Tensor]]:
        for start in range(0, len(numbers), batch_size):
            some = [dataset[number] for number in numbers[start : start + batch_size]]
            yield {
                name: torch.stack([sample[name] for sample in some]).to(device)
                for name in ("tokens", "position_ids")
            }

    return Calibration(list(batches(drawn[:samples])), list(batches(drawn[samples:])))


@torch.no_grad()
def inputs_of(layer: torch.nn.Module, model: Any, batches: Batches) -> torch.Tensor:
    """The input of a feed-forward layer when a model computes the batches: [T, D]."""
    seen: list[torch.Tensor] = []

    def note(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        seen.append(arguments[0].detach().flatten(0, 1))

    model.eval()
    handle = layer.register_forward_pre_hook(note)
    try:
        for batch in batches:
            model(batch["tokens"], batch["position_ids"], None)
    finally:
        handle.remove()
    return torch.cat(seen)


def share_of_choices(of: Choices, by: Choices) -> float:
    """The share of the choices `of` one layer that are also made `by` another. Both layers fill
    all K slots."""
    same_TK = (of.experts_TK[:, :, None] == by.experts_TK[:, None, :]).any(2)
    return float(same_TK.double().mean())


@dataclass(frozen=True)
class ConvertedLayer:
    """Measurements of a converted layer on held-out tokens."""

    number: int  # counted from 1
    before: float  # share of the router's choices, for the plain result of the SVD
    after: float
    gate_error: float  # relative error of x W_g


def convert_layers(
    source: Any, target: Any, calibration: Calibration, k: int, rank: int
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
            yield _convert_layer(layer.mlp, mlp, target, calibration, k, rank)


@torch.no_grad()
def _convert_layer(
    routed: RoutedLayer,
    autonomous: AutonomousLayer,
    model: Any,
    calibration: Calibration,
    k: int,
    rank: int,
) -> ConvertedLayer:
    assert isinstance(routed.experts, SwiGLUExperts)
    w_gate_EDF, w_p_EDF = routed.experts.w_gate_up_LD2F.unbind(2)
    autonomous.experts.w_p_LDW.copy_(w_p_EDF)
    autonomous.experts.w_out_LWD.copy_(routed.experts.w_out_LFD)
    x_TD = inputs_of(autonomous, model, calibration.fitted)
    plain, factors = convert_gate(w_gate_EDF, routed.w_router_ED, x_TD, k, rank)

    x_TD = inputs_of(autonomous, model, calibration.held_out)
    routed.eval()
    wanted = _choices(routed, x_TD, calibration.held_out)

    def measured(factors: Factors) -> float:
        autonomous.w_down_EDR.copy_(factors.columns_EDR)
        autonomous.experts.w_up_LRW.copy_(factors.rows_ERF)
        return share_of_choices(wanted, _choices(autonomous, x_TD, calibration.held_out))

    return ConvertedLayer(
        number=routed.layer_number,
        before=measured(plain),
        after=measured(factors),  # last, because these factors stay in the layer
        gate_error=factors.error(w_gate_EDF.double(), x_TD.double()),
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
