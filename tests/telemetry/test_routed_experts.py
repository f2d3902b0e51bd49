"""Arrays in the forms of vLLM, SGLang and Megatron-Core, as our files."""

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_parallel.errors import InputError
from moe_parallel.telemetry.routed_experts import of_megatron, of_sglang, of_vllm, write_texts
from moe_parallel.telemetry.router_trace import REPLAY, RecordedTexts, crc_of, read_replay

#: Three layers of which the second and third have experts, four tokens, two of five experts each.
LAYERS = [2, 3]
LAYER_2 = [[4, 0], [1, 2], [3, 1], [0, 4]]
LAYER_3 = [[2, 3], [0, 1], [4, 3], [1, 0]]
DENSE = [[0, 0]] * 4
BY_TOKEN = [list(rows) for rows in zip(DENSE, LAYER_2, LAYER_3, strict=True)]


def test_vllm_gives_an_array_or_the_base64_of_its_file() -> None:
    all_layers = np.array(BY_TOKEN, np.uint8)
    file = io.BytesIO()
    np.save(file, all_layers)
    text = base64.b64encode(file.getvalue()).decode()
    for given in (all_layers, text, all_layers[:, 1:].astype(np.int16).tolist()):
        assert of_vllm(given, LAYERS).tolist() == [LAYER_2, LAYER_3]


def test_sglang_gives_the_base64_of_its_numbers() -> None:
    numbers = [expert for token in BY_TOKEN for layer in token for expert in layer]
    text = base64.b64encode(struct.pack(f"<{len(numbers)}i", *numbers)).decode()
    assert of_sglang(text, LAYERS, num_layers=3, topk=2).tolist() == [LAYER_2, LAYER_3]


def test_megatron_core_writes_a_line_for_each_layer_of_a_micro_batch(tmp_path: Path) -> None:
    """Of two micro-batches of two sequences of two tokens; token by token, as [S, B]."""
    experts = iter(range(100))
    lines = []
    for step in (6, 7):
        for _ in range(2):
            for layer in (1, 2):
                rows = [[next(experts), 100] for _ in range(4)]
                about = {"step": step, "stage": "pre_dispatch", "block": "decoder", "rank": 0}
                lines.append(about | {"layer": layer, "topk": 2, "top_indices": rows})
        lines.append(lines[-1] | {"block": "mtp", "mtp_idx": 0})
    file = tmp_path / "router_trace_rank0.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    layers, found = of_megatron(file, 7, micro_batch_size=2)
    assert layers == LAYERS and found.shape == (2, 4, 2, 2)
    assert found[0, :, :, 0].tolist() == [[16, 18], [17, 19], [24, 26], [25, 27]]
    assert found[1, :, :, 0].tolist() == [[20, 22], [21, 23], [28, 30], [29, 31]]
    for step, micro_batch_size in ((8, 2), (7, 3)):
        with pytest.raises(InputError, match=f"rank0.jsonl is no router trace with a step {step} "):
            of_megatron(file, step, micro_batch_size)


EXPERTS = np.array([LAYER_2, LAYER_3])


def write(folder: Path, name: str, texts: list[list[int]], length: int = 3) -> None:
    rows = [np.roll(EXPERTS, shift, axis=1) for shift in range(len(texts))]
    write_texts(folder / f"texts-{name}.npz", texts, rows, length, 5, LAYERS)


def test_choices_are_found_by_text(tmp_path: Path) -> None:
    write(tmp_path, "a", [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    write(tmp_path, "b", [[3, 2, 1, 0]])
    replay = read_replay(tmp_path, REPLAY)
    assert isinstance(replay, RecordedTexts)
    assert replay.shape.sequences == 3 and replay.shape.layers == (2, 3)
    ours = [crc_of(np.array(text)) for text in ([3, 2, 1], [6, 7, 8])]
    found = replay.step(np.array([ours[0], 0, ours[1]])).experts_LNSK
    assert found[:, 0].tolist() == EXPERTS[:, :3].tolist()
    assert found[:, 2].tolist() == np.roll(EXPERTS, 1, axis=1)[:, :3].tolist()
    with pytest.raises(InputError, match=r"has 3 texts, and not that of sequence 2 of this step"):
        replay.step(np.array([ours[0], 5]))


REFUSED: list[tuple[Any, str]] = [
    (lambda f: write(f, "a", [[1, 2, 3, 4]], length=5), "text 1 for .* has 4 tokens and choices"),
    (lambda f: write_texts(f / "1.npz", [], [], 3, 5, LAYERS), "call it texts-NAME.npz"),
    (
        lambda f: write_texts(f / "texts-a.npz", [[1, 2, 3]], [EXPERTS + 1], 3, 5, LAYERS),
        "chooses the experts 1 to 5, and there are 5",
    ),
    (
        lambda f: write_texts(f / "texts-a.npz", [[1, 2, 3]], [EXPERTS * 0], 3, 5, LAYERS),
        "has an expert twice at token 1: the generator has not recorded it",
    ),
    (lambda f: of_vllm("?", LAYERS), "routed_experts of vLLM is no base64"),
    (lambda f: of_vllm("abcd", LAYERS), "routed_experts of vLLM is no .npy file"),
    (lambda f: of_vllm([[1]], LAYERS), r"is int64 \[1, 1\], and whole numbers"),
    (lambda f: of_vllm([[[1]]], LAYERS), "has 1 layers, and the MoE layers are"),
    (lambda f: of_sglang("AAAAAA==", LAYERS, 3, 2), "has 1 numbers, no multiple of 3 layers x 2"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED)
def test_one_line_tells_what_is_wrong(tmp_path: Path, act: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        act(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_text_has_one_place(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path, name, [[1, 2, 3]])
    with pytest.raises(InputError, match=r"texts-b.npz has a text a second time, at 1; it is"):
        read_replay(tmp_path, REPLAY)
