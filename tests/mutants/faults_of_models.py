"""Realistic faults of models in use: texts that are generated, and weights of Hugging Face."""

from tests.mutants.fault import Fault

PAST, HUGGINGFACE = "moe_parallel/layers/past.py", "moe_parallel/huggingface"

FAULTS_OF_MODELS = [
    Fault(
        "the gradient of a norm over all heads sees its own rank's heads alone",
        "moe_parallel/ops/rms_norm.py",
        "ctx.total(torch.linalg.vecdot(g, z)[..., None])",
        "torch.linalg.vecdot(g, z)[..., None]",
        ("tests/model/test_heads_norm.py", "tests/model/test_layouts.py"),
    ),
    Fault(
        "the gradient of the head replaces those of the micro-batches before",
        "moe_parallel/model/linear_cross_entropy.py",
        "ctx.main_gradient_VD.addcmul_(dw_VD, factor)",
        "ctx.main_gradient_VD.copy_(dw_VD * factor)",
        ("tests/model/test_linear_cross_entropy.py",),
    ),
    Fault(
        "the hook is not told that the gradient of a linear layer or the head has been added",
        "moe_parallel/experts/experts.py",
        "return gradient_in_main_grad(weight), weight.main_grad",
        "return weight, weight.main_grad",
        ("tests/model/test_same_run.py",),
    ),
    # Generation with kept keys and values.
    Fault(
        "the first rows of the cache stay when a text is complete",
        PAST,
        "each.k_BPGC[index], each.v_BPGC[index]",
        "each.k_BPGC[: len(rows)], each.v_BPGC[: len(rows)]",
        ("tests/generation/test_decode.py",),
    ),
    Fault(
        "a generated token is rotated by the place before its own",
        "moe_parallel/generation/language_model.py",
        "angles_P11C[length_B]",
        "angles_P11C[length_B - 1]",
        ("tests/generation/test_decode.py",),
    ),
    Fault(
        "a short text attends to places that hold no token yet",
        "moe_parallel/model/attention.py",
        "(places_P <= past.length_B[:, None])",
        "(places_P <= past.length_B.max().expand(len(past.length_B), 1))",
        ("tests/generation/test_decode.py", "tests/model/test_attention.py"),
    ),
    Fault(
        "the sum of a segment goes on in the next one as a text is generated",
        "moe_parallel/selection/segments.py",
        "        self.sum_BX = self.sum_BX.masked_fill(ends_B[:, None], 0)\n",
        "",
        ("tests/selection/test_segments.py", "tests/generation/test_decode.py"),
    ),
    Fault(
        "each answer of a chat is drawn like the one before",
        "moe_parallel/generation/continuation.py",
        "        self._given += len(prompts)\n",
        "",
        ("tests/generation/test_continuation.py", "tests/generation/test_sampling.py"),
    ),
    Fault(
        "a text is longer than the sequences of the model",
        "moe_parallel/generation/continuation.py",
        "self.seq_length - len(prompts[i])",
        "self.seq_length",
        ("tests/generation/test_continuation.py", "tests/tools/test_generate.py"),
    ),
    # Import from and export to transformers.
    Fault(
        "an import stacks the keys under all queries",
        f"{HUGGINGFACE}/forms.py",
        "torch.cat(by_group, dim=1).flatten(0, 1)",
        "torch.cat(tensors)",
        ("tests/huggingface/test_families.py", "tests/huggingface/test_importing.py"),
    ),
    Fault(
        "an export exchanges the two halves of an expert",
        f"{HUGGINGFACE}/forms.py",
        "in part[0].unbind(1)]",
        "in part[0].flip(1).unbind(1)]",
        ("tests/huggingface/test_families.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an import takes the architecture's rotary base for the folder's",
        f"{HUGGINGFACE}/configuration.py",
        'fields.number("rope_theta", family.rope_theta)',
        "family.rope_theta",
        ("tests/huggingface/test_families.py",),
    ),
    Fault(
        "an export says that shares of sigmoids do not sum to 1",
        f"{HUGGINGFACE}/own_rules.py",
        'topk.sigmoid_share_of_selected: ("sigmoid", True)',
        'topk.sigmoid_share_of_selected: ("sigmoid", False)',
        ("tests/huggingface/test_own_model.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an export adds Routing-Free's biases to its norms",
        f"{HUGGINGFACE}/own_steps.py",
        "(n,), torch.neg, always_fp32",
        "(n,), torch.clone, always_fp32",
        ("tests/huggingface/test_steps.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an exported gate of the margin is that of the score",
        "moe_parallel/hf/gates_moe_parallel.py",
        '"sigmoid_of_value": lambda scores, values, chosen: torch.sigmoid(values)',
        '"sigmoid_of_value": lambda scores, values, chosen: torch.sigmoid(scores)',
        ("tests/hf/test_modeling_moe_parallel.py", "tests/huggingface/test_export.py"),
    ),
]
