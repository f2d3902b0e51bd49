"""The sets of options that systems of expert selection share; their classes combine these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_parallel.config.forced_routing import FORMS, parse_forced_routing
from moe_parallel.config.option import option
from moe_parallel.config.selection.selection import (
    LayerWeights,
    Selection,
    SharedExpertSize,
    check_at_most_all,
)
from moe_parallel.errors import InputError

if TYPE_CHECKING:
    from moe_parallel.config.config import Config


@dataclass(frozen=True)
class TracedSelection(Selection):
    """A system whose choices can be recorded, because each is an expert for a token."""

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

    @property
    def trace_folder(self) -> str | None:
        return self.moe_router_trace

    @property
    def replay_folder(self) -> str | None:
        return self.moe_router_replay

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        trace, replay = self.moe_router_trace, self.moe_router_replay
        if replay is None:
            return
        if self.forced_routing is not None:
            raise InputError(
                f"--moe-router-replay is {replay}, but experts are forced ({self.forced_routing}): "
                "remove one of them"
            )
        if replay == trace:
            raise InputError(
                f"--moe-router-replay and --moe-router-trace are both {replay}, so that the run "
                "would overwrite what it replays: name another folder for the trace"
            )


@dataclass(frozen=True)
class DispatchedSelection(TracedSelection):
    """The options of all systems that dispatch tokens to experts."""

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
    def shared_expert(self) -> SharedExpertSize | None:
        width = self.moe_shared_expert_intermediate_size
        return None if width is None else SharedExpertSize(width, self.moe_shared_expert_gate)

    @property
    def sends_c(self) -> bool:
        """Whether C = x W_down is sent with a token to its expert."""
        return False

    def weights_per_score(self, hidden_size: int) -> int:
        """The number of weights that score one expert, where its own matrices do not."""
        return hidden_size

    def layer_weights(self, hidden_size: int, num_experts: int, expert_width: int) -> LayerWeights:
        weights = super().layer_weights(hidden_size, num_experts, expert_width)
        width = self.moe_shared_expert_intermediate_size or 0
        return weights._replace(tensor_parallel=3 * hidden_size * width)

    def check(self, config: Config, world_size: int) -> None:
        super().check(config, world_size)
        width = self.moe_shared_expert_intermediate_size
        if width is None:
            self._check_no_shared_expert()
            return
        n = config.num_experts
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

    def _check_no_shared_expert(self) -> None:
        for name in ("gate", "overlap"):
            if getattr(self, f"moe_shared_expert_{name}"):
                raise InputError(
                    f"--moe-shared-expert-{name} is true, but there is no shared expert: set "
                    "--moe-shared-expert-intermediate-size"
                )


@dataclass(frozen=True)
class TokensChoose(Selection):
    """Each token chooses its experts, so a benchmark can choose others for it."""

    moe_router_force_routing: str | None = option(
        None,
        "for benchmarks: the load of the experts, whatever the scores are; probabilities come from "
        f"the scores. {FORMS}; without a number hot is 0.5, zipf 1, warmup 100. none: off",
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
