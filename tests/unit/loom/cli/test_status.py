"""`loom status` says which commands replicas do not carry out, and why."""

from __future__ import annotations

import pytest

from loom.cli import status
from loom.weaver.states import ReplicaEnding, ReplicaState
from loom.weaver.views import ReplicaInfo


def test_each_reason_is_said_once_with_the_living_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {"not_offered": {"save": "nothing here saves", "evaluate": "nothing here evaluates"}}
    there = [ReplicaInfo(f"train_{rank}", ReplicaState.RUNNING, **refused) for rank in range(2)]
    ended = ReplicaInfo("old_0", ReplicaState.FINISHED, ending=ReplicaEnding.COMPLETED, **refused)

    status._print_replicas([one.to_body() for one in (*there, ended, ReplicaInfo("all_0", ReplicaState.RUNNING))])

    printed = " ".join(capsys.readouterr().out.split())
    assert "not offered by train_0, train_1: nothing here saves" in printed
    assert "not offered by train_0, train_1: nothing here evaluates" in printed
    assert printed.count("not offered") == 2
