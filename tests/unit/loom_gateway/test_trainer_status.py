"""Kubeflow's runtime status: a connection ends with a pod's silence, and begins again with its next report."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timezone
from typing import Any

import pytest

from loom.token_file import ADMIN
from loom.weaver.client import WeaverClient
from loom_gateway import trainer_status
from loom_gateway.trainer_status import TrainerStatus, TrainerStatuses
from tests.unit.loom.weaver.raw_threadlet import BOUND, running_weaver


def status(step: int) -> TrainerStatus:
    metrics: Any = [{"name": "current_step", "value": str(step)}]
    return TrainerStatus(progressPercentage=step, metrics=metrics, lastUpdatedTime=datetime.now(timezone.utc))


async def test_a_silent_pod_is_let_go_and_goes_on_when_it_reports_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_status, "SILENT_AFTER", 0.2)
    with running_weaver("--beat", "0.1") as weaver:
        client = WeaverClient(weaver.socket, lambda: weaver.keys.gateway())
        client.came()
        statuses = TrainerStatuses(client)

        async def known(connected: bool) -> dict[str, Any]:
            until = time.monotonic() + BOUND
            while (found := await client.ask("replica", user=ADMIN, id="bert"))["connected"] is not connected:
                assert time.monotonic() < until, found
                await asyncio.sleep(0.02)
            return dict(found)

        await statuses.take(ADMIN, "bert", "pod", status(40))
        silent = await known(False)  # the weaver calls it lost when the time for a reconnection is over
        monkeypatch.setattr(trainer_status, "SILENT_AFTER", BOUND)
        await statuses.take(ADMIN, "bert", "pod", status(41))
        again = await known(True)

        assert again["instance"] == silent["instance"]
        assert (silent["step"], again["ending"]) == (40, None)
        client.close()
