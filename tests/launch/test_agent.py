"""The agent of a node, with a rank that is no process."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from moe_parallel.launch import agent as ours
from moe_parallel.launch.agent import JobAgent
from moe_parallel.training.signals import StopRequest


class Rank:
    """A process that runs until `code` is set."""

    pid = 4711
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


def on_one_of_two_nodes(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> JobAgent:
    """An agent with this rank, in a job whose store is gone. It waits for nobody."""
    logs: Any = None
    spec = WorkerSpec("rank", 1, SimpleNamespace(), entrypoint="program")  # type: ignore[arg-type]
    agent = JobAgent(spec, logs, 30, StopRequest())
    agent._worker_group.group_world_size = 2
    monkeypatch.setattr(ours, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(ours, "_SERVE_SECONDS", 0.0)
    monkeypatch.setattr(agent, "_processes", lambda: {0: rank})
    monkeypatch.setattr(agent, "_visited_channel", lambda: None)
    monkeypatch.setattr(agent, "_send", lambda number: None)
    healthy = RunResult(WorkerState.HEALTHY)
    monkeypatch.setattr(LocalElasticAgent, "_monitor_workers", lambda self, group: healthy)
    return agent


def test_a_rank_that_the_launcher_has_killed_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It hangs while the other node ends the job, and takes a moment to be gone."""
    rank = Rank()
    agent = on_one_of_two_nodes(rank, monkeypatch)
    agent._code_elsewhere = 2
    for code in (None, -9, -9):
        rank.code = code
        agent._monitor_workers(agent._worker_group)
        assert agent.exit_code == 2
    assert capsys.readouterr().err == ""


def test_a_rank_that_others_have_killed_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank()
    agent = on_one_of_two_nodes(rank, monkeypatch)
    for code in (None, -9, -9):
        rank.code = code
        agent._monitor_workers(agent._worker_group)
    assert agent.exit_code == 137
    assert capsys.readouterr().err.count("was killed by SIGKILL") == 1
