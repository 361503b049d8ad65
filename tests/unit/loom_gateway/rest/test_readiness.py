"""What ``/readyz`` says of a gateway's state folder and workers."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom_gateway.access.audit import Audit
from loom_gateway.rest.readiness import Readiness, Ready, ReadyStatus
from loom_gateway.sessions.manager import SessionManager


async def ask(folder: Path, addresses: list[str], draining: bool = False) -> Ready:
    manager: Any = SimpleNamespace(workers=addresses, folder=SimpleNamespace(path=str(folder)))
    manager.cannot_open, manager.unready = partial(SessionManager.cannot_open, manager), SessionManager.unready
    return await Readiness(manager, Audit(None)).check(draining)


def check(folder: Path, addresses: list[str], draining: bool = False) -> Ready:
    return asyncio.run(ask(folder, addresses, draining))


@pytest.mark.guarantees(
    "workers", "`/readyz` says whether the state folder can be written and how many workers answer"
)
def test_a_gateway_that_cannot_write_its_state_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(tmp_path, []).status is ReadyStatus.OK
    assert list(tmp_path.iterdir()) == []

    assert check(tmp_path / "removed", []).status is ReadyStatus.STATE_NOT_WRITABLE
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: open("/dev/full", "wb"))  # noqa: SIM115
    assert check(tmp_path, []).status is ReadyStatus.STATE_NOT_WRITABLE


@pytest.mark.guarantees(
    "workers", "`/readyz` says whether the state folder can be written and how many workers answer"
)
async def test_it_says_how_many_workers_answer(tmp_path: Path) -> None:
    async def until_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    reads = await asyncio.start_server(until_the_end, "127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as stuck, socket.create_server(("127.0.0.1", 0)) as ended:
        ports = [one.getsockname()[1] for one in (reads.sockets[0], stuck, ended)]
        ended.close()

        ready = await ask(tmp_path, [f"tcp://127.0.0.1:{port}" for port in ports])

    reads.close()
    assert (ready.status, ready.workers, ready.workers_reachable) == (ReadyStatus.OK, 3, 1)


def test_a_gateway_that_drains_says_so(tmp_path: Path) -> None:
    assert check(tmp_path, [], draining=True).status is ReadyStatus.DRAINING
