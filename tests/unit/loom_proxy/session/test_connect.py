"""Opening a session where the workers do not answer."""

from __future__ import annotations

from typing import Any

import pytest

import loom
from loom_proxy.session import open as opening


def test_silent_workers_are_asked_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def silent(*arguments: Any) -> Any:
        asked.append(arguments)
        raise loom.WorkersSilent("nobody answers")

    monkeypatch.setattr(opening.Connection, "open", silent)
    with pytest.raises(loom.WorkerUnreachable, match="nobody answers"):
        loom.connect("ws://127.0.0.1:1", "token")
    assert len(asked) == opening.ATTEMPTS
