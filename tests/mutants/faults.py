"""Realistic faults, applied one at a time, to measure the tests.

If a quoted line of code changes, its fault must change too: tests/mutants/test_faults.py fails for
every fault whose `old` is no longer found.
"""

from tests.mutants.fault import Fault
from tests.mutants.faults_of_kernels import FAULTS_OF_KERNELS
from tests.mutants.faults_of_models import FAULTS_OF_MODELS
from tests.mutants.faults_of_routing import FAULTS_OF_ROUTING
from tests.mutants.faults_of_runs import FAULTS_OF_RUNS

SELECTION, LOSSES = "moe_parallel/selection", "moe_parallel/balancing/losses.py"
LAYERS = "moe_parallel/layers"
A_TO_A = "moe_parallel/dispatch/all_to_all.py"
TRAINING = "moe_parallel/training"
OF_LAYERS = ("tests/layers", "tests/model/test_layouts.py")
OF_SHARES = ("tests/model/test_context_parallel.py", "tests/model/test_attention.py")

FAULTS = [
    # Who is chosen, and with what weight.
    Fault(
        "top-K takes the smallest",
        f"{SELECTION}/topk.py",
        "greatest(ranked_TE, self.k, ties_TE)",
        "greatest(-ranked_TE, self.k, ties_TE)",
        ("tests/selection",),
    ),
    Fault(
        "the balancing bias weighs too",
        f"{SELECTION}/topk.py",
        "self.of(scores_TE, greatest(ranked_TE",
        "self.of(ranked_TE, greatest(ranked_TE",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "softmax over all is not renormalized over the chosen",
        f"{SELECTION}/rules.py",
        "torch.softmax(scores_TE.gather(1, experts_TK), dim=1)",
        "torch.softmax(scores_TE, dim=1).gather(1, experts_TK)",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "a group counts its best expert alone",
        f"{SELECTION}/rules.py",
        ".topk(max(1, k // self.topk), dim=2)",
        ".topk(1, dim=2)",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "top-p drops the expert that crosses p",
        "moe_parallel/selection/rules.py",
        ".double().cumsum(dim=1) - ",
        ".double().cumsum(dim=1) - 0 * ",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "top-p takes one expert over its limit",
        "moe_parallel/systems/top_p/rule.py",
        "needed_TK[:, self.most :]",
        "needed_TK[:, self.most + 1 :]",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "expert choice rounds down",
        "moe_parallel/systems/expert_choice/rule.py",
        "math.floor(share + Fraction(1, 2))",
        "math.floor(share)",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "capacity takes one token too many",
        f"{SELECTION}/capacity.py",
        "place >= limit, -1",
        "place > limit, -1",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "capacity is rounded down",
        f"{SELECTION}/capacity.py",
        "math.ceil(Fraction",
        "math.floor(Fraction",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "last choices are dropped last",
        f"{SELECTION}/capacity.py",
        "slots_TK.t().flatten()",
        "slots_TK.t().flip(0).flatten()",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "a Lory segment merges by the one after it",
        f"{SELECTION}/rules.py",
        "[first(e_GBE), e_GBE[:-1]]",
        "[first(e_GBE), e_GBE[1:]]",
        ("tests/selection", "tests/layers"),
    ),
    Fault(
        "a short segment is divided by the full length",
        f"{SELECTION}/segments.py",
        "    sizes_G11[-1] = segment_sizes(tokens, length)[-1]\n",
        "",
        ("tests/selection", "tests/layers"),
    ),
    # Losses on routing and balance.
    Fault(
        "the aux loss is not divided by tp",
        LOSSES,
        "tokens.sum(sums_2E) / (len(choices.scores_TE) * tokens.num_shares)",
        "tokens.sum(sums_2E) / len(choices.scores_TE)",
        ("tests/balancing", "tests/model/test_layouts.py"),
    ),
    Fault(
        "the aux loss of sequences is their sum",
        LOSSES,
        "share_BE * mean_BE) / tokens.num_sequences",
        "share_BE * mean_BE)",
        ("tests/balancing", "tests/layers"),
    ),
    Fault(
        "importance is divided by the mean, not its square",
        LOSSES,
        "importance_E.mean().square()",
        "importance_E.mean()",
        ("tests/balancing", "tests/layers"),
    ),
    Fault(
        "the z-loss counts twice",
        LOSSES,
        '"z_loss", selection.moe_z_loss_coeff',
        '"z_loss", 2 * selection.moe_z_loss_coeff',
        OF_LAYERS,
    ),
    Fault(
        "the aux loss per choice is divided by layers alone",
        LOSSES,
        "context.num_moe_layers * selection.moe_router_topk",
        "context.num_moe_layers",
        OF_LAYERS,
    ),
    Fault(
        "the loads of a step are those of one rank",
        "moe_parallel/balancing/load.py",
        "            dist.all_reduce(self.counts, group=group)\n",
        "            pass\n",
        ("tests/balancing", "tests/model/test_layouts.py"),
    ),
    Fault(
        "the bias favors the busy",
        "moe_parallel/balancing/bias.py",
        "counts_E.sum() - len(counts_E) * counts_E",
        "len(counts_E) * counts_E - counts_E.sum()",
        ("tests/balancing",),
    ),
    Fault(
        "the mean of a bias drifts",
        "moe_parallel/balancing/bias.py",
        "self.bias_E.copy_(bias_E - bias_E.mean())",
        "self.bias_E.copy_(bias_E)",
        ("tests/balancing",),
    ),
    Fault(
        "an error that shrinks is pushed back too",
        "moe_parallel/balancing/bias.py",
        "growth_E * (before_E * growth_E > 0)",
        "growth_E",
        ("tests/balancing",),
    ),
    Fault(
        "the quantile bias keeps what it should replace",
        "moe_parallel/balancing/bias.py",
        "self.ema * self.bias_E + (1 - self.ema) * (solved_E",
        "(1 - self.ema) * self.bias_E + self.ema * (solved_E",
        ("tests/balancing",),
    ),
    Fault(
        "each rank has a quantile bias of its own",
        "moe_parallel/balancing/load.py",
        "            dist.all_reduce(self.sums, group=group)\n",
        "            pass\n",
        ("tests/balancing", "tests/model/test_layouts.py"),
    ),
    Fault(
        "loads are summed over dp without tp",
        f"{LAYERS}/dispatched.py",
        "self.balance(self.context.groups.tp_dp_cp)",
        "self.balance(self.context.groups.dp)",
        ("tests/balancing", *OF_LAYERS),
    ),
    # Layers and the ranks that they are spread over.
    Fault(
        "jitter in evaluation, none in training",
        f"{LAYERS}/routed.py",
        "(self.training and eps)",
        "(not self.training and eps)",
        OF_LAYERS,
    ),
    Fault(
        "an evaluation chooses by the rule of training",
        f"{LAYERS}/dispatched.py",
        "self.rule if self.training else self.evaluation_rule",
        "self.rule",
        (*OF_LAYERS, "tests/evaluation"),
    ),
    Fault(
        "SMEAR drops experts in evaluation",
        f"{LAYERS}/merged.py",
        "self.rule if self.training else self.evaluation_rule",
        "self.rule",
        (*OF_LAYERS, "tests/evaluation"),
    ),
    Fault(
        "the gradient of W_down is not summed over tp",
        f"{LAYERS}/autonomous.py",
        "return nullcontext(self._layer.replicated(getattr(self._layer, self._name)))",
        "return nullcontext(getattr(self._layer, self._name))",
        OF_LAYERS,
    ),
    Fault(
        "experts take the W_down of another rank's",
        "moe_parallel/experts/experts.py",
        "first = self.groups.ep.rank()",
        "first = self.groups.etp.rank()",
        ("tests/experts", *OF_LAYERS),
    ),
    Fault(
        "gradients of experts are averaged as dense ones",
        "moe_parallel/experts/experts.py",
        "weight.allreduce = same_as_dense",
        "weight.allreduce = True",
        ("tests/experts", "tests/model/test_layouts.py"),
    ),
    Fault(
        "a token goes to a rank once for each choice there",
        "moe_parallel/ops/packed_rows.py",
        "to_TC.masked_fill(is_later_TC, -1)",
        "to_TC",
        ("tests/ops/test_packed_rows.py", "tests/dispatch"),
    ),
    Fault(
        "padding of a rank's rows counts one sender",
        A_TO_A,
        "None, pad_rows_per_expert * self.group.size()",
        "None, pad_rows_per_expert",
        ("tests/dispatch", "tests/model/test_layouts.py"),
    ),
    Fault(
        "shards of experts are numbered before experts",
        A_TO_A,
        "numbers.permute(1, 0, 3, 2)",
        "numbers.permute(1, 0, 2, 3)",
        ("tests/dispatch", "tests/model/test_layouts.py"),
    ),
    Fault(
        "the probs of shards are those of other choices",
        "moe_parallel/ops/packed_rows.py",
        "repeat_interleave(shards, dim=1)",
        "repeat(1, shards)",
        ("tests/ops/test_packed_rows.py", "tests/dispatch"),
    ),
    Fault(
        "the gradients of probs do not return",
        "moe_parallel/ops/packed_rows.py",
        "_probs(dpacked_NW, ctx.places)[:] = dprobs_NJ",
        "_probs(dpacked_NW, ctx.places)[:] = 0 * dprobs_NJ",
        ("tests/ops/test_packed_rows.py", "tests/dispatch"),
    ),
    Fault(
        "memory after a gradient is taken for its last row",
        "moe_parallel/ops/packed_rows.py",
        "if has_gaps and dx_ND.untyped_storage().nbytes() >= needed:",
        "if has_gaps:",
        ("tests/ops/test_packed_rows.py",),
    ),
    Fault(
        "values keep the product of queries and keys",
        "moe_parallel/ops/rotary.py",
        "v_SBGC.clone(memory_format=torch.contiguous_format)",
        "v_SBGC",
        ("tests/ops/test_rotary.py",),
    ),
    Fault(
        "a part is computed before its rows have come",
        "moe_parallel/dispatch/in_parts.py",
        "current.wait_event(self.event)",
        "pass",
        ("tests/dispatch",),
    ),
    Fault(
        "bytes of results are not counted",
        A_TO_A,
        "sent * there + received * back",
        "sent * there",
        ("tests/dispatch", "tests/layers"),
    ),
    Fault(
        "keys of whole sequences stay in the order of their ranks",
        f"{SELECTION}/tokens.py",
        "torch.cat([piece for _, piece in by_position], axis)",
        "torch.cat(pieces, axis)",
        ("tests/selection/test_tokens.py", *OF_SHARES),
    ),
    Fault(
        "the angles of a share begin at the first position",
        "moe_parallel/platform/cpu_host.py",
        "angles.index_select(axis, positions(share))",
        "angles.narrow(axis, 0, len(positions(share)))",
        OF_SHARES,
    ),
    Fault(
        "a share's loss is divided by its own tokens",
        "moe_parallel/model/forward.py",
        '"counted": batch["loss_mask"].sum()',
        '"counted": mine["loss_mask"].sum()',
        OF_SHARES,
    ),
    Fault(
        "a document ends where a range of a share does",
        "moe_parallel/model/attention.py",
        "inside.stop - first",
        "len(inside)",
        OF_SHARES,
    ),
    Fault(
        "documents always take torch's kernel",
        "moe_parallel/model/attention_backends.py",
        'if "attn_mask" in mask or is_short or',
        'if "is_causal" in mask or is_short or',
        ("tests/model/test_attention.py",),
    ),
    Fault(
        "Transformer Engine gets tokens by position, and documents by sequence",
        "moe_parallel/model/attention_backends.py",
        "*map(sequences_first, (q_SBHC, k_SBGC, v_SBGC)),",
        "*(x.flatten(0, 1) for x in (q_SBHC, k_SBGC, v_SBGC)),",
        ("tests/model/test_transformer_engine_attention.py",),
    ),
    *FAULTS_OF_ROUTING,
    *FAULTS_OF_MODELS,
    *FAULTS_OF_RUNS,
    *FAULTS_OF_KERNELS,
]
