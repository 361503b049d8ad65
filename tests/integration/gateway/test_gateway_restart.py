"""Drivers outlive their gateway, and the next one finds them, and nothing that only looks like one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

import loom
from loom.process.identity import start_time
from loom_gateway.sessions.driver_process import AdoptedDriver, NotOurDriver
from loom_gateway.sessions.manager import FreshPorts
from loom_gateway.sessions.session import UserSession
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord, LastWords, StateFolder, default_path
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, Gateway, await_end, await_true, gateway_of, run_gateway
from tests.support.processes import still_there

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's."""
    with tempfile.TemporaryDirectory(prefix="loom-test-") as folder:
        yield Path(folder)


def counters_of(job: loom.Job) -> loom.ActorMeshProxy:
    return job.hosts.spawn_procs(name="procs").spawn("counters", Counter)


# -- a session goes on --------------------------------------------------------------------------------------


def test_a_session_outlives_a_gateway_that_is_killed(gateway: Gateway) -> None:
    job = gateway.connect()
    assert list(counters_of(job).add.call(3).get(BOUND).values()) == [3, 3]
    before = gateway.session(job.session)
    job.detach()

    gateway.end(signal.SIGKILL)
    gateway.start()

    after = gateway.session(job.session)
    assert (after["pid"], after["created_at"], after["state"]) == (before["pid"], before["created_at"], "open")
    again = gateway.connect(job.session)
    assert list(again.meshes["counters"].add.call(1).get(BOUND).values()) == [4, 4]
    assert list(counters_of(again).add.call(1).get(BOUND).values()) == [1, 1]
    again.close()
    await_end(before["pid"])
    assert gateway.ended(job.session)["reason"] == "the client closed it"


def test_a_client_that_stays_resumes_with_the_next_gateway(gateway: Gateway) -> None:
    with gateway.connect() as job:
        counters = counters_of(job)
        values = [counters.add.call(1) for _ in range(20)]
        gateway.end(signal.SIGKILL)
        values += [counters.add.call(1) for _ in range(20)]
        gateway.start()
        assert [list(value.get(BOUND).values()) for value in values] == [[n, n] for n in range(1, 41)]


def test_sessions_go_with_a_gateway_that_is_lost_with_all_its_processes_and_files(gateway: Gateway) -> None:
    """As when its machine is lost, or its pod is deleted."""
    job = gateway.connect()
    await_true(lambda: gateway.rest("/status")["spare_ready"])
    counters = counters_of(job)
    pids = list(counters.pid.call().get(BOUND).values())
    lost = [*gateway.drivers(), *gateway.weavers()]
    assert len(lost) == 3  # of the session, of the next one, and the weaver

    gateway.end(signal.SIGKILL)
    for process in lost:
        process.kill()
    shutil.rmtree(gateway.state)
    gateway.start()

    assert gateway.rest("/sessions")["sessions"] == []
    with pytest.raises(loom.UnknownSession):
        counters.add.call(1).get(BOUND)
    for pid in pids:
        await_end(pid)
    with gateway.connect() as another:
        assert list(counters_of(another).add.call(1).get(BOUND).values()) == [1, 1]


def test_a_weaver_whose_folder_is_removed_ends(gateway: Gateway) -> None:
    await_true(lambda: (gateway.state / "weaver" / "weaver.sock").exists())
    weavers = gateway.weavers()

    gateway.end(signal.SIGKILL)
    # At once, as nothing else can that is done while it writes there.
    (gateway.state / "weaver").rename(gateway.folder / "away")

    assert len(weavers) == 1
    assert still_there(weavers, timeout=BOUND) == []


def test_a_gateway_that_is_told_to_stop_leaves_its_sessions_to_the_next(gateway: Gateway) -> None:
    job = gateway.connect()
    counters_of(job).add.call(3).get(BOUND)
    pid = gateway.session(job.session)["pid"]
    job.detach()

    gateway.end(signal.SIGTERM)
    assert [driver.pid for driver in gateway.drivers()] == [pid]
    gateway.start()

    with gateway.connect(job.session) as again:
        assert list(again.meshes["counters"].add.call(1).get(BOUND).values()) == [4, 4]


