"""The actor of each session that asks the weaver, without a mesh; `tests/integration/weaver` has it in sessions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from loom import driver_api
from loom.errors import WeaverUnavailable
from loom.weaver.server.actor import WeaverActor


class Session:
    """Stands in for the session of a driver: it does every operation at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def begin(self, operation: str, arguments: Any, timeout: float) -> Future[Any]:
        answer: Future[Any] = Future()
        if self._error is None:
            answer.set_result([operation, arguments, timeout])
        else:
            answer.set_exception(self._error)
        return answer


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    method: Any = WeaverActor.ask
    function = inspect.unwrap(method._method)

    async def ask_session(session: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(driver_api, "_here", session)
        return await function(WeaverActor(), *arguments)

    return ask_session


async def test_an_answer_comes_without_a_code_and_an_error_with_one(ask: Callable[..., Any]) -> None:
    assert await ask(Session(), "replica", {"id": "train_0"}, 10.0) == (None, ["replica", {"id": "train_0"}, 10.0])
    assert await ask(Session(WeaverUnavailable("it is away")), "status", {}, 1.0) == (
        "weaver_unavailable",
        "it is away",
    )


async def test_outside_of_a_driver_nothing_is_asked(ask: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match="this process is no session's driver"):
        await ask(None, "status", {}, 1.0)
