"""The options of zero-computation experts, which a layer has in addition to its n experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.message import flag, shown
from moe_parallel.config.option import option
from moe_parallel.config.selection.parts import DispatchedSelection
from moe_parallel.config.selection.selection import FreeKinds, LayerWeights
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config

#: Options whose rules know only the n experts: each must keep this value.
_REFUSED = {
    "moe_importance_loss_coeff": 0.0,
    "moe_erc_loss_coeff": 0.0,
    "moe_router_num_groups": None,
    "moe_router_force_routing": None,
    "moe_router_force_load_balancing": False,
    "aoe_fp8_screening": 0,
    "aoe_send_activations": False,
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

    def free_weights(self, hidden_size: int) -> int:
        """The number of weights of the free experts of one layer, those of their scores too."""
        constants = self.moe_constant_experts * 3 * hidden_size
        return self.free_experts * self.weights_per_score(hidden_size) + constants

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        weights = super().layer_weights(hidden_size, num_experts, expert_width)
        replicated = weights.replicated + self.free_weights(hidden_size)
        return weights._replace(replicated=replicated)

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
class FixedFreeExperts(FreeExperts):
    """Free experts among a fixed number K of choices per token."""

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
    def zero_expert_gate(self) -> str:
        return self.moe_zero_expert_gate

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
        biased = getattr(self, "moe_router_enable_expert_bias", False)
        update = getattr(self, "moe_router_bias_update", "error")
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
        if k is not None and target > k:
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
