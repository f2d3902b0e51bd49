"""The options that systems share which dispatch tokens to experts; their classes combine these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.forced_routing import FORMS, parse_forced_routing
from moe_parallel.config.message import flag, shown
from moe_parallel.config.option import option
from moe_parallel.config.selection.balancing import BiasBalancing
from moe_parallel.config.selection.selection import (
    FreeKinds,
    Selection,
    SharedExpertSize,
    check_at_most_all,
)
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class DispatchedSelection(Selection):
    """The options of all systems that dispatch tokens to experts."""

    moe_router_trace: str | None = option(
        None,
        "folder to which training writes which experts each token takes, in every layer and step; "
        "none: off",
    )
    moe_router_replay: str | None = option(
        None,
        "in training, tokens take the experts that this folder of --moe-router-trace names; "
        "probabilities come from the current scores. none: off",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "total width of the shared expert, a SwiGLU layer that computes every token; m shared "
        "experts of width f are one of width m * f; none: no shared expert",
        weights=True,
        least=1,
    )
    moe_shared_expert_gate: bool = option(
        False,
        "multiply the shared expert's output by sigmoid(x w), one number per token",
        weights=True,
    )
    moe_shared_expert_overlap: bool = option(
        False, "run the shared expert on its own CUDA stream while tokens are dispatched"
    )

    @property
    def trace_folder(self) -> str | None:
        return self.moe_router_trace

    @property
    def replay_folder(self) -> str | None:
        return self.moe_router_replay

    @property
    def shared_expert(self) -> SharedExpertSize | None:
        width = self.moe_shared_expert_intermediate_size
        return None if width is None else SharedExpertSize(width, self.moe_shared_expert_gate)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        self._check_replay()
        width, n = self.moe_shared_expert_intermediate_size, config.num_experts
        if width is None:
            for name in ("gate", "overlap"):
                if getattr(self, f"moe_shared_expert_{name}"):
                    raise InputError(
                        f"--moe-shared-expert-{name} is true, but there is no shared expert: set "
                        "--moe-shared-expert-intermediate-size"
                    )
            return
        limit = n * (config.moe.moe_ffn_hidden_size or config.model.ffn_hidden_size)
        if width > limit:
            raise InputError(
                f"--moe-shared-expert-intermediate-size is {width}, more than the {limit} of all "
                f"{n} experts together: shared experts must not outnumber them"
            )
        tp = config.parallel.tensor_model_parallel_size
        if width % tp:
            raise InputError(
                f"--moe-shared-expert-intermediate-size is {width}, which "
                f"--tensor-model-parallel-size {tp} does not divide: choose a multiple of {tp}"
            )

    def _check_replay(self) -> None:
        trace, replay = self.moe_router_trace, self.moe_router_replay
        if replay is not None and self.forced_routing is not None:
            raise InputError(
                f"--moe-router-replay is {replay}, but experts are forced ({self.forced_routing}): "
                "remove one of them"
            )
        if replay is not None and replay == trace:
            raise InputError(
                f"--moe-router-replay and --moe-router-trace are both {replay}, so that the run "
                "would overwrite what it replays: name another folder for the trace"
            )


@dataclass(frozen=True)
class TokensChoose(Selection):
    """Each token chooses its experts, so a benchmark can choose others for it."""

    moe_router_force_routing: str | None = option(
        None,
        "for benchmarks: the load of the experts, whatever the scores are; probabilities come from "
        f"the scores. {FORMS}; without a number hot is 0.5 and zipf 1. none: off",
    )

    @property
    def forced_routing(self) -> str | None:
        return self.moe_router_force_routing or super().forced_routing

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_force_routing is not None:
            parse_forced_routing(self.moe_router_force_routing)


@dataclass(frozen=True)
class FixedNumber(Selection):
    """A fixed number of experts per token."""

    moe_router_topk: int = option(
        2,
        "number of experts per token (K), in Hugging Face's models num_experts_per_tok",
        weights=True,
        least=1,
    )

    @property
    def choices_per_token(self) -> int:
        return self.moe_router_topk

    @property
    def renormalizes(self) -> bool:
        return True

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        check_at_most_all(self, "moe_router_topk", config)


@dataclass(frozen=True)
class FixedChoices(FixedNumber, TokensChoose):
    """A token chooses a fixed number of experts."""

    moe_aux_loss_per_choice: bool = option(
        False,
        "divide the load-balancing loss by (MoE layers * K), so that uniform routing gives alpha",
    )
    moe_router_force_load_balancing: bool = option(
        False, "for benchmarks: choose the experts in turn, whatever the scores"
    )

    @property
    def forced_routing(self) -> str | None:
        return "in turn" if self.moe_router_force_load_balancing else super().forced_routing

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if self.moe_router_force_load_balancing and self.moe_router_force_routing is not None:
            raise InputError(
                "--moe-router-force-load-balancing chooses the experts in turn, and "
                f"--moe-router-force-routing {self.moe_router_force_routing} differently: remove "
                "one of them"
            )


#: Options whose rules know only the n experts: each must keep this value.
_REFUSED = {
    "moe_importance_loss_coeff": 0.0,
    "moe_erc_loss_coeff": 0.0,
    "moe_router_num_groups": None,
    "moe_router_force_routing": None,
    "moe_router_force_load_balancing": False,
}


@dataclass(frozen=True)
class FreeExperts(DispatchedSelection):
    """Experts without matrices, which a token may choose in place of the n experts (MoE++)."""

    moe_zero_experts: int = option(
        0, "number of free experts whose output is 0", weights=True, least=0
    )
    moe_copy_experts: int = option(
        0, "number of free experts whose output is their input x", weights=True, least=0
    )
    moe_constant_experts: int = option(
        0,
        "number of free experts whose output is a_1 x + a_2 v, with a vector v and (a_1, a_2) = "
        "softmax(W_c x) that are learned",
        weights=True,
        least=0,
    )
    moe_free_expert_tau: float = option(
        0.75,
        "tau, the weight of a free expert in the load-balancing loss, where each of the n experts "
        "has 1; at balance a free expert has 1 / tau times the load of one of the n experts. A "
        "capacity is divided in the same way",
        above=0,
        most=1,
    )

    @property
    def free_kinds(self) -> FreeKinds:
        return FreeKinds(self.moe_zero_experts, self.moe_copy_experts, self.moe_constant_experts)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if not self.free_experts:
            self._check_none_is_meant()
            return
        for name, allowed in _REFUSED.items():
            value = getattr(self, name, allowed)
            if value != allowed:
                raise InputError(
                    f"{flag(name)} is {shown(value)}, which does not support free experts: leave "
                    "it out, or --moe-zero-experts, --moe-copy-experts and --moe-constant-experts"
                )

    def _check_none_is_meant(self) -> None:
        for name in self._of_free_experts():
            value, default = getattr(self, name), getattr(type(self)(), name)
            if value != default:
                raise InputError(
                    f"{flag(name)} is {shown(value)}, but there are no free experts: set "
                    "--moe-zero-experts, --moe-copy-experts or --moe-constant-experts"
                )

    def _of_free_experts(self) -> tuple[str, ...]:
        """The options that mean nothing without free experts."""
        return ("moe_free_expert_tau",)


@dataclass(frozen=True)
class TopKChoices(FreeExperts, BiasBalancing, FixedChoices):
    """K choices of a token, which losses or a bias balance. Free experts may be among them."""

    moe_ffn_experts_per_token: float | None = option(
        None,
        "mean number of the n experts per token (K_e) that the balancing bias holds, where free "
        "experts take the other choices; none: K n / (n + free experts)",
        above=0,
    )
    moe_zero_expert_gate: str = option(
        "keep",
        "routing probabilities of experts chosen with a zero expert: as they are (keep, the "
        "MoE++ paper), or divided by their sum without the zero expert (renormalize, its code)",
        choices=("keep", "renormalize"),
        weights=True,
    )

    @property
    def mean_choices(self) -> float | None:
        """K_e; None: free experts take a share that is known only in training."""
        return self.moe_ffn_experts_per_token if self.free_experts else super().mean_choices

    def _of_free_experts(self) -> tuple[str, ...]:
        return (*super()._of_free_experts(), "moe_ffn_experts_per_token", "moe_zero_expert_gate")

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        if not self.free_experts:
            return
        self._check_bias()
        self._check_gate()

    def _check_bias(self) -> None:
        biased, update = self.moe_router_enable_expert_bias, self.moe_router_bias_update
        if biased and update != "error":
            raise InputError(
                f"--moe-router-bias-update is {update}, which would balance free experts like the "
                "others: set it to error, which holds --moe-ffn-experts-per-token"
            )
        target, k = self.moe_ffn_experts_per_token, self.choices_per_token
        if target is None:
            return
        if not biased:
            raise InputError(
                f"--moe-ffn-experts-per-token is {target}, but without a bias nothing holds it: "
                "set --moe-router-enable-expert-bias and --moe-router-bias-update error, or leave "
                "it out"
            )
        if target > k:
            raise InputError(
                f"--moe-ffn-experts-per-token is {target}, above --moe-router-topk {k}: choose at "
                f"most {k}"
            )

    def _check_gate(self) -> None:
        if self.moe_zero_expert_gate == "keep":
            return
        chosen = "--moe-zero-expert-gate is renormalize"
        if not self.moe_zero_experts:
            raise InputError(f"{chosen}, but there are no zero experts: set --moe-zero-experts")
        if not self.renormalizes:
            raise InputError(
                f"{chosen}, but these routing probabilities are not divided by their sum (K = 1, "
                "--moe-router-pre-softmax, or --aoe-gate all): set it to keep"
            )
