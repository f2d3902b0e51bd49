import pytest

from tests.tiers import rest_in_full
from tests.tools.running import RunTool, run_tool, run_tool_forked

STARTS = {"fork": run_tool_forked, "new interpreter": run_tool}


@pytest.fixture(params=rest_in_full(STARTS, "fork"))
def start(request: pytest.FixtureRequest) -> RunTool:
    """The way to start a tool: a new interpreter also shows the output of importing torch."""
    return STARTS[request.param]
