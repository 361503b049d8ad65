"""Drivers with user ids of their own: what one session's user code can reach of another's, and of the gateway's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_gateway.sessions.driver_ids import NEEDED
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true
from tests.support.other_users import as_root, reachable_python

pytestmark = [as_root, pytest.mark.timeout(180)]

LOW = 1_000_000 + 16 * os.getpid()
"""Of this run alone: what has such an id is ended with its session."""


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    gateway = Gateway(cluster.workers, "--driver-uids", f"{LOW}-{LOW + 3}")
    gateway.folder.chmod(0o711)
    with reachable_python() as gateway.before:
        try:
            yield gateway.start()
        finally:
            gateway.close()


def try_to(action: str, *arguments: Any) -> str:
    """What comes of something that user code tries; run in a driver."""
    actions = {
        "read": lambda path: Path(path).read_bytes(),
        "list": os.listdir,
        "enter": os.chdir,
        "kill": os.kill,
        "connect": connect,
        "write": lambda path: Path(path).write_text("mine"),
    }
    try:
        return f"done: {actions[action](*arguments)!r:.200}"
    except OSError as error:
        return type(error).__name__


def connect(path: str) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)


def pid_of(gateway: Gateway, job: loom.Job) -> int:
    return int(gateway.session(job.session)["pid"])


def socket_of(pid: int) -> Path:
    words = psutil.Process(pid).cmdline()
    return Path(words[words.index("--socket") + 1])


def uids_of(pid: int) -> set[int]:
    return set(psutil.Process(pid).uids())


@pytest.mark.guarantees(
    "drivers", "With `--driver-uids` each driver has a user id of its own, no groups and no rights"
)
def test_each_driver_has_a_user_id_of_its_own_and_no_rights(gateway: Gateway) -> None:
    def who() -> tuple[Any, ...]:
        status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        rights = {status[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")}
        return os.getresuid(), os.getresgid(), os.getgroups(), rights, status["NoNewPrivs"]

    with gateway.connect() as one, gateway.connect() as other:
        found = [one.run(who), other.run(who)]

    ids = [uids[0] for uids, *_ in found]
    assert ids[0] != ids[1]
    assert set(ids) <= set(range(LOW, LOW + 4))
    for uid, (uids, gids, groups, rights, no_new) in zip(ids, found, strict=True):
        assert uids == gids == (uid, uid, uid)
        assert groups == []
        assert rights == {"0000000000000000"}
        assert no_new == "1"


@pytest.mark.guarantees("drivers", "The gateway keeps exactly the four rights that this needs")
def test_the_gateway_keeps_exactly_the_rights_that_it_needs(gateway: Gateway) -> None:
    mask = sum(1 << capability for capability in NEEDED)
    status = Path(f"/proc/{gateway.announced['pid']}/status").read_text()

    assert {int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")} == {mask, 0}
    assert f"CapInh:\t{0:016x}" in status
    await_true(lambda: (gateway.state / "weaver" / "weaver.sock").exists())
    weaver = Path(f"/proc/{gateway.weavers()[0].pid}/status").read_text()
    assert f"CapEff:\t{0:016x}" in weaver


@pytest.mark.guarantees(
    "drivers",
    "With them user code reaches no socket of Loom's, no file of the folders, no memory and no process of "
    "another session, the gateway or the weaver. Monarch's ports are open to it, which is the documented "
    "limit",
)
def test_user_code_reaches_nothing_of_another_session_or_of_the_gateway(gateway: Gateway) -> None:
    with gateway.connect() as mine, gateway.connect() as theirs:
        await_true(lambda: (gateway.state / "weaver" / "weaver.sock").exists())
        theirs.run(lambda: Path("a secret").write_text("in the working folder"))
        pid, parent = pid_of(gateway, theirs), gateway.announced["pid"]
        sock = socket_of(pid)
        attempts: list[tuple[Any, ...]] = [
            ("connect", str(sock)),
            ("enter", str(sock.parent)),
            ("read", str(sock.parent / "a secret")),
            ("read", str(sock.parent / "driver.log")),
            ("write", str(sock.parent / "mine")),
            ("list", str(gateway.state)),
            ("write", str(gateway.state / "mine")),
            ("read", f"{sock.parent}.json"),
            ("read", f"{sock.parent}.out"),
            ("list", str(gateway.state / "weaver")),
            ("read", str(gateway.state / "weaver" / "weaver.sqlite")),
            ("read", str(gateway.state / "weaver" / "link.json")),
            ("read", str(gateway.state / "weaver" / "secret")),
            ("kill", pid, signal.SIGKILL),
            ("kill", parent, signal.SIGKILL),
            ("kill", gateway.weavers()[0].pid, signal.SIGKILL),
            *(("read", f"/proc/{other}/environ") for other in (pid, parent)),
            *(("list", f"/proc/{other}/fd") for other in (pid, parent)),
        ]
        outcomes = {attempt: mine.run(try_to, *attempt) for attempt in attempts}

        assert set(outcomes.values()) == {"PermissionError"}, outcomes
        assert theirs.run(os.getpid) == pid


@pytest.mark.slow
def test_the_files_of_a_driver_are_in_its_folder(gateway: Gateway) -> None:
    def places() -> list[str]:
        import tempfile

        return [os.path.expanduser("~"), tempfile.gettempdir(), os.getcwd()]

    with gateway.connect() as job:
        folder = socket_of(pid_of(gateway, job)).parent
        found = job.run(places)

    assert found == [str(folder / "home"), str(folder / "tmp"), str(folder)]


@pytest.mark.guarantees("drivers", "The log of an ended session is closed to other sessions' drivers")
def test_a_session_works_and_its_log_outlives_it(gateway: Gateway) -> None:
    with gateway.connect() as job:
        counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter)
        assert list(counters.add.call(3).get(BOUND).values()) == [3, 3]
        job.run(lambda: print("said in the driver"))
        await_true(lambda: "said in the driver" in logs_of(gateway, job.session))

    ended = gateway.ended(job.session)
    assert ended["reason"] == "the client closed it"
    assert "said in the driver" in logs_of(gateway, job.session)
    (log,) = gateway.folder.rglob("driver-*.log")
    assert log.stat().st_mode & 0o077 == 0


def logs_of(gateway: Gateway, session: str) -> str:
    import urllib.request

    url = gateway.url.replace("ws://", "http://") + f"/api/v1/sessions/{session}/logs"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=BOUND) as response:
        return str(response.read().decode())


def test_the_next_gateway_finds_them(gateway: Gateway) -> None:
    job = gateway.connect()
    pid, uids = pid_of(gateway, job), uids_of(pid_of(gateway, job))
    job.detach()

    gateway.end(signal.SIGKILL)
    gateway.start()

    assert pid_of(gateway, job) == pid
    with gateway.connect(job.session) as again, gateway.connect() as new:
        assert again.run(os.getpid) == pid
        assert uids_of(pid_of(gateway, new)) != uids


@pytest.mark.guarantees("drivers", "What a session leaves behind is ended before its id is used again")
def test_what_a_session_leaves_behind_is_ended_before_its_id_is_used_again(gateway: Gateway) -> None:
    def leave() -> int:
        Path.home().joinpath("closed").mkdir(mode=0)
        # A daemon: neither a descendant of the driver, nor in its process group.
        daemon = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
        return int(subprocess.run(["sh", "-c", daemon], stdout=subprocess.PIPE, check=True).stdout)

    with gateway.connect() as job:
        folder = socket_of(pid_of(gateway, job)).parent
        left = psutil.Process(job.run(leave))
    gateway.ended(job.session)

    with suppress(psutil.NoSuchProcess):
        assert left.status() == psutil.STATUS_ZOMBIE
    assert not folder.exists()


@pytest.mark.guarantees("drivers", "A range of ids that is used up is a clear error")
@pytest.mark.slow
def test_ids_go_round_and_a_range_that_is_used_up_is_a_clear_error(gateway: Gateway) -> None:
    ids = set()
    for _ in range(6):
        with gateway.connect() as job:
            ids |= uids_of(pid_of(gateway, job))
    assert ids == set(range(LOW, LOW + 4))

    jobs = [gateway.connect() for _ in range(4)]
    with pytest.raises(loom.LimitReached, match="all 4 user ids of --driver-uids are in use by sessions"):
        gateway.connect()
    for job in jobs:
        job.close()
        gateway.ended(job.session)
    gateway.connect().close()


@pytest.mark.guarantees("drivers", "A driver cannot lead the gateway to another driver, or its log to a secret")
@pytest.mark.slow
def test_a_driver_that_leads_its_socket_to_another_one_gets_nobody_there(gateway: Gateway) -> None:
    """Its user could drive another's session so: the gateway may open both sockets."""

    def lead_astray(own: str, other: str) -> None:
        os.unlink(own)
        os.symlink(other, own)

    with gateway.connect() as theirs:
        mine = gateway.connect()
        pids = [pid_of(gateway, job) for job in (mine, theirs)]
        mine.run(lead_astray, *(str(socket_of(pid)) for pid in pids))
        mine.detach()

        with pytest.raises(loom.LoomError, match="could not be reached any more"):
            gateway.connect(mine.session)

        assert theirs.run(os.getpid) == pids[1]


