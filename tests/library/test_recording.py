"""`record_routing` counts the choices of a model's layers inside its context."""

import pytest
import torch
from torch import nn

from moe_parallel import record_routing
from tests.library.small import KINDS, small


@pytest.mark.parametrize("kind", KINDS)
def test_loads_losses_and_norms(kind: str) -> None:
    model = nn.Sequential(small(kind), nn.ReLU(), small("routed"))
    x = torch.randn(3, 7, 16)
    with record_routing(model) as routing:
        model(x)
        model(x)
        first = routing.summaries()["0"]
        routing.clear()
        assert routing.summaries() == {}
        with torch.no_grad():
            model.eval()(x)
        evaluated = routing.summaries()
    model.train()(x)  # no recording is active
    assert routing.summaries() == evaluated and list(evaluated) == ["0", "2"]
    assert sum(first["tokens_per_expert"]) == 2 * 21 * 2 and first["experts_per_token"] == 2
    assert sum(evaluated["0"]["tokens_per_expert"]) == 21 * 2
    assert first["load_balancing_loss"] == pytest.approx(100 * model[0].aux_loss.item(), rel=1e-5)
    assert "load_balancing_loss" not in evaluated["0"]
    assert ("norm_per_expert" in first) == (kind == "aoe")
    if kind == "aoe":
        norms = torch.einsum("bsd,edr->bser", x, model[0].layer.w_down_EDR).norm(dim=-1)
        expected = norms.mean(dim=(0, 1)).tolist()
        assert first["norm_per_expert"] == pytest.approx(expected, rel=1e-5)