@pytest.mark.slow
def test_ctrl_c_ends_every_session_also_those_of_an_earlier_gateway(gateway: Gateway) -> None:
    earlier = gateway.connect()
    pids = list(counters_of(earlier).pid.call().get(BOUND).values())
    gateway.end(signal.SIGKILL)
    gateway.start()
    own = gateway.connect()

    gateway.end(signal.SIGINT)

    assert gateway.drivers() == []
    assert gateway.sockets() == []
    for pid in pids:
        await_end(pid)
    gateway.start()
    assert [gateway.ended(job.session)["reason"] for job in (earlier, own)] == ["the gateway was stopped"] * 2
    for job in (earlier, own):
        job.detach()


def test_a_gateway_that_is_to_end_its_sessions_does_so_when_it_is_told_to_stop(cluster: LocalCluster) -> None:
    with gateway_of(cluster, "--end-sessions") as gateway:
        job = gateway.connect()
        gateway.end(signal.SIGTERM)
        assert gateway.drivers() == []
        job.detach()


def test_two_gateways_are_one_after_the_other(gateway: Gateway) -> None:
    refused = run_gateway(gateway)

    assert refused.returncode == 1
    error = refused.stderr.splitlines()[-1]  # below the warning of a token that stands in a command line
    assert error.startswith("error: another gateway (pid ")
    assert f"uses the state folder {gateway.state}" in refused.stderr
    with gateway.connect() as job:
        job.hosts.initialized.get(BOUND)


# -- drivers that end ---------------------------------------------------------------------------------------


def test_a_spare_ends_with_its_gateway(gateway: Gateway) -> None:
    with gateway.connect() as job:
        job.hosts.initialized.get(BOUND)
    gateway.ended(job.session)  # its driver's record would be left to the next gateway
    await_true(lambda: gateway.rest("/status")["spare_ready"])
    drivers = gateway.drivers()
    assert len(drivers) == 1

    gateway.end(signal.SIGKILL)

    assert still_there(drivers) == []
    assert gateway.sockets() == []
    assert list(gateway.state.glob("driver-*.json")) == []


def test_a_driver_that_dies_without_a_gateway_is_told_of_by_the_next(gateway: Gateway) -> None:
    job = gateway.connect()
    pid = gateway.session(job.session)["pid"]
    job.detach()
    gateway.end(signal.SIGKILL)
    psutil.Process(pid).kill()
    await_end(pid)
    assert gateway.sockets()

    gateway.start()

    assert gateway.rest("/sessions")["sessions"] == []
    ended = gateway.ended(job.session)
    assert ended["exit_code"] is None
    assert ended["reason"] == "its driver ended while no gateway ran; its exit code is not known"
    with pytest.raises(loom.SessionLost, match="while no gateway ran"):
        gateway.connect(job.session)


def test_an_adopted_driver_that_dies_is_told_to_its_client(gateway: Gateway) -> None:
    job = gateway.connect()
    counters_of(job).add.call(1).get(BOUND)
    job.detach()
    gateway.end(signal.SIGKILL)
    gateway.start()
    again = gateway.connect(job.session)

    def leave() -> None:
        os.write(2, b"these were my last words\n")
        os._exit(7)

    with pytest.raises(loom.SessionLost, match="ended; its exit code is not known") as caught:
        again.run(leave)
    assert caught.value.exit_code is None
    assert "these were my last words" in caught.value.output
    again.close()
    assert gateway.ended(job.session)["exit_code"] is None
    with pytest.raises(loom.SessionLost, match="these were my last words"):
        gateway.connect(job.session)


def test_an_adopted_session_that_is_ended_over_rest_says_so(gateway: Gateway) -> None:
    job = gateway.connect()
    job.detach()
    gateway.end(signal.SIGKILL)
    gateway.start()

    assert gateway.rest(f"/sessions/{job.session}", "DELETE")["state"] == "ended"

    ended = gateway.ended(job.session)
    assert (ended["reason"], ended["exit_code"]) == ("it was ended over REST", 0)
    with pytest.raises(loom.UnknownSession, match="it was ended over REST"):
        gateway.connect(job.session)