def test_a_driver_that_leads_its_log_to_a_secret_shows_none(gateway: Gateway) -> None:
    secret = gateway.folder / "secret"
    secret.write_text(
        '{"time": 1, "mesh": "a", "rank": 0, "place": "", "stream": "stdout", "text": "the secret"}\n'
    )
    secret.chmod(0o600)

    def lead_astray(log: str, other: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(log)
        os.symlink(other, log)

    with gateway.connect() as job:
        job.run(lead_astray, str(socket_of(pid_of(gateway, job)).with_suffix(".log")), str(secret))
        living = logs_of(gateway, job.session)
    gateway.ended(job.session)

    assert "the secret" not in living
    assert "the secret" not in logs_of(gateway, job.session)


def test_a_driver_takes_connections_of_its_gateway_only(gateway: Gateway) -> None:
    with gateway.connect() as job:
        own = str(socket_of(pid_of(gateway, job)))

        def speaks_to_itself() -> bytes:
            import socket

            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(own)
                return sock.recv(1)

        assert job.run(speaks_to_itself) == b""


def test_a_range_that_makes_no_sense_is_refused() -> None:
    ended = refused("--driver-uids", "5-4")

    assert ended.returncode == 2
    assert "is no range of user ids" in ended.stderr


@pytest.mark.guarantees("drivers", "Without the right to change ids the option is refused with what is missing")
def test_without_the_right_to_change_ids_the_option_is_refused_with_what_is_missing() -> None:
    ended = refused("--driver-uids", f"{LOW}-{LOW + 3}", before=["setpriv", "--bounding-set", "-setuid,-kill"])

    assert ended.returncode == 2
    assert "lacks CAP_SETUID, CAP_KILL" in ended.stderr


def refused(*options: str, before: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [
        *(before or []),
        sys.executable,
        "-m",
        "loom_gateway",
        "--worker",
        "tcp://127.0.0.1:1",
        "--port",
        "0",
    ]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=BOUND, stdin=subprocess.DEVNULL
    )


def _note_and_wait(path: str) -> None:
    """A function that notes the user id of each start of its, and goes on for ever."""
    with open(path, "a") as file:
        file.write(f"{os.geteuid()}\n")
    while True:
        time.sleep(0.05)


@pytest.mark.slow
def test_a_function_goes_on_under_another_user_id_and_nobody_else_reads_what_was_left(gateway: Gateway) -> None:
    starts = gateway.folder / "starts"
    starts.touch()
    starts.chmod(0o666)
    with gateway.connect() as job:
        job.run(_note_and_wait, str(starts), detach=True, name="waits", restarts=1)
        await_true(lambda: len(starts.read_text().splitlines()) == 1)
        (left,) = gateway.state.glob("*/driver.restart")
        kept = left.stat()

        os.kill(pid_of(gateway, job), signal.SIGKILL)

        await_true(lambda: len(starts.read_text().splitlines()) == 2)
        with gateway.connect(job.session) as again:
            assert list(again.runs()) == ["waits"]
            assert not left.exists()
    uids = [int(line) for line in starts.read_text().splitlines()]
    assert (kept.st_uid, kept.st_gid, kept.st_mode & 0o777) == (uids[0], os.getegid(), 0o640)
    assert len({*uids, os.geteuid()}) == 3
