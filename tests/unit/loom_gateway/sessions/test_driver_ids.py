"""What drivers of other user ids share with each other: nothing, not even Monarch's log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from loom.errors import LimitReached, WrongArguments
from loom_gateway.sessions import driver_ids, id_sweep
from loom_gateway.sessions.driver_ids import MOST_THREADS, DriverIds, hold_folder_of_logs, sweep
from tests.support.gateways import await_true
from tests.support.other_users import as_root, as_user, reachable_python


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("20000", "is no range of user ids"),
        ("5-4", "is no range of user ids"),
        ("0-5", "is no range of user ids"),
        ("1-1000", "is that of the user daemon"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(given: str, said: str) -> None:
    with pytest.raises(WrongArguments, match=said):
        DriverIds.of(given)


@pytest.mark.guarantees("drivers", "No driver owns the folder in which Monarch writes the others' logs")
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


def run_as(*command: str, user: int = UID) -> None:
    subprocess.run(
        command,
        user=user,
        group=user,
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


@pytest.mark.guarantees(
    "after a session",
    "With `--driver-uids` no process outlives its session, however it forks, and whoever it kills",
)
@as_root
def test_no_process_outruns_the_end_of_its_user_id(going_on: Path) -> None:
    run_as("bash", "-c", HOPS, "hops", str(going_on))
    await_true(lambda: len(processes()) >= 2)

    assert sweep(UID)

    assert processes() == []


@pytest.mark.guarantees(
    "after a session",
    "What a session leaves in shared folders and shared memory is removed before another gets its id",
)
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


LEAVES = {
    "a folder that is too deep for a path and for a recursion": """
        os.chdir("/tmp")
        for _ in range(2500):
            os.mkdir(NAME), os.chdir(NAME)
        os.close(os.open("file", os.O_CREAT)), os.chmod(".", 0)
    """,
    "names that are no text": """
        path = b"/dev/shm/" + NAME.encode() + bytes([255, 10, 27]) + b"x" * 200
        os.makedirs(path + b"/a/b"), os.chmod(path + b"/a", 0), os.chmod(path, 0)
    """,
    "pipes, links and programs with the id's rights": """
        os.mkfifo("/tmp/" + NAME), os.symlink("/etc/passwd", "/dev/shm/" + NAME)
        file = os.open("/var/tmp/" + NAME, os.O_CREAT)
        os.fchmod(file, 0o6777)
    """,
    "a folder in a namespace of its own": """
        script = f"mkdir /tmp/{NAME}; mount -t tmpfs x /tmp/{NAME}; sleep 1000"
        os.system(f"unshare -Urpfm sh -c '{script}' &")
    """,
    "a file on which a lease is": """
        import fcntl, signal
        file = os.open("/tmp/" + NAME, os.O_CREAT | os.O_RDWR)
        if os.fork() == 0:
            os.setsid(), fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            signal.signal(signal.SIGIO, signal.SIG_IGN), time.sleep(1000)
    """,
    "shared memory that was given to another id": """
        buffer = ctypes.create_string_buffer(112)
        memory = libc.shmget(0x6c6f6f6d, 4096, 0o1666)
        libc.shmctl(memory, 2, buffer)
        ctypes.c_uint32.from_buffer(buffer, 4).value = 4242
        assert libc.shmctl(memory, 1, buffer) == 0
    """,
    "a process whose first thread has ended": """
        if os.fork() == 0:
            os.setsid()
            threading.Thread(target=time.sleep, args=(1000,)).start()
            libc.syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
    """,
    "a process that is stopped, under one that adopts orphans and ignores signals": """
        if os.fork() == 0:
            os.setsid(), libc.prctl(36, 1, 0, 0, 0)
            for number in range(1, 32):
                if number not in (9, 19):
                    libc.signal(number, ctypes.c_void_p(1))
            if os.fork() == 0:
                os.kill(os.getpid(), 19)
            time.sleep(1000)
    """,
    "a process that traces another": """
        traced = os.fork()
        if traced == 0 or os.fork() == 0:
            os.setsid()
            if traced:
                libc.ptrace(16, traced, 0, 0)
            time.sleep(1000)
    """,
}
"""Python programs that leave something to the next user of their id."""

QUICK = ("names that are no text", "shared memory that was given to another id", "a process that traces another")
"""One of each kind: files, System V objects and processes."""


def left_by_the_id() -> list[str]:
    """Return what `UID` has in the whole machine: files, processes and System V objects."""
    find = ["find", "/tmp", "/var/tmp", "/dev/shm", "-uid", str(UID)]
    files = subprocess.run(find, capture_output=True, text=True, errors="replace").stdout.splitlines()
    ipc = [row for kind in ("shm", "sem", "msg") for row in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()]
    living = [f"process {path}" for path in Path("/proc").glob("[0-9]*/task/*/status") if is_of_the_id(path)]
    return [*files, *(row for row in ipc if str(UID) in row.split()), *living]


def is_of_the_id(status: Path) -> bool:
    with suppress(OSError):
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        return str(UID) in fields["Uid"].split() and fields["State"][0] not in "ZX"
    return False


@pytest.mark.guarantees(
    "after a session",
    "Whatever a program leaves ends with its id: folders too deep for a path, files with leases, stopped "
    "and traced processes, namespaces, shared memory given away, keys of the kernel",
)
@as_root
@pytest.mark.parametrize(
    "program",
    [pytest.param(each, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, each in LEAVES.items()],
)
def test_whatever_a_program_leaves_ends_with_its_id(program: str) -> None:
    begin = f"import ctypes, os, threading, time\nlibc = ctypes.CDLL(None)\nNAME = 'loom-test-{UID}'\n"
    with reachable_python() as before:
        run_as(*before, *as_user(UID), sys.executable, "-c", begin + textwrap.dedent(program), user=0)
    await_true(lambda: bool(left_by_the_id()))

    assert sweep(UID)

    assert left_by_the_id() == []


@pytest.mark.guarantees(
    "after a session",
    "Whatever a program leaves ends with its id: folders too deep for a path, files with leases, stopped "
    "and traced processes, namespaces, shared memory given away, keys of the kernel",
)
@as_root
def test_no_key_of_the_kernel_outlives_its_session(tmp_path: Path) -> None:
    keys = """
