"""The spare driver: what failed for it once does not fail for the next session."""

from __future__ import annotations

import asyncio
import errno

import psutil
import pytest

from loom.errors import SessionLost, Unavailable, WrongState
from loom_gateway.sessions import manager as module
from loom_gateway.sessions import state_dir
from loom_gateway.sessions.driver_ids import DriverIds
from loom_gateway.sessions.driver_process import OwnDriver
from loom_gateway.sessions.manager import SessionManager


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the next drivers fail to start; the others become a driver without a process."""
    left: list[str] = []

    async def come_up(driver: object, timeout: float = 0) -> dict[str, object]:
        if left:
            raise SessionLost(left.pop())
        return {}

    monkeypatch.setattr(module, "python", lambda *arguments: ["sleep", "60"])
    monkeypatch.setattr(OwnDriver, "come_up", come_up)
    return left


@pytest.mark.guarantees("drivers", "A spare driver that failed once is started afresh for the next session")
async def test_a_spare_that_failed_is_started_afresh_for_the_next_session(
    failures: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    manager = SessionManager(["tcp://127.0.0.1:1"])
    failures.append("the disk was full")
    manager.prepare_spare()
    assert manager._spare is not None
    with pytest.raises(SessionLost):
        await manager._spare

    session = await manager.create()

    assert session.name
    await manager.close()


async def test_what_fails_now_is_told(failures: list[str]) -> None:
    manager = SessionManager(["tcp://127.0.0.1:1"])
    failures.append("the disk is full")

    with pytest.raises(SessionLost, match="the disk is full"):
        await manager.create()

    await manager.close()


def full_disk(*written: object) -> None:
    raise OSError(errno.ENOSPC, "no space left")


async def test_a_driver_that_cannot_be_written_down_is_ended_at_once(
    failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SessionManager(["tcp://127.0.0.1:1"])
    before = psutil.Process().children()

    with monkeypatch.context() as patched:
        patched.setattr(state_dir, "write_json", full_disk)
        with pytest.raises(Unavailable, match="no space left"):
            await manager.create()

    assert psutil.Process().children() == before
    await manager.close()


@pytest.mark.guarantees(
    "drivers",
    "A session that cannot be written down, as on a full disk, is refused with the reason and leaves no driver",
)
async def test_a_session_that_cannot_be_written_down_is_refused_and_leaves_no_driver(
    failures: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = SessionManager(["tcp://127.0.0.1:1"])
    manager.prepare_spare()
    assert manager._spare is not None
    spare = await manager._spare

    with monkeypatch.context() as patched:
        patched.setattr(state_dir, "write_json", full_disk)
        with pytest.raises(Unavailable, match="no space left"):
            await manager.create()
        await asyncio.wait_for(spare.exited.wait(), 10.0)

    assert manager.sessions() == []
    await manager.close()


@pytest.mark.guarantees(
    "drivers", "A session that the machine does not let the gateway open is an error with the reason"
)
async def test_what_the_machine_refuses_is_told_and_not_a_broken_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = SessionManager(["tcp://127.0.0.1:1"], ids=DriverIds(20000, 20001))
    monkeypatch.setattr(module, "python", lambda *arguments: ["/etc/passwd"])

    with pytest.raises(WrongState, match=r"Permission denied: '/etc/passwd'; with --driver-uids"):
        await manager.create()

    assert "no session can be opened" in caplog.text
    await manager.close()
