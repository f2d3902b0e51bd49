"""The tensors of Megatron-LM's checkpoints: their names, where they are, and what ours are of them.

Each of our tensors is made of one of theirs, by a name that has the number of the layer. This is
how a layer's tensor may be stored:

decoder.layers.3.mlp.linear_fc2.weight        alone
decoder.layers.mlp.linear_fc2.weight          as a part of a tensor of all layers, if all are alike
...linear_fc1.weight_w, weight_v              W_g and W_p, otherwise the first and the second half
...mlp.experts.experts.linear_fc2.weight      [E, D, F], or a tensor of each expert:
...mlp.experts.experts.5.linear_fc2.weight

Shape suffixes: E experts, D model width, F width of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from moe_parallel.collective_errors import StorageError
from moe_parallel.config import Config
from moe_parallel.errors import InputError
from moe_parallel.huggingface.tensors import (
    ExpertNames,
    Form,
    TensorPlace,
    attention_places,
    dense_places,
    embedding_places,
    head_places,
    same,
    shared,
    whole,
)
from moe_parallel.model.parameters import model_without_storage
from moe_parallel.systems import TopKSelection
from moe_parallel.training.checkpoint.index import (
    COMMON,
    TENSOR_INDEX,
    data_files,
    tensor_entries,
)
from moe_parallel.training.checkpoint.state import model_tensors
from moe_parallel.training.checkpoint.tensors import read_part, sharded_tensors
from moe_parallel.training.standalone import on_one_process, single_process

EMBEDDING = "embedding.word_embeddings.weight"
EXPERTS = "mlp.experts.experts."
#: A norm is called by the linear layer that follows it, or has a name of its own.
OWN_NORMS = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
#: The buffer of each layer of `moe_parallel.megatron`, the number of its steps, which is not read.
_STEPS = re.compile(r"decoder\.layers\.(\d+\.)?steps")
_OF_A_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")

#: W_g above W_p of each expert, [E, 2F, D], as [E, D, 2, F]; and W_o, [E, D, F], as [E, F, D].
_GATE_UP = Form(
    lambda theirs: theirs[0].unflatten(1, (2, -1)).permute(0, 3, 1, 2),
    lambda part: [part.permute(0, 2, 3, 1).flatten(1, 2)],
)
_OUT = Form(lambda theirs: theirs[0].mT, lambda part: [part.mT])


def places(config: Config, rows: int) -> Iterator[TensorPlace]:
    """The tensors of a dense or top-k model, ours and theirs. `rows`: of their embedding."""
    yield from map(_named, embedding_places(config, rows))
    for layer, is_moe in enumerate(config.moe_layers):
        yield from map(_named, attention_places(config.model, layer))
        if is_moe:
            yield from _routed(config, layer)
            yield from map(_named, shared(config, layer, ExpertNames()))
        else:
            yield from map(_named, dense_places(config, layer))
    yield from map(_named, head_places(config, rows))


def has_our_layers(keys: Iterable[str]) -> bool:
    """Whether a checkpoint is of a model with --spec moe_parallel.megatron."""
    return any(map(_STEPS.fullmatch, keys))


def our_places(config: Config, rows: int) -> list[TensorPlace]:
    """The tensors of a model with such layers, whose names are those of our program."""
    alone = on_one_process(config)
    with single_process(alone) as groups:
        tensors = sharded_tensors(model_tensors(model_without_storage(alone, rows, groups)))
    sizes = {tensor.key: tuple(tensor.global_shape) for tensor in tensors}
    return [same(key, key, *size) for key, size in sizes.items()]


def _named(place: TensorPlace) -> TensorPlace:
    """The place with their name, which is ours, except for shared experts. What consists of several
    tensors in transformers is one, as here."""
    name = place.key.replace(".shared.dense.", ".shared_experts.")
    name = name.replace(".shared.w_gate_1D", ".shared_experts.gate_weight")
    if len(place.names) > 1:
        return same(place.key, name, *place.shape)
    return replace(place, names=(name,))


def _routed(config: Config, layer: int) -> Iterator[TensorPlace]:
    """The router, its bias and the experts of a layer."""
    selection = config.selection
    assert isinstance(selection, TopKSelection)
    n, d, f = config.num_experts, config.model.hidden_size, config.expert_width
    prefix = f"decoder.layers.{layer}."
    yield same(f"{prefix}mlp.w_router_ED", f"{prefix}mlp.router.weight", n, d)
    if selection.moe_router_enable_expert_bias:
        yield same(f"{prefix}mlp.bias.bias_E", f"{prefix}mlp.router.expert_bias", n)
    if selection.uses_step_load:  # of the step before, which Megatron-Core does not save
        key = f"{prefix}mlp.load.share_E"
        yield TensorPlace(
            key, (n,), (0,), (n,), (), (), Form(lambda _: torch.zeros(n), lambda _: ())
        )
    ours, theirs = f"{prefix}mlp.experts.", prefix + EXPERTS
    fc1, fc2 = (
        (f"{theirs}linear_fc1.weight", (n, 2 * f, d)),
        (f"{theirs}linear_fc2.weight", (n, d, f)),
    )
    yield whole(f"{ours}w_gate_up_LD2F", (n, d, 2, f), [fc1], _GATE_UP)
    yield whole(f"{ours}w_out_LFD", (n, f, d), [fc2], _OUT)


def stacked(name: str) -> tuple[str, int | None]:
    """The tensor of all layers that has this one as a part, and the number of the layer; for one
    that is of no layer, itself and None."""
    match = _OF_A_LAYER.fullmatch(name)
    return (match[1] + match[3], int(match[2])) if match else (name, None)


def check_files(folder: Path, index: Metadata) -> None:
    """Raises InputError for a file of a checkpoint that is missing, cut, or elsewhere, and for an
    index of more bytes than the files have."""
    needed = {TENSOR_INDEX: 0} | data_files(index)
    if (folder / COMMON).exists():
        needed[COMMON] = 0
    size = 0
    for name, least in needed.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise InputError(
                f"--input {folder}: {name} is missing, or a link: copy the whole folder"
            )
        if path.stat().st_size < least:
            raise InputError(
                f"--input {folder}: {name} has {path.stat().st_size} bytes instead of "
                f"{least} or more: copy it again"
            )
        size += path.stat().st_size
    if sum(piece.length for piece in index.storage_data.values()) > size:
        raise InputError(f"--input {folder}: {TENSOR_INDEX} uses bytes of a file twice")


#: Gives a tensor of a checkpoint by its key; with the number of a layer, that part of it.
Part = Callable[[str, int | None], torch.Tensor]


class StoredTensors:
    """The tensors of a checkpoint, by their names with the number of the layer."""

    def __init__(self, folder: Path, index: Metadata, config: Config, remedy: str) -> None:
        """The checkpoint in `folder`, of a model with the sizes of `config`. `remedy`: of tensors
        that are of another model."""
        self.folder = folder
        self._index, self._config, self._remedy = index, config, remedy
        self._entries = tensor_entries(index)
        self._used: set[str] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of the model, after `check`."""
        return sum(self._nbytes(key) for key in self._used)

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        return self._tensor(name, self._empty).dtype

    def read(self, name: str) -> torch.Tensor:
        """A tensor, of its own dtype. Raises InputError."""
        try:
            return self._tensor(name, self._read)
        except StorageError as error:
            raise InputError(f"--input {self.folder}: {name} cannot be read ({error})") from None

    def check(self, wanted: Iterator[TensorPlace]) -> None:
        """Compare the tensors with those that a model needs.

        Raises InputError for the first that is missing, of another shape, or not of the model.
        """
        pairs = (pair for each in wanted for pair in zip(each.names, each.shapes, strict=True))
        for name, shape in pairs:
            found = tuple(self._tensor(name, self._empty).shape)
            if found != shape:
                raise InputError(
                    f"--input {self.folder}: {name} is {list(found)}, and by the model's sizes it "
                    f"is {list(shape)}: the tensors are of another one; {self._remedy}"
                )
        for key in self._entries:
            if key not in self._used and not (_OPTIMIZER.match(key) or _STEPS.fullmatch(key)):
                raise InputError(
                    f"--input {self.folder}: {key[:200]!r} is a tensor that the model of these "
                    f"sizes does not have: {self._remedy}"
                )

    def _tensor(self, name: str, part: Part) -> torch.Tensor:
        """A tensor, joined from its parts. Raises InputError if the checkpoint lacks one."""
        spelled = [name, *(name.replace(*pair) for pair in OWN_NORMS if pair[0] in name)]
        for place in chain.from_iterable(((each, None), stacked(each)) for each in spelled):
            found = self._halves(*place, part)
            if found is not None:
                return found
        experts: list[torch.Tensor] = []
        while EXPERTS in name and len(experts) < self._config.num_experts:
            found = self._halves(name.replace(EXPERTS, f"{EXPERTS}{len(experts)}."), None, part)
            if found is None:
                break
            experts.append(found)
        if experts:
            return torch.stack(experts)
        raise InputError(
            f"--input {self.folder}: {name} is missing, which the model of these sizes has: "
            f"{self._remedy}"
        )

    def _halves(self, key: str, layer: int | None, part: Part) -> torch.Tensor | None:
        if key in self._entries:
            return part(key, layer)
        keys = [f"{key}_w", f"{key}_v"]
        if not all(each in self._entries for each in keys):
            return None
        return torch.cat([part(each, layer) for each in keys])

    def _empty(self, key: str, layer: int | None) -> torch.Tensor:
        """The part without values, after a comparison with its files."""
        entry, layers = self._entries[key], self._config.model.num_layers
        if key not in self._used:
            places = self._index.storage_data
            stored = sum(places[MetadataIndex(key, each.offsets)].length for each in entry.chunks)
            dtype = entry.properties.dtype
            is_weight = dtype.is_floating_point and dtype.itemsize > 1  # no FP8
            if not is_weight or stored < self._nbytes(key):
                raise InputError(
                    f"--input {self.folder}: {key} is {list(entry.size)} of "
                    f"{dtype}, and has {stored} bytes: copy the folder again"
                )
            self._used.add(key)
        if layer is not None and entry.size[:1] != (layers,):
            raise InputError(
                f"--input {self.folder}: {key} is {list(entry.size)}, and the model has {layers} "
                f"layers: the tensors are of another one; {self._remedy}"
            )
        size = entry.size if layer is None else entry.size[1:]
        return torch.empty(size, dtype=entry.properties.dtype, device="meta")

    def _read(self, key: str, layer: int | None) -> torch.Tensor:
        tensor = torch.empty_like(self._empty(key, layer), device="cpu")
        if layer is None:
            read_part(self._index, key, (0,) * tensor.dim(), tensor, self.folder)
        else:
            start = (layer, *(0,) * tensor.dim())
            read_part(self._index, key, start, tensor[None], self.folder)
        return tensor

    def _nbytes(self, key: str) -> int:
        entry = self._entries[key]
        return torch.Size(entry.size).numel() * entry.properties.dtype.itemsize
