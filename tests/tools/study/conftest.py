"""The tool that trains a study, without counting parameters and without figures."""

from types import ModuleType
from typing import Any

import pytest

from moe_parallel.analysis.study import figures
from tests.tools.study.fake_runs import TOOL, TOTALS


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOL.parent)
    import compare_selection

    def count(contender: Any, experts_per_token: float | None = None) -> dict[str, int | None]:
        total = TOTALS[contender.name]
        active: int | None = total // 2
        if contender.system == "top_p":
            active = None if experts_per_token is None else round(100 * experts_per_token)
        return {"total": total, "active": active, "active_compute": active}

    monkeypatch.setattr(compare_selection, "count_parameters", count)
    monkeypatch.setattr(figures, "FIGURES", {})  # tests/analysis tests them
    return compare_selection
