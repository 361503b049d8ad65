"""The audit: a line for each thing done, and not one for each try of an attack."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.errors import AuditUnavailable
from loom.token_file import Token
from loom_gateway.access import audit as audits
from loom_gateway.access.audit import KEPT_FILES, KINDS, PERIOD, Audit
from tests.unit.loom_gateway.access.test_limits import Clock

BOUND = 20.0

ME = Token("1234abcd", "me", "drive", "", 0.0)


@pytest.fixture
async def open_audit() -> AsyncIterator[Callable[..., Audit]]:
    """As `Audit`; what is made is closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        def made(*arguments: Any, **options: Any) -> Audit:
            audit = Audit(*arguments, **options)
            stack.push_async_callback(audit.close)
            return audit

        yield made


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def lines(audit: Audit, path: Path) -> list[dict[str, Any]]:
    """The lines in an audit's file, once it has all that were put in."""
    await asyncio.wait_for(asyncio.wrap_future(audit.last), BOUND)
    return read(path)


async def test_a_line_says_when_what_who_and_from_where(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    audit = open_audit(tmp_path / "audit")
    await audit.write("opened", ME, "10.0.0.5", session="s")

    (line,) = await lines(audit, tmp_path / "audit")
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "event": "opened", "token": "1234abcd", "name": "me", "user": "me", "scope": "drive",
        "peer": "10.0.0.5", "session": "s",
    }  # fmt: skip