def test_nothing_is_left_of_a_gateway_that_ends_with_its_parent() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="loom-test-") as temporary,
        LocalCluster(hosts=1, env={"TMPDIR": temporary}) as cluster,
    ):
        folder = Path(temporary)
        job = loom.connect(cluster.url, cluster.token, reconnect_timeout=0.0)
        job.hosts.initialized.get(BOUND)
        drivers = psutil.Process(cluster.pids[0]).children()
        assert list(folder.glob("loom-gateway-*/*.sock"))

        os.kill(cluster.pids[0], signal.SIGKILL)

        assert still_there(drivers) == []
        assert list(folder.glob("loom-gateway-*")) == []
        job.detach()


# -- what is not a driver of ours ---------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> DriverFiles:
    return DriverFiles(str(tmp_path_factory.mktemp("d") / "driver-1"))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user's that has nothing to do with Loom."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        assert process.poll() is None, "it was ended"
        process.kill()


def record_of(pid: int, session: str = "session-1") -> DriverRecord:
    started = start_time(pid)
    assert started is not None
    return DriverRecord(pid, started, session, 1.0)


async def test_a_driver_of_ours_is_adopted(files: DriverFiles) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(files.socket)
    listener.listen()
    files.write_record(record_of(os.getpid()))

    driver = AdoptedDriver.adopt(files)

    assert (driver.pid, driver.record.session) == (os.getpid(), "session-1")
    listener.close()


async def test_a_client_that_meets_a_driver_at_its_end_is_told_why_it_ends(files: DriverFiles) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(files.socket)
        listener.listen()
        files.write_record(record_of(os.getpid()))
        driver = AdoptedDriver.adopt(files)
    session = UserSession(driver)

    assert isinstance(session.ended().error(), loom.SessionLost)
    files.write_last_words(LastWords("no client for 5 s"))
    error = session.ended().error()

    assert isinstance(error, loom.UnknownSession)
    assert "no client for 5 s" in str(error)


def test_a_record_that_names_another_process_than_listens_is_refused(
    files: DriverFiles, sleeper: subprocess.Popen[bytes]
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(files.socket)
        listener.listen()
        files.write_record(record_of(sleeper.pid))
        with pytest.raises(NotOurDriver, match=rf"process {os.getpid()} .* listens on .*, not {sleeper.pid}"):
            AdoptedDriver.adopt(files)


def test_a_process_that_has_got_the_id_of_a_driver_is_refused(
    files: DriverFiles, sleeper: subprocess.Popen[bytes]
) -> None:
    record = record_of(sleeper.pid)
    files.write_record(replace(record, started=record.started - 1))
    with pytest.raises(NotOurDriver, match="another one than the record's"):
        AdoptedDriver.adopt(files)


def test_a_process_that_does_not_listen_is_refused(files: DriverFiles, sleeper: subprocess.Popen[bytes]) -> None:
    files.write_record(record_of(sleeper.pid))
    with pytest.raises(NotOurDriver, match="nobody listens"):
        AdoptedDriver.adopt(files)
    Path(files.socket).write_text("no socket")
    with pytest.raises(NotOurDriver, match="is not a socket of user id"):
        AdoptedDriver.adopt(files)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        json.dumps({**asdict(DriverRecord(1, 1)), "pid": "1"}),
        json.dumps({**asdict(DriverRecord(1, 1)), "pid": True}),
    ],
)
def test_what_is_no_record_is_refused(files: DriverFiles, text: str) -> None:
    Path(files.record).write_text(text)
    with pytest.raises(NotOurDriver, match="cannot be read"):
        AdoptedDriver.adopt(files)


@pytest.mark.parametrize("pid", [-1, 0, 1 << 70])
def test_a_record_of_no_process_is_refused(files: DriverFiles, pid: int) -> None:
    files.write_record(DriverRecord(pid, 1))
    with pytest.raises(NotOurDriver, match="has ended"):
        AdoptedDriver.adopt(files)


