"""The hook of torchrun's agent."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from loom.instrument import torchelastic


@pytest.mark.parametrize("fails", [False, True])
def test_processes_that_an_agent_starts_again_are_told_and_no_others(fails: bool) -> None:
    seen: list[str | None] = []

    class Agent:
        def _initialize_workers(self, group: str) -> None:
            seen.append(os.environ.get(torchelastic.VARIABLE))

        def _restart_workers(self, group: str) -> None:
            self._initialize_workers(group)
            if fails:
                raise RuntimeError("no rendezvous")

    torchelastic.hook(SimpleNamespace(SimpleElasticAgent=Agent))
    Agent()._initialize_workers("trainers")
    try:
        Agent()._restart_workers("trainers")
    except RuntimeError:
        assert fails
    Agent()._initialize_workers("trainers")

    assert seen == [None, "1", None]


def test_the_agent_of_this_torch_can_be_hooked() -> None:
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    before = api.SimpleElasticAgent._restart_workers
    try:
        torchelastic.hook(api)
        assert api.SimpleElasticAgent._restart_workers.__wrapped__ is before
    finally:
        api.SimpleElasticAgent._restart_workers = before
