"""The choices of other programs, as files that --moe-router-replay reads.

`of_vllm`, `of_sglang` and `of_megatron` make our arrays of what these programs give; `write_texts`
writes them with the texts to which they belong. docs/router_trace.md shows the use.

Shape suffixes: L MoE layers, H all layers, T tokens of a response, S of a sequence in training, N
sequences, K experts per token, best choice first where the program says so.
"""

from __future__ import annotations

import base64
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_parallel.errors import InputError
from moe_parallel.telemetry.router_trace import TraceShape, TraceStep, crc_of, is_texts, write_step

Array = np.ndarray[Any, Any]


def of_vllm(routed_experts: Any, layers: Sequence[int]) -> Array:
    """`CompletionOutput.routed_experts` of vLLM, [T - 1, L or H, K], or the base64 of its .npy file
    from a server, as [L, T - 1, K].

    vLLM 0.21 gives the prompt's apart, as `prompt_routed_experts`: join the two along axis 0.

    Args:
        layers: the numbers of the MoE layers, from 1.

    Raises InputError for what is no such array.
    """
    if isinstance(routed_experts, str):
        content = io.BytesIO(_bytes(routed_experts, "vLLM"))
        try:
            routed_experts = np.load(content, allow_pickle=False)
        except (EOFError, OSError, ValueError) as error:
            raise InputError(f"routed_experts of vLLM is no .npy file ({error})") from error
    return _of_layers(np.asarray(routed_experts), layers, "vLLM")


def of_sglang(routed_experts: str, layers: Sequence[int], num_layers: int, topk: int) -> Array:
    """`meta_info["routed_experts"]` of SGLang, the base64 of little-endian int32 [T - 1, H, K], as
    [L, T - 1, K].

    Args:
        layers: the numbers of the MoE layers, from 1. Those of dense layers are left out.
        num_layers, topk: H and K.

    Raises InputError for what is no such array.
    """
    numbers = np.frombuffer(_bytes(routed_experts, "SGLang"), "<i4")
    if len(numbers) % (num_layers * topk):
        raise InputError(
            f"routed_experts of SGLang has {len(numbers)} numbers, no multiple of {num_layers} "
            f"layers x {topk} experts per token: give the model's num_hidden_layers and "
            "num_experts_per_tok"
        )
    return _of_layers(numbers.reshape(-1, num_layers, topk), layers, "SGLang")


def of_megatron(file: str | Path, step: int, micro_batch_size: int) -> tuple[list[int], Array]:
    """A step of `router_trace_rank*.jsonl` of Megatron-Core's training (--moe-routing-trace-path).

    Such a file does not tell the ranks of a pipeline, the tokens of tensor- and context-parallel
    ranks, and recomputation apart: only traces without them are what they seem. The experts of a
    token come in the order of their numbers.

    Returns:
        The numbers of the MoE layers, from 1, and [L, N, S, K] of this data-parallel rank,
        one micro-batch after the other.

    Raises InputError.
    """
    of_layers: dict[int, list[Array]] = defaultdict(list)
    try:
        for line in Path(file).read_text().splitlines():
            record = json.loads(line)
            if record["step"] == step and record["block"] == "decoder":
                experts_TK = np.array(record["top_indices"], np.int32)
                # Tokens go through a layer as [S, B].
                experts_SBK = experts_TK.reshape(-1, micro_batch_size, record["topk"])
                of_layers[record["layer"] + 1].append(experts_SBK.swapaxes(0, 1))
        layers = sorted(of_layers)
        experts_LNSK = np.stack([np.concatenate(of_layers[layer]) for layer in layers])
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from error
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise InputError(
            f"{file} is no router trace with a step {step} in micro-batches of {micro_batch_size}: "
            "name a router_trace_rank*.jsonl of --moe-routing-trace-path, and its step"
        ) from error
    return layers, experts_LNSK


def write_texts(
    file: str | Path,
    tokens: Iterable[Sequence[int]],
    experts_LTK: Iterable[Array],
    seq_length: int,
    num_experts: int,
    layers: Sequence[int],
) -> None:
    """Writes the choices of the first `seq_length` tokens of each text.

    Args:
        file: FOLDER/texts-NAME.npz; --moe-router-replay FOLDER reads all such files of a folder.
        tokens: the ids of each text.
        experts_LTK: for each text, [L, T, K], from its first token on; a last token without a row
            is usual, because a generator does not read it.
        layers: the numbers of the MoE layers, from 1.

    Raises InputError if a text is shorter, or a token's choices are not different experts.
    """
    file, texts, chosen = Path(file), [], []
    if not is_texts(file.name):
        raise InputError(f"{file}: call it texts-NAME.npz")
    for number, (ids, experts) in enumerate(zip(tokens, experts_LTK, strict=True), start=1):
        of_text = experts[:, :seq_length]
        if min(len(ids), of_text.shape[1]) < seq_length or len(experts) != len(layers):
            raise InputError(
                f"text {number} for {file} has {len(ids)} tokens and choices of {len(experts)} "
                f"layers for {experts.shape[1]}, and {seq_length} tokens in {len(layers)} layers "
                "are needed: generate as many"
            )
        if of_text.min() < -1 or of_text.max() >= num_experts:
            raise InputError(
                f"text {number} for {file} chooses the experts {of_text.min()} to "
                f"{of_text.max()}, and there are {num_experts}: give the model's number"
            )
        sorted_LSK = np.sort(of_text, axis=2)
        twice_LS = ((np.diff(sorted_LSK) == 0) & (sorted_LSK[:, :, 1:] >= 0)).any(2)
        if twice_LS.any():
            raise InputError(
                f"text {number} for {file} has an expert twice at token "
                f"{np.flatnonzero(twice_LS.any(0))[0] + 1}: the generator has not recorded it"
            )
        texts.append(crc_of(np.asarray(ids[:seq_length])))
        chosen.append(of_text)
    experts_LNSK = np.stack(chosen, axis=1)
    shape = TraceShape(tuple(layers), num_experts, *experts_LNSK.shape[1:])
    file.parent.mkdir(parents=True, exist_ok=True)
    write_step(file, shape, TraceStep(np.array(texts), experts_LNSK))


def _bytes(text: str, whose: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InputError(f"routed_experts of {whose} is no base64 ({error})") from error


def _of_layers(experts_THK: Array, layers: Sequence[int], whose: str) -> Array:
    shape = experts_THK.shape
    if len(shape) != 3 or experts_THK.dtype.kind not in "iu":
        raise InputError(
            f"routed_experts of {whose} is {experts_THK.dtype} {list(shape)}, and whole numbers "
            "[tokens, layers, experts per token] are needed"
        )
    if shape[1] == len(layers):
        return experts_THK.swapaxes(0, 1)
    if shape[1] < max(layers):
        raise InputError(
            f"routed_experts of {whose} has {shape[1]} layers, and the MoE layers are {layers}: "
            "give the numbers of that model, from 1"
        )
    return experts_THK[:, np.array(layers) - 1].swapaxes(0, 1)
