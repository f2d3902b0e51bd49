"""Realistic faults of models in use: generated texts, weights and experts of Hugging Face."""

from tests.mutants.fault import Fault

HUGGINGFACE = "moe_parallel/huggingface"

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
    # Generation, and likelihoods for the harness.
    Fault(
        "a prompt that is padded in its batch attends to the padding",
        "moe_parallel/generation.py",
        "torch.arange(ends.length)[None] >= torch.tensor(padding)[:, None]",
        "torch.arange(ends.length)[None] >= 0 * torch.tensor(padding)[:, None]",
        ("tests/test_generation.py",),
    ),
    Fault(
        "a text is longer than the sequences of the model",
        "moe_parallel/generation.py",
        "min(tokens, writer.seq_length - len(prompt))",
        "tokens",
        ("tests/test_generation.py",),
    ),
    Fault(
        "each answer of a chat is drawn like the one before",
        "moe_parallel/generation.py",
        "        from transformers import GenerationConfig, StoppingCriteriaList\n",
        "        from transformers import GenerationConfig, StoppingCriteriaList\n"
        "        torch.manual_seed(0)\n",
        ("tests/test_generation.py",),
    ),
    Fault(
        "the padding of a batch counts in the mean of Lory's first segment",
        "moe_parallel/harness/model.py",
        "alone = config.settled_after != 0",
        "alone = config.settled_after is None",
        ("tests/harness/test_model.py",),
    ),
    Fault(
        "a segment is merged by its own mean, which later tokens are part of",
        "moe_parallel/hf/modeling_moe_parallel.py",
        "                before = segment\n",
        "",
        ("tests/hf/test_modeling_moe_parallel.py", "tests/harness/test_model.py"),
    ),
    # Import from and export to transformers.
    Fault(
        "an import stacks the keys under all queries",
        f"{HUGGINGFACE}/tensors.py",
        "torch.cat(by_group, dim=1).flatten(0, 1)",
        "torch.cat(tensors)",
        ("tests/huggingface/test_families.py", "tests/huggingface/test_importing.py"),
    ),
    Fault(
        "an export exchanges the two halves of an expert",
        f"{HUGGINGFACE}/tensors.py",
        "in part[0].unbind(1)]",
        "in part[0].flip(1).unbind(1)]",
        ("tests/huggingface/test_families.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an import takes the architecture's rotary base for the folder's",
        f"{HUGGINGFACE}/families.py",
        'fields.number("rope_theta", family.rope_theta)',
        "family.rope_theta",
        ("tests/huggingface/test_families.py",),
    ),
    Fault(
        "an export says that shares of sigmoids do not sum to 1",
        f"{HUGGINGFACE}/own_model.py",
        'topk.sigmoid_share_of_selected: ("sigmoid", True)',
        'topk.sigmoid_share_of_selected: ("sigmoid", False)',
        ("tests/huggingface/test_own_model.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an export adds Routing-Free's biases to its norms",
        f"{HUGGINGFACE}/tensors.py",
        '"gate.expert_bias", torch.neg',
        '"gate.expert_bias", torch.clone',
        ("tests/huggingface/test_steps.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an exported gate of the margin is that of the score",
        "moe_parallel/hf/modeling_moe_parallel.py",
        '"sigmoid_of_value": lambda scores, values, chosen: torch.sigmoid(values)',
        '"sigmoid_of_value": lambda scores, values, chosen: torch.sigmoid(scores)',
        ("tests/hf/test_modeling_moe_parallel.py", "tests/huggingface/test_export.py"),
    ),
    # transformers' experts.
    Fault(
        "experts of other ranks are computed by the last one here, and teach the router",
        "moe_parallel/library/transformers_experts.py",
        "masked_fill(experts_TK >= count, -1)",
        "clamp(max=count - 1)",
        ("tests/library/test_transformers_experts.py",),
    ),
    Fault(
        "experts with a gate of their own are computed as SwiGLU",
        "moe_parallel/library/transformers_experts.py",
        "type(experts)._apply_gate is _default_apply_gate",
        "callable(_default_apply_gate)",
        ("tests/library/test_transformers_experts.py",),
    ),
]