import ctypes, platform, sys
add, control = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
call = ctypes.CDLL(None).syscall
rings = [call(control, 22, -1, -2), -4, -5]  # the persistent one, the user's, and the user's session's
if sys.argv[1:]:
    [call(add, b"user", b"secret", b"secret", 6, ring) for ring in rings]
print([call(control, 11, ring, None, 0) for ring in rings])
"""

    def said(*arguments: str) -> str:
        with reachable_python() as before:
            command = [*before, *as_user(UID), sys.executable, "-c", keys, *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    if "-1" in said("add"):
        pytest.skip("this kernel keeps no keys for programs")

    assert sweep(UID)

    assert said() == "[0, 0, 0]\n"


@as_root
def test_a_sweep_that_has_not_looked_everywhere_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for number in range(20):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr(id_sweep, "MOST_ENTRIES", 10)

    assert list(id_sweep._remove_files(UID, [str(tmp_path)])) == [
        "whatever is in 20 folders, behind 20 names of others"
    ]


@pytest.fixture
def stays() -> Iterator[Path]:
    """A folder of the id's that it cannot remove: another user's is in it."""
    folder = Path(f"/tmp/loom-test-{UID}")
    (folder / "another user's").mkdir(parents=True)
    (folder / "another user's" / "file").touch()
    os.chown(folder, UID, UID)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.guarantees("after a session", "An id of which something is left is given to nobody")
@as_root
async def test_an_id_of_which_something_is_left_is_given_to_nobody(
    stays: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_ids, "RETURNS_WITHIN", 0.1)
    ids = DriverIds(UID, UID + 1)

    assert await ids.take_clean() == UID + 1
    assert f"the user id {UID} is not used for now, because 1 things of it are left: '{stays}'" in caplog.text
    with pytest.raises(LimitReached):
        await ids.take_clean()
    shutil.rmtree(stays)
    assert await ids.take_clean() == UID  # also if nobody gives it back


@as_root
def test_a_driver_is_bounded_in_what_it_starts_and_leaves() -> None:
    code = (
        "import resource; from loom_gateway.sessions.driver_ids import bound_leftovers as b; b(); "
        "print(resource.getrlimit(resource.RLIMIT_NPROC), resource.getrlimit(12))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout

    assert said == f"({MOST_THREADS}, {MOST_THREADS}) (0, 0)\n"


def test_a_driver_with_its_own_id_has_none_of_the_gateways_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOOM_TOKENS", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "HF_TOKEN", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "secret")

    given = driver_ids.environment("/folder")

    assert [name for name, value in given.items() if value == "secret"] == ["WANDB_PROJECT"]
