"""The audit: a line for each thing done, and not one for each try of an attack."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.errors import AuditUnavailable
from loom.token_file import Token
from loom_gateway.access.audit import KEPT_FILES, KINDS, PERIOD, Audit
from tests.unit.loom_gateway.access.test_limits import Clock

ME = Token("1234abcd", "me", "drive", "", 0.0)


@pytest.fixture
def open_audit() -> Iterator[Callable[..., Audit]]:
    """As `Audit`; what is made is closed after the test."""
    with contextlib.ExitStack() as stack:

        def made(*arguments: Any, **options: Any) -> Audit:
            audit = Audit(*arguments, **options)
            stack.callback(audit.close)
            return audit

        yield made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_says_when_what_who_and_from_where(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    audit = open_audit(tmp_path / "audit")
    audit.write("opened", ME, "10.0.0.5", session="s")

    (line,) = lines(tmp_path / "audit")
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "event": "opened", "token": "1234abcd", "name": "me", "user": "me", "scope": "drive",
        "peer": "10.0.0.5", "session": "s",
    }  # fmt: skip


def test_what_others_write_cannot_make_a_line(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    audit = open_audit(tmp_path / "audit")
    audit.write("opened", ME, '1.2.3.4\n{"event": "forged"}\u2028')

    assert len(lines(tmp_path / "audit")) == 1


def test_only_its_owner_may_read_it(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    (tmp_path / "audit").write_text("")
    (tmp_path / "audit").chmod(0o644)
    open_audit(tmp_path / "audit").write("opened", ME, "")

    assert stat.S_IMODE((tmp_path / "audit").stat().st_mode) == 0o600


def test_it_goes_on_where_it_ended(tmp_path: Path) -> None:
    for _ in range(2):
        audit = Audit(tmp_path / "audit")
        audit.write("opened", ME, "")
        audit.close()

    assert len(lines(tmp_path / "audit")) == 2


def test_a_full_file_is_put_aside_and_the_oldest_go(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    audit = open_audit(tmp_path / "audit", max_bytes=1000)
    for number in range(200):
        audit.write("opened", ME, "", number=number)

    files = sorted(tmp_path.iterdir())
    assert len(files) == KEPT_FILES + 1
    assert all(path.stat().st_size <= 1000 and stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert lines(tmp_path / "audit")[-1]["number"] == 199


def test_a_rush_of_refusals_is_a_line_and_their_number(tmp_path: Path, open_audit: Callable[..., Audit]) -> None:
    clock = Clock()
    audit = open_audit(tmp_path / "audit", clock=clock)
    for _ in range(2000):
        audit.refused(loom.AuthenticationError("no"), None, "10.0.0.5")
    assert [line["event"] for line in lines(tmp_path / "audit")] == ["refused"]

    clock.now += PERIOD
    audit.tick()

    assert lines(tmp_path / "audit")[1]["earlier"] == 1999
    audit.tick()
    assert len(lines(tmp_path / "audit")) == 2


def test_the_refusals_of_one_user_do_not_hide_those_of_another(
    tmp_path: Path, open_audit: Callable[..., Audit]
) -> None:
    clock = Clock()
    audit = open_audit(tmp_path / "audit", clock=clock)
    for user in ("ann", "ann", "bob"):
        audit.refused(loom.UnknownSession("no"), replace(ME, user=user), "10.0.0.5")
    clock.now += PERIOD
    audit.tick()

    written = [(line["user"], line.get("earlier")) for line in lines(tmp_path / "audit")]
    assert written == [("ann", None), ("bob", None), ("ann", 1)]


def test_a_rush_from_many_addresses_does_not_fill_it_either(
    tmp_path: Path, open_audit: Callable[..., Audit]
) -> None:
    clock = Clock()
    audit = open_audit(tmp_path / "audit", clock=clock)
    for number in range(10 * KINDS):
        audit.refused(loom.AuthenticationError("no"), None, f"address {number}")
    clock.now += PERIOD
    audit.tick()

    written = lines(tmp_path / "audit")
    assert len(written) <= KINDS + 25
    assert sum(line.get("earlier", 1) for line in written) == 10 * KINDS
    assert written[-1]["peer"] == "others"


def test_what_has_been_counted_is_written_at_the_end(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit", clock=Clock())
    for _ in range(3):
        audit.refused(loom.ScopeError("no"), ME, "a")
    audit.close()

    assert [line.get("earlier") for line in lines(tmp_path / "audit")] == [None, 2]


def test_no_file_no_audit() -> None:
    audit = Audit(None)
    audit.write("opened", ME, "")
    audit.refused(loom.ScopeError("no"), ME, "a")
    audit.tick()
    audit.close()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(loom.WrongArguments, match="folder/audit"):
        Audit(tmp_path / "folder" / "audit")


# -- an audit that is required ------------------------------------------------------------------------------


def test_a_full_disk_refuses_what_is_asked_and_tears_no_line(
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
    audit.ask(ME, "", session="first")
    monkeypatch.setattr(os, "write", nearly_full)
    for _ in range(2):
        with pytest.raises(AuditUnavailable, match="No space left"):
            audit.ask(ME, "", session="lost")
    assert audit.refuses
    monkeypatch.setattr(os, "write", write)
    audit.tick()
    assert not audit.refuses
    audit.ask(ME, "", session="last")
    audit.close()
    torn, *rest = (tmp_path / "audit").read_text().splitlines()[1:]
    assert len(torn) == 10
    assert [json.loads(line)["event"] for line in rest] == ["audit goes on", "asked"]


def test_an_audit_that_is_not_required_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    audit = Audit(tmp_path / "audit")
    monkeypatch.setattr(os, "write", full)
    audit.write("opened", ME, "")
    audit.ask(ME, "")
    assert not audit.refuses
    audit.close()


def test_a_required_audit_needs_a_file() -> None:
    with pytest.raises(loom.WrongArguments, match="--audit FILE"):
        Audit(None, required=True)