async def test_what_others_write_cannot_make_a_line(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    audit = open_audit(tmp_path / "audit")
    await audit.write("opened", ME, '1.2.3.4\n{"event": "forged"}\u2028')

    assert len(await lines(audit, tmp_path / "audit")) == 1


async def test_only_its_owner_may_read_it(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    (tmp_path / "audit").write_text("")
    (tmp_path / "audit").chmod(0o644)
    await open_audit(tmp_path / "audit").write("opened", ME, "")

    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o600


async def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    for _ in range(2):
        audit = Audit(tmp_path / "audit")
        await audit.write("opened", ME, "")
        await audit.close()

    assert len(read(tmp_path / "audit")) == 2


async def test_a_full_file_is_put_aside_and_the_oldest_go(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    audit = open_audit(tmp_path / "audit", max_bytes=1000)
    for number in range(200):
        await audit.write("opened", ME, "", number=number)

    files = sorted(tmp_path.iterdir())  # noqa: ASYNC240
    assert len(files) == KEPT_FILES + 1
    assert all(path.stat().st_size <= 1000 and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert read(tmp_path / "audit")[-1]["number"] == 199


async def test_a_rush_of_refusals_is_a_line_and_their_number(
    tmp_path: Path, open_audit: Callable[..., Audit]
) -> None:
    clock = Clock()
    audit = open_audit(tmp_path / "audit", clock=clock)
    for _ in range(2000):
        audit.refused(loom.AuthenticationError("no"), None, "10.0.0.5")
    assert [line["event"] for line in await lines(audit, tmp_path / "audit")] == ["refused"]

    clock.now += PERIOD
    audit.tick()

    assert (await lines(audit, tmp_path / "audit"))[1]["earlier"] == 1999
    audit.tick()
    assert len(await lines(audit, tmp_path / "audit")) == 2


@pytest.mark.guarantees("users", "In the audit, the refusals of one user do not hide those of another")
async def test_the_refusals_of_one_user_do_not_hide_those_of_another(
    tmp_path: Path, open_audit: Callable[..., Audit]
) -> None:
    clock = Clock()
    audit = open_audit(tmp_path / "audit", clock=clock)
    for user in ("ann", "ann", "bob"):
        audit.refused(loom.UnknownSession("no"), replace(ME, user=user), "10.0.0.5")
    clock.now += PERIOD
    audit.tick()

    written = [(line["user"], line.get("earlier")) for line in await lines(audit, tmp_path / "audit")]
    assert written == [("ann", None), ("bob", None), ("ann", 1)]


async def test_a_rush_from_many_addresses_does_not_fill_it_either(
    tmp_path: Path, open_audit: Callable[..., Audit]
) -> None:
    clock = Clock()
    audit = open_audit(tmp_path / "audit", clock=clock)
    for number in range(10 * KINDS):
        audit.refused(loom.AuthenticationError("no"), None, f"address {number}")
    clock.now += PERIOD
    audit.tick()

    written = await lines(audit, tmp_path / "audit")
    assert len(written) <= KINDS + 25
    assert sum(line.get("earlier", 1) for line in written) == 10 * KINDS
    assert written[-1]["peer"] == "others"


async def test_what_has_been_counted_is_written_at_the_end(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit", clock=Clock())
    for _ in range(3):
        audit.refused(loom.ScopeError("no"), ME, "a")
    await audit.close()

    assert [line.get("earlier") for line in read(tmp_path / "audit")] == [None, 2]


async def test_no_file_no_audit() -> None:
    audit = Audit(None)
    await audit.write("opened", ME, "")
    audit.refused(loom.ScopeError("no"), ME, "a")
    audit.tick()
    await audit.close()


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(loom.WrongArguments, match="folder/audit"):
        Audit(tmp_path / "folder" / "audit")


# -- a disk that stalls ----------------------------------------------------------------------------------------


class Stalling:
    """A disk that takes nothing until it goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.threads: list[threading.Thread] = []
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        self.threads.append(threading.current_thread())
        assert self.goes_on.wait(BOUND)
        return self._write(descriptor, data)


@pytest.fixture
def stalling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalling]:
    disk = Stalling(monkeypatch)
    yield disk
    disk.goes_on.set()


async def test_a_line_is_waited_for_and_the_event_loop_goes_on(
    tmp_path: Path, stalling: Stalling, open_audit: Callable[..., Audit]
) -> None:
    audit = open_audit(tmp_path / "audit")
    writing = [asyncio.ensure_future(audit.write("commanded", ME, "", number=number)) for number in range(3)]
    for _ in range(100):  # of the loop's rounds, in none of which it waits for the disk
        await asyncio.sleep(0)
    audit.refused(loom.ScopeError("no"), ME, "a")  # which nobody waits for
    later = asyncio.ensure_future(audit.write("commanded", ME, "", number=4))
    await asyncio.sleep(0)

    assert not any(one.done() for one in writing)
    stalling.goes_on.set()
    await asyncio.wait_for(asyncio.gather(*writing, later), BOUND)

    assert threading.main_thread() not in stalling.threads
    found = [line.get("number", line["event"]) for line in read(tmp_path / "audit")]
    assert found == [0, 1, 2, "refused", 4]


async def test_a_fifo_that_nobody_reads_loses_nothing(tmp_path: Path) -> None:
    """The kernel itself holds the write up."""
    os.mkfifo(tmp_path / "audit")
    reader = os.open(tmp_path / "audit", os.O_RDONLY | os.O_NONBLOCK)
    audit = Audit(tmp_path / "audit")
    long = "x" * 1000
    writing = asyncio.gather(*(audit.write("commanded", ME, "", number=n, about=long) for n in range(200)))
    rounds = 0
    while not audit._queue.empty() and rounds < 1000:  # it holds 64 KiB
        await asyncio.sleep(0)
        rounds += 1
    assert not writing.done()

    text = b""
    while text.count(b"\n") < 200:
        with contextlib.suppress(BlockingIOError):
            text += os.read(reader, 1 << 16)
        await asyncio.sleep(0)
    await asyncio.wait_for(writing, BOUND)
    await audit.close()
    os.close(reader)

    assert [json.loads(line)["number"] for line in text.splitlines()] == list(range(200))


async def test_a_disk_that_stalls_for_long_refuses_what_has_to_be_written(
    tmp_path: Path, stalling: Stalling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "STALLED", 0.05)
    audit = Audit(tmp_path / "audit", required=True)

    with pytest.raises(AuditUnavailable, match="has not taken a line"):
        await audit.ask(ME, "", session="never begun")
    for _ in range(3):
        audit.tick()  # which puts nothing behind what waits
    stalling.goes_on.set()
    monkeypatch.setattr(audits, "STALLED", BOUND)
    await audit.ask(ME, "", session="begun")

    await audit.close()
    assert [line["session"] for line in read(tmp_path / "audit")] == ["never begun", "begun"]


async def test_lines_without_room_are_counted(
    tmp_path: Path, stalling: Stalling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "MAX_LINES", 3)
    audit = Audit(tmp_path / "audit")
    audit.put("left", ME, "", number=0)
    while not stalling.threads:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for number in range(1, 9):
        audit.put("left", ME, "", number=number)
    assert "3 lines wait" in audit.failure
    stalling.goes_on.set()
    while not audit._queue.empty():  # noqa: ASYNC110
        await asyncio.sleep(0)
    await audit.write("left", ME, "", number=9)

    await audit.close()
    found = [line.get("number", line.get("lines")) for line in read(tmp_path / "audit")]
    assert found == [0, 1, 2, 3, 5, 9]


# -- an audit that is required ------------------------------------------------------------------------------


async def test_a_full_disk_refuses_what_is_asked_and_tears_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [10]
    write = os.write

    def nearly_full(descriptor: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = data[: room[0]]
        room[0] -= len(taken)
        return write(descriptor, taken)

    audit = Audit(tmp_path / "audit", required=True)
    await audit.ask(ME, "", session="first")
    monkeypatch.setattr(os, "write", nearly_full)
    for _ in range(2):
        with pytest.raises(AuditUnavailable, match="No space left"):
            await audit.ask(ME, "", session="lost")
    assert audit.refuses
    monkeypatch.setattr(os, "write", write)
    audit.tick()
    await audit.ask(ME, "", session="last")
    assert not audit.refuses
    await audit.close()
    torn, *rest = (tmp_path / "audit").read_text().splitlines()[1:]
    assert len(torn) == 10
    assert [json.loads(line)["event"] for line in rest] == ["lines were lost", "audit goes on", "asked"]
    assert json.loads(rest[0])["lines"] == 2


@pytest.mark.guarantees(
    "disk and clock", "An audit on a full disk says how many lines it lacks, once there is room"
)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
async def test_an_audit_that_is_not_required_refuses_nothing_and_says_how_many_lines_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    audit = Audit(tmp_path / "audit")
    write = os.write
    monkeypatch.setattr(os, "write", full)
    for _ in range(3):
        await audit.write("opened", ME, "")
        await audit.ask(ME, "")
    assert not audit.refuses
    monkeypatch.setattr(os, "write", write)
    await audit.write("left", ME, "")
    await audit.close()
    assert [(line["event"], line.get("lines")) for line in read(tmp_path / "audit")] == [
        ("lines were lost", 3),
        ("left", None),
    ]


async def test_a_required_audit_needs_a_file() -> None:
    with pytest.raises(loom.WrongArguments, match="--audit FILE"):
        Audit(None, required=True)
