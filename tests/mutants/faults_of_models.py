"""Realistic faults of models in use: generated texts, weights and experts of Hugging Face."""

from tests.mutants.fault import Fault

HUGGINGFACE = "moe_parallel/huggingface"
MEGATRON_CHECKPOINT = "moe_parallel/megatron_checkpoint"

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
    # The layers in Megatron-LM.
    Fault(
        "in Megatron-LM, biases and cutoffs stand still",
        "moe_parallel/megatron.py",
        "            self.mlp.after_step()\n",
        "",
        ("tests/test_megatron.py",),
    ),
    Fault(
        "in Megatron-LM, a resumed run counts its steps from 0",
        "moe_parallel/megatron.py",
        "self._steps = int(self.steps)",
        "self._steps = 0",
        ("tests/test_megatron.py",),
    ),
    Fault(
        "in Megatron-LM, a loss per token makes auxiliary losses smaller with tp",
        "moe_parallel/megatron.py",
        "loss * (len(x_TD) * groups.tp_cp.size())",
        "loss * len(x_TD)",
        ("tests/test_megatron.py",),
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
        "shifted(e_GBE, first)",
        "e_GBE",
        ("tests/hf/test_modeling_moe_parallel.py", "tests/harness/test_model.py"),
    ),
    # Import from and export to transformers.
    Fault(
        "an import stacks the keys under all queries",
        f"{HUGGINGFACE}/tensors.py",
        "torch.cat(by_group, dim=1).flatten(0, 1)",
        "torch.cat(tensors)",
        ("tests/huggingface/test_path.py", "tests/huggingface/test_importing.py"),
    ),
    Fault(
        "an export exchanges the two halves of an expert",
        f"{HUGGINGFACE}/tensors.py",
        "in part[0].unbind(1)]",
        "in part[0].flip(1).unbind(1)]",
        ("tests/huggingface/test_path.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an import takes the architecture's rotary base for the folder's",
        f"{HUGGINGFACE}/families.py",
        'fields.get("rope_theta", float, family.rope_theta)',
        "family.rope_theta",
        ("tests/huggingface/test_families.py",),
    ),
    Fault(
        "an export says that shares of sigmoids do not sum to 1",
        f"{HUGGINGFACE}/own_model.py",
        '"norm_topk_prob": normalized',
        '"norm_topk_prob": normalized and scoring != "sigmoid"',
        ("tests/huggingface/test_export.py",),
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
        "moe_parallel/selection/rules.py",
        '"sigmoid_of_value": sigmoid_of_value',
        '"sigmoid_of_value": sigmoid',
        ("tests/hf/test_modeling_moe_parallel.py", "tests/huggingface/test_export.py"),
    ),
    Fault(
        "an import from Megatron-LM exchanges the two halves of an expert",
        f"{MEGATRON_CHECKPOINT}/tensors.py",
        "theirs[0].unflatten(1, (2, -1))",
        "theirs[0].unflatten(1, (2, -1)).flip(1)",
        ("tests/megatron_checkpoint/test_both_ways.py",),
    ),
    Fault(
        "a checkpoint of Megatron-LM may link to files elsewhere",
        f"{MEGATRON_CHECKPOINT}/tensors.py",
        "path.is_symlink() or not path.is_file()",
        "not path.is_file()",
        ("tests/megatron_checkpoint/test_bad_input.py",),
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
