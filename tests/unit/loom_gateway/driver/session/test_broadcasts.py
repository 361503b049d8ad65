"""Whether broadcasts go on: asked by calls that do nothing, one at a time of each mesh."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loom_gateway.driver.session import context as module
from loom_gateway.driver.session.context import Broadcasts

Asked = dict[int, list["asyncio.Future[None]"]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The calls that each mesh has got."""
    found: Asked = {}

    def sentinel(mesh: int) -> Any:
        def call() -> Any:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            found.setdefault(mesh, []).append(future)
            return SimpleNamespace(as_asyncio=lambda: future)

        return SimpleNamespace(call=call)

    monkeypatch.setattr(module, "sentinel", sentinel)
    monkeypatch.setattr(module, "BRIEFLY", 0.01)
    return found


async def test_a_broadcast_goes_on_until_a_later_call_is_answered(asked: Asked) -> None:
    entry = SimpleNamespace(mesh=1, stopped=False, failure=None)
    broadcasts = Broadcasts(asyncio.get_running_loop(), cast(Any, SimpleNamespace(known={1: entry}.get)))
    assert not broadcasts.go_on
    for _ in range(3):
        broadcasts.note(1)
        assert broadcasts.go_on
        await broadcasts.settle()
    assert len(asked[1]) == 1  # the actors are busy, and get no further call meanwhile
    asked[1][0].set_result(None)
    await asyncio.sleep(0)
    await broadcasts.settle()
    assert broadcasts.go_on
    asked[1][1].set_exception(ValueError("the mesh has failed"))
    await asyncio.sleep(0)
    assert not broadcasts.go_on


async def test_nothing_goes_on_in_a_mesh_that_was_stopped(asked: Asked) -> None:
    entry = SimpleNamespace(mesh=1, stopped=False, failure=None)
    broadcasts = Broadcasts(asyncio.get_running_loop(), cast(Any, SimpleNamespace(known={1: entry}.get)))
    broadcasts.note(1)
    broadcasts.note(2)  # which is not known any more
    await broadcasts.settle()
    broadcasts.note(1)
    entry.stopped = True
    assert not broadcasts.go_on
    await broadcasts.settle()
    assert not broadcasts._asked
