"""What drivers of other user ids share with each other: nothing, not even Monarch's log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from loom.errors import LimitReached
from loom_gateway.sessions.driver_ids import MOST_THREADS, DriverIds, hold_folder_of_logs, sweep
from tests.support.gateways import await_true
from tests.support.other_users import as_root


def test_the_folder_of_monarchs_logs_belongs_to_the_gateway(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "unknown"

    hold_folder_of_logs(str(folder))
    hold_folder_of_logs(str(folder))  # as the next gateway does

    assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (os.geteuid(), 0o755)
    assert caplog.messages == []


def test_a_folder_of_logs_that_is_a_drivers_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    hold_folder_of_logs(str(tmp_path))

    assert "who can read Monarch's logs" in caplog.text


# -- what an id leaves ---------------------------------------------------------------------------------------

UID = 1_500_000_000 + os.getpid()
"""Of this test alone."""

HOPS = """
cleaners() { while :; do for p in /proc/[0-9]*; do
    tr '\\0' ' ' < $p/cmdline | grep -q id_sweep && kill -9 ${p#/proc/}; done; done; }
hop() { [ -e "$1" ] && hop "$1" & }
cleaners >/dev/null 2>&1 &
hop "$1" &
(trap '' HUP TERM INT; setsid sleep 1000 &)
"""
"""Processes that end at once and live on in a child, one that kills its cleaner, and one that ignores signals."""


def run_as(*command: str) -> None:
    subprocess.run(
        command,
        user=UID,
        group=UID,
        extra_groups=[],
        check=True,
        cwd="/",
        timeout=30,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def processes() -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["uids", "status"])
        if process.info["uids"] and UID in process.info["uids"] and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def shared_memory() -> list[str]:
    rows = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    return [row[1] for row in rows if str(UID) in row]


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A file without which the processes of a test end by themselves."""
    folder = Path(tempfile.mkdtemp(prefix="loom-test-", dir="/tmp"))
    folder.chmod(0o755)
    (folder / "going on").touch()
    yield folder / "going on"
    shutil.rmtree(folder)
    for process in processes():
        process.kill()


@as_root
def test_no_process_outruns_the_end_of_its_user_id(going_on: Path) -> None:
    run_as("bash", "-c", HOPS, "hops", str(going_on))
    await_true(lambda: len(processes()) >= 2)

    assert sweep(UID)

    assert processes() == []


@as_root
def test_what_an_id_has_left_is_removed(tmp_path: Path) -> None:
    name = f"loom-test-{UID}"
    made = [f"{folder}/{name}" for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    run_as(
        "sh",
        "-c",
        f"for f in /tmp /var/tmp /dev/shm; do mkdir -p $f/{name}/a/b; echo x > $f/{name}/a/b/c; "
        f"ln -s /etc $f/{name}/etc; chmod 0 $f/{name}/a/b; chmod 500 $f/{name}/a; echo x > $f/{name}.file; done; "
        f"ipcmk -M 4096 -p 600; ipcmk -S 1; ipcmk -Q",
    )
    assert shared_memory()

    assert sweep(UID)

    assert [path for path in made if os.path.lexists(path) or os.path.lexists(f"{path}.file")] == []
    assert shared_memory() == []
    assert os.path.isdir("/etc")


@pytest.fixture
def stays() -> Iterator[Path]:
    """A folder of the id's that it cannot remove: another user's is in it."""
    folder = Path(f"/tmp/loom-test-{UID}")
    (folder / "another user's").mkdir(parents=True)
    (folder / "another user's" / "file").touch()
    os.chown(folder, UID, UID)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@as_root
async def test_an_id_of_which_something_is_left_is_given_to_nobody(
    stays: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = DriverIds(UID, UID + 1)

    assert await ids.take_clean() == UID + 1
    assert f"the user id {UID} is not used again, because 1 things of it are left: '{stays}'" in caplog.text
    with pytest.raises(LimitReached):
        await ids.take_clean()
    shutil.rmtree(stays)
    ids.give_back(UID, clean=False)
    assert await ids.take_clean() == UID


@as_root
def test_a_driver_is_bounded_in_what_it_starts_and_leaves() -> None:
    code = (
        "import resource; from loom_gateway.sessions.driver_ids import bound_leftovers as b; b(); "
        "print(resource.getrlimit(resource.RLIMIT_NPROC), resource.getrlimit(12))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert said == f"({MOST_THREADS}, {MOST_THREADS}) (0, 0)\n"
