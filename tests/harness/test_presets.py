"""The presets run from end to end in the harness' own tasks, with made-up data."""

import re
import sys
from collections import defaultdict
from typing import Any

import pytest

from moe_parallel.harness.presets import PRESETS
from moe_parallel.harness.tasks import Wanted, load_tasks, require_harness, run_tasks
from tests.harness import made_up_data

#: The worked examples of bbh are in its task files; each of them is such a line.
WORKED = re.compile(r"^Q: ", re.MULTILINE)
MARKER = re.compile(r"item\d+")


def recorder() -> Any:
    """A model of the harness that answers everything alike, and keeps the contexts."""
    from lm_eval.api.model import LM

    class Recorder(LM):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.contexts: dict[str, set[str]] = defaultdict(set)

        def _keep(self, requests: Any) -> None:
            for each in requests:
                self.contexts[each.task_name].add(each.args[0])

        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            self._keep(requests)
            return [(-float(len(each.args[1])), False) for each in requests]

        def generate_until(self, requests: Any) -> list[str]:
            self._keep(requests)
            return ["So the answer is yes."] * len(requests)

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            raise AssertionError("no preset asks for it")

    return Recorder()


@pytest.mark.full  # the index of the harness is read, which takes many seconds
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_from_end_to_end(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_harness("--preset")
    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", made_up_data.load)
    wanted = Wanted(PRESETS[preset].tasks, limit=3, bootstrap=0)
    model = recorder()
    found = run_tasks(model, load_tasks(wanted), wanted)
    for task in PRESETS[preset].tasks:
        parts = found["group_subtasks"].get(task.name) or [task.name]
        assert len(parts) == (27 if task.name == "bbh" else 1)
        for part in parts:
            contexts = model.contexts[part]
            assert contexts, part
            if task.shots is None:
                assert {len(WORKED.findall(text)) for text in contexts} == {3 + 1}, part
            else:
                rows = {len(set(MARKER.findall(text))) for text in contexts}
                assert rows == {task.shots + 1}, part
            metrics = {name.split(",")[0] for name in found["results"][part]}
            assert metrics & {"acc", "exact_match"}, part