def test_what_is_stale_or_forged_is_cleared_away(cluster: LocalCluster, sleeper: subprocess.Popen[bytes]) -> None:
    gateway = Gateway(cluster.workers)
    gateway.state.mkdir(0o700)
    try:
        dead = DriverFiles(str(gateway.state / "driver-dead"))
        dead.write_record(DriverRecord(2**22 - 1, 1, "session-dead", 1.0))
        Path(dead.output).write_text("a line\nthe last line\n")
        closed = DriverFiles(str(gateway.state / "driver-closed"))
        closed.write_record(DriverRecord(2**22 - 1, 1, "session-closed", 1.0))
        closed.write_last_words(LastWords("no client for 5 s"))
        closed.write_last_words(LastWords(exit_code=0))
        forged = DriverFiles(str(gateway.state / "driver-forged"))
        forged.write_record(record_of(sleeper.pid, "session-forged"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(forged.socket)
            listener.listen()

            gateway.start()

            assert gateway.rest("/sessions")["sessions"] == []
            assert "driver-forged.sock" not in gateway.sockets()
        assert gateway.ended("session-closed")["reason"] == "no client for 5 s"
        assert gateway.ended("session-closed")["exit_code"] == 0
        with pytest.raises(loom.SessionLost, match="the last line"):
            gateway.connect("session-dead")
        for files in (dead, closed, forged):
            assert not list(gateway.state.glob(f"{Path(files.base).name}.*"))
    finally:
        gateway.close()


# -- the state folder ---------------------------------------------------------------------------------------


def test_a_state_folder_is_for_this_user_only(short_path: Path) -> None:
    path = short_path / "new" / "state"
    folder = StateFolder.open(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(loom.StateFolderInUse, match=f"pid {os.getpid()}.*--state-dir"):
        StateFolder.open(str(path))
    assert not folder.temporary


def test_a_folder_that_others_can_open_is_refused(short_path: Path) -> None:
    path = short_path / "open"
    path.mkdir()
    path.chmod(0o750)
    with pytest.raises(loom.UnsafeStateFolder, match=r"mode 750.*chmod 700"):
        StateFolder.open(str(path))


def test_what_is_no_folder_of_ones_own_is_refused(short_path: Path) -> None:
    (short_path / "real").mkdir(0o700)
    (short_path / "link").symlink_to(short_path / "real")
    (short_path / "file").write_text("")
    with pytest.raises(loom.UnsafeStateFolder, match="not a folder, or a link"):
        StateFolder.open(str(short_path / "link"))
    with pytest.raises(loom.UnsafeStateFolder, match="cannot keep state in"):
        StateFolder.open(str(short_path / "file"))
    with pytest.raises(loom.UnsafeStateFolder, match=r"too long .* at most \d+ bytes with --state-dir"):
        StateFolder.open(str(short_path / ("x" * 100)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_the_folder_of_another_user_is_refused(short_path: Path) -> None:
    path = short_path / "theirs"
    path.mkdir(0o700)
    os.chown(path, 65534, 65534)
    with pytest.raises(loom.UnsafeStateFolder, match="belongs to user 65534"):
        StateFolder.open(str(path))


@pytest.mark.guarantees(
    "drivers", "The state folder is in no place that others can write to, or that a logout removes"
)
def test_a_place_that_others_can_write_to_is_refused(short_path: Path) -> None:
    place = short_path / "open"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(loom.UnsafeStateFolder, match=rf"they can write to {place} \(mode 777\): `chmod \+t"):
        StateFolder.open(str(place / "state"))
    with pytest.raises(loom.UnsafeStateFolder, match=f"they can write to {place} "):
        StateFolder.open(str(place / "loom" / "state"))
    place.chmod(0o1777)
    StateFolder.open(str(place / "state"))


def test_a_new_volume_of_a_container_is_closed_to_others(short_path: Path) -> None:
    volume = short_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    StateFolder.open(str(volume))
    assert stat.S_IMODE(volume.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_place_of_another_user_is_refused(short_path: Path) -> None:
    (short_path / "theirs").mkdir()
    os.chown(short_path / "theirs", 65534, 65534)
    with pytest.raises(loom.UnsafeStateFolder, match="belongs to user 65534, who can put another in its place"):
        StateFolder.open(str(short_path / "theirs" / "state"))


def test_a_folder_that_drivers_with_other_ids_cannot_reach_is_refused(short_path: Path) -> None:
    short_path.chmod(0o700)
    with pytest.raises(loom.UnsafeStateFolder, match=rf"{short_path} is closed to them \(mode 700\)"):
        StateFolder.open(str(short_path / "state"), separate=True)


def test_the_default_folder_is_there_after_a_logout(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/home/state")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    assert default_path(8470) == "/home/state/loom/gateway-8470"
    assert default_path(8470, separate=True) == "/var/lib/loom/gateway-8470"


def test_a_folder_where_it_was_before_is_used_while_sessions_are_in_it(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/home/state")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    before = short_path / "loom" / "gateway-8470"
    before.mkdir(parents=True)
    assert default_path(8470) == "/home/state/loom/gateway-8470"
    (before / "driver-1.json").touch()
    assert default_path(8470) == str(before)


@pytest.mark.guarantees("drivers", "A living driver whose socket vanished is ended, and its session's end is told")
def test_a_driver_whose_socket_vanished_is_ended_by_the_next_gateway(gateway: Gateway) -> None:
    job = gateway.connect()
    pid = gateway.session(job.session)["pid"]
    job.detach()
    gateway.end(signal.SIGKILL)
    for path in gateway.state.glob("driver-*.sock"):
        path.unlink()

    gateway.start()

    await_end(pid)
    ended = gateway.ended(job.session)
    assert "its driver could not be reached any more: nobody listens on" in ended["reason"]
    with pytest.raises(loom.UnknownSession, match="could not be reached any more"):
        gateway.connect(job.session)


@pytest.mark.slow
def test_a_driver_whose_socket_vanished_is_ended_by_the_client_that_looks_for_it(gateway: Gateway) -> None:
    job = gateway.connect()
    pid = gateway.session(job.session)["pid"]
    job.detach()
    for path in gateway.state.glob("driver-*.sock"):
        path.unlink()

    with pytest.raises(loom.UnknownSession, match="could not be reached any more"):
        gateway.connect(job.session)
    await_end(pid)


def test_a_record_of_before_the_machine_started_is_no_drivers(
    files: DriverFiles, sleeper: subprocess.Popen[bytes]
) -> None:
    files.write_record(replace(record_of(sleeper.pid), boot="another start"))
    with pytest.raises(NotOurDriver, match="the machine was started anew"):
        AdoptedDriver.adopt(files)


@pytest.mark.guarantees("drivers", "A driver's record is on the disk before it counts")
def test_a_record_is_on_the_disk_before_it_counts(files: DriverFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    replaced = os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", lambda *paths: (synced.append("replaced"), replaced(*paths)))
    files.write_record(DriverRecord(1, 1))
    folder = os.path.dirname(files.base)
    assert synced[0].startswith(f"{folder}/.driver-1.json-")
    assert synced[1:] == ["replaced", folder]


def test_ports_are_not_given_again_by_the_next_gateway(tmp_path: Path) -> None:
    path = str(tmp_path / "ports")
    given = FreshPorts(path).take()
    sockets = []

    def bind() -> socket.socket:
        """The kernel, which picks the same port first."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 0 if sockets else given))
        sockets.append(sock)
        return sock

    assert FreshPorts(path, bind).take() != given
    assert len(sockets) == 2
    assert len((tmp_path / "ports").read_text().split()) == 2


def test_the_reason_that_was_given_first_stays(files: DriverFiles) -> None:
    files.write_last_words(LastWords("it was ended over REST"))
    files.write_last_words(LastWords("the driver was told to stop"))
    files.write_last_words(LastWords(exit_code=0))
    assert files.read_last_words() == LastWords("it was ended over REST", 0)
