"""Realistic faults of rules, controllers, cutoffs, free experts, coupling and traces."""

from tests.mutants.fault import Fault

SELECTION, BALANCING = "moe_parallel/selection", "moe_parallel/balancing"
LAYERS = "moe_parallel/layers"
OF_LAYERS = ("tests/layers/test_expert_layers.py",)

FAULTS_OF_ROUTING = [
    # Rules that give a token any number of experts, and the table of token ids.
    Fault(
        "a replayed ReLU weighs by scores below 0",
        "moe_parallel/systems/relu/rule.py",
        "torch.relu(scores_TE).gather(1,",
        "scores_TE.gather(1,",
        ("tests/selection/test_threshold.py", "tests/selection/test_replayed.py"),
    ),
    Fault(
        "a replayed softmax is over the choices that the threshold would make",
        "moe_parallel/systems/threshold/rule.py",
        "chosen_of(experts_TK, scores_TE) > 0)",
        "values_TE > self.level)",
        ("tests/selection/test_threshold.py", "tests/selection/test_replayed.py"),
    ),
    Fault(
        "the softmax of the chosen leaves out their biases",
        "moe_parallel/selection/rules.py",
        "values_TE.masked_fill(~chosen_TE, lowest)",
        "scores_TE.masked_fill(~chosen_TE, lowest)",
        ("tests/selection/test_threshold.py", *OF_LAYERS),
    ),
    Fault(
        "the router keeps its tokens in fp32",
        "moe_parallel/ops/fp32_linear.py",
        "ctx.save_for_backward(x, weight)\n        return F.linear(",
        "ctx.save_for_backward(x.float(), weight)\n        return F.linear(",
        ("tests/ops/test_fp32_linear.py", "tests/plan/test_parity.py"),
    ),
    Fault(
        "all free experts are taken for zero experts",
        f"{SELECTION}/rules.py",
        "(experts_TK >= first + self.num_zero)",
        "(experts_TK >= first + self.num_free)",
        ("tests/layers/test_free_experts.py", *OF_LAYERS),
    ),
    Fault(
        "the ids of several sequences are in another order than their tokens",
        f"{LAYERS}/dispatched.py",
        "parts_BS[part].t().flatten()",
        "parts_BS[part].flatten()",
        OF_LAYERS,
    ),
    Fault(
        "the table of token ids is not saved",
        "moe_parallel/systems/hash/rule.py",
        'self.register_buffer("experts_VK", experts_VK.clone())',
        'self.register_buffer("experts_VK", experts_VK.clone(), persistent=False)',
        ("tests/selection/test_hash_routing.py",),
    ),
    Fault(
        "UoE's norms and loads are in bf16",
        "moe_parallel/systems/uoe/rule.py",
        "torch.linalg.vector_norm(node_TER.to(dtype), dim=2)",
        "torch.linalg.vector_norm(node_TER, dim=2)",
        ("tests/layers/test_union.py", *OF_LAYERS),
    ),
    Fault(
        "CoRM's queries at the reference keep their lengths",
        "moe_parallel/systems/corm/rule.py",
        "F.normalize((w_query_XD @ self.reference.mean_D).view(e, r), dim=1)",
        "(w_query_XD @ self.reference.mean_D).view(e, r)",
        ("tests/layers/test_contrastive.py", *OF_LAYERS),
    ),
    Fault(
        "evaluations move CoRM's reference",
        "moe_parallel/systems/corm/rule.py",
        "if self.routes:",
        "if True:",
        ("tests/layers/test_contrastive.py",),
    ),
    Fault(
        "CoRM's reference is not saved",
        "moe_parallel/systems/corm/rule.py",
        'self.register_buffer("mean_D", torch.zeros(width))',
        'self.register_buffer("mean_D", torch.zeros(width), persistent=False)',
        ("tests/layers/test_contrastive.py", "tests/training/test_systems.py"),
    ),
    Fault(
        "each rank has a reference of its own",
        "moe_parallel/systems/corm/rule.py",
        "super().balance(group)\n        self.reference.update(group)",
        "super().balance(group)\n        self.reference.update(self.context.groups.cp)",
        ("tests/model/test_layouts.py",),
    ),
    Fault(
        "the cutoffs that Routing-Free logs fall as its biases rise",
        "moe_parallel/systems/routing_free/rule.py",
        "self.theta + self.b_E.detach().float()",
        "self.theta - self.b_E.detach().float()",
        ("tests/layers/test_routing_free.py", *OF_LAYERS),
    ),
    Fault(
        "constant experts share one softmax",
        f"{SELECTION}/rules.py",
        "logits_TCA.softmax(-1)",
        "logits_TCA.softmax(1)",
        ("tests/layers/test_free_experts.py", *OF_LAYERS),
    ),
    # What moves between steps.
    Fault(
        "a controller follows the choices of its own rank",
        f"{BALANCING}/controller.py",
        "        dist.all_reduce(counts, group=group)\n",
        "        pass\n",
        ("tests/balancing/test_controller.py",),
    ),
    Fault(
        "the proportional part of p stays in the sum of its errors",
        "moe_parallel/systems/top_p/rule.py",
        "self.state[1].double()",
        "self.state[0].double()",
        ("tests/balancing/test_controller.py",),
    ),
    Fault(
        "a quantile bias is solved as if there were none yet",
        f"{BALANCING}/bias.py",
        "midpoint(ranked_AE + self.bias_E, k, dim=1)",
        "midpoint(ranked_AE, k, dim=1)",
        ("tests/balancing/test_bias.py",),
    ),
    Fault(
        "quantiles of micro-batches are divided by the number of ranks",
        f"{BALANCING}/load.py",
        "self.sums[:-1] / number.clamp(min=1)",
        "self.sums[:-1] / group.size()",
        ("tests/balancing/test_bias.py", "tests/balancing/test_cutoffs.py"),
    ),
    Fault(
        "all choices are compared with the tokens of one rank",
        "moe_parallel/systems/threshold/rule.py",
        "            dist.all_reduce(self.tokens_1, group=group)\n",
        "            pass\n",
        ("tests/balancing/test_cutoffs.py",),
    ),
    # The coupling loss on several ranks.
    Fault(
        "the coupling loss is divided by the experts of one rank",
        f"{BALANCING}/losses.py",
        "/ len(m.own_E) ** 2",
        "/ len(m.norms_LE) ** 2",
        ("tests/balancing/test_coupling.py",),
    ),
    Fault(
        "norms of the coupling are summed over ranks with other experts",
        f"{BALANCING}/losses.py",
        ".square().sum(dim=2), groups.etp)",
        ".square().sum(dim=2), groups.ep)",
        ("tests/balancing/test_coupling.py",),
    ),
    Fault(
        "the coupling loss grows with the ranks that share its gradient",
        f"{BALANCING}/losses.py",
        "share = groups.etp_ep.size() / groups.tp_cp.size()",
        "share = 1.0",
        ("tests/balancing/test_coupling.py", "tests/model/test_layouts.py"),
    ),
    # Traces and replays.
    Fault(
        "a trace has no experts beyond the first 128",
        f"{LAYERS}/given_choices.py",
        "experts_TK.to(torch.int16)",
        "experts_TK.to(torch.int8)",
        ("tests/layers/test_router_trace.py", "tests/telemetry/test_router_trace.py"),
    ),
    Fault(
        "a text gets the choices of the first of its file",
        "moe_parallel/telemetry/router_trace.py",
        "steps[file].experts_LNSK[:, row]",
        "steps[file].experts_LNSK[:, 0]",
        ("tests/telemetry/test_routed_experts.py",),
    ),
    Fault(
        "Megatron-Core's tokens are taken sequence by sequence",
        "moe_parallel/telemetry/routed_experts.py",
        'experts_TK.reshape(-1, micro_batch_size, record["topk"])',
        'experts_TK.reshape(micro_batch_size, -1, record["topk"]).swapaxes(0, 1)',
        ("tests/telemetry/test_routed_experts.py",),
    ),
    Fault(
        "a continued run leaves the step after its checkpoint in the trace",
        "moe_parallel/telemetry/router_trace.py",
        "reversed(range(done + 1, there[-1] + 1))",
        "reversed(range(done + 2, there[-1] + 1))",
        ("tests/telemetry/test_router_trace.py",),
    ),
    Fault(
        "a replay asks for steps after the next exit",
        "moe_parallel/training/router_trace.py",
        "(done // leaves + 1) * leaves",
        "done + leaves",
        ("tests/training/test_router_trace.py",),
    ),
]
