"""Functions with restarts: they are started again after they have raised, and after their driver has died."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.integration.session.run_functions import IN_TIME, until_it_prints
from tests.support.actors import Counter
from tests.support.gateways import BOUND, Gateway, await_end, await_true, gateway_of
from tests.support.processes import still_there

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    with gateway_of(cluster) as running:
        yield running


def count(folder: str, hosts: Any, until: int) -> tuple[int, int]:
    """A function that notes its start, and goes on until enough starts are noted and a file is there."""
    (Path(folder) / f"start-{len(os.listdir(folder))}").write_text(str(os.getpid()))
    procs = hosts.spawn_procs(name="procs")
    counters = procs.spawn("counters", Counter)
    added = list(counters.add.call(1).get().values())
    starts = len(os.listdir(folder))
    print(f"start {starts}", flush=True)
    if starts < until:
        raise RuntimeError(f"start {starts} fails")
    while not (Path(folder).parent / "go").exists():
        time.sleep(0.01)
    return starts, added[0]


def starts_of(folder: Path) -> list[int]:
    """The processes in which the function was started."""
    return [int((folder / name).read_text()) for name in sorted(os.listdir(folder))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "starts"
    found.mkdir()
    return found


@pytest.mark.slow
def test_a_function_that_raises_is_started_again_with_new_processes(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    with gateway.connect() as job:
        run = job.run(count, str(folder), job.hosts, 3, detach=True, name="counts", restarts=2)

        assert run.result(BOUND) == (3, 1)

        output = run.output()
        assert len(set(starts_of(folder))) == 1
    assert "RuntimeError: start 1 fails" in output
    assert "1 more restarts are left" in output
    assert "0 more restarts are left" in output


@pytest.mark.slow
def test_without_restarts_left_the_error_is_the_functions(gateway: Gateway, folder: Path) -> None:
    with gateway.connect() as job:
        with pytest.raises(RuntimeError, match="start 2 fails"):
            job.run(count, str(folder), job.hosts, 9, restarts=1)
        assert len(starts_of(folder)) == 2
        assert job.runs() == {}


def test_a_function_that_waits_for_its_next_start_is_cancelled(gateway: Gateway, folder: Path) -> None:
    with gateway.connect() as job:
        run = job.run(count, str(folder), job.hosts, 9, detach=True, restarts=9)
        until_it_prints(run, "is started again")

        assert run.cancel()

        with pytest.raises(loom.OperationCancelled):
            run.result(IN_TIME)


@pytest.mark.slow
def test_a_function_goes_on_with_another_driver_when_its_driver_is_killed(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    job = gateway.connect()
    run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=3)
    quick = job.run(os.getpid, detach=True, name="quick")
    until_it_prints(run, "start 1")
    driver = quick.result(IN_TIME)
    counters = job.hosts.spawn_procs(name="more").spawn("counters", Counter)
    pids = list(counters.pid.call().get(BOUND).values())

    os.kill(driver, signal.SIGKILL)

    with pytest.raises(loom.SessionRestarted, match=r"was killed by SIGKILL.*loom\.connect\(session=") as lost:
        run.result(BOUND)
    assert set(lost.value.meshes) >= {"more", "counters"}
    assert lost.value.unanswered >= 1
    for pid in pids:
        await_end(pid)
    # The job goes on, and so does the function's handle. Those of what is gone say so.
    until_it_prints(run, "2 more restarts are left")
    assert job.runs() == {"counts": run}
    assert job.meshes == {}
    for _ in range(2):
        with pytest.raises(loom.SessionRestarted):
            quick.output()
        with pytest.raises(loom.SessionRestarted):
            counters.pid.call()
    await_true(lambda: len(starts_of(folder)) == 2)
    later = job.run(os.getpid)
    assert starts_of(folder) == [driver, later]
    assert gateway.session(job.session)["state"] == "open"
    assert len(job.hosts.spawn_procs(name="later").spawn("counters", Counter).pid.call().get(BOUND)) == len(pids)
    (tmp_path / "go").touch()
    assert run.result(BOUND) == (2, 1)
    # Nothing is left to start again, so a driver that dies now is the end of the session.
    os.kill(later, signal.SIGKILL)
    with pytest.raises(loom.SessionLost) as caught:
        job.run(len, "abc")
    assert not isinstance(caught.value, loom.SessionRestarted)
    assert list(gateway.state.glob("*.restart")) == []


@pytest.mark.slow
def test_a_job_is_told_when_another_program_has_its_session(gateway: Gateway, folder: Path, tmp_path: Path) -> None:
    job = gateway.connect()
    run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=1)
    until_it_prints(run, "start 1")
    driver = starts_of(folder)[0]
    os.kill(driver, signal.SIGKILL)
    with pytest.raises(loom.SessionRestarted):
        run.result(BOUND)

    with gateway.connect(job.session) as other:
        with pytest.raises(loom.SessionInUse):
            job.runs()
        with pytest.raises(loom.SessionInUse):
            run.result(BOUND)
        assert list(other.runs()) == ["counts"]
        other.detach()

    (tmp_path / "go").touch()
    assert run.result(BOUND) == (2, 1)
    job.close()


@pytest.mark.slow
def test_output_and_callbacks_go_on_with_the_next_driver(gateway: Gateway, folder: Path, tmp_path: Path) -> None:
    failures: queue.Queue[loom.MeshFailure] = queue.Queue()
    job = gateway.connect()
    job.on_failure(failures.put)
    run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=1)
    output = run.follow()
    assert "start 1" in next(output)
    os.kill(starts_of(folder)[0], signal.SIGKILL)
    with pytest.raises(loom.SessionRestarted):
        list(output)

    assert "0 more restarts are left" in next(output)
    pid, *_ = job.hosts.spawn_procs(name="more").spawn("counters", Counter).pid.call().get(BOUND).values()
    os.kill(pid, signal.SIGKILL)

    assert "sig=9" in failures.get(timeout=BOUND).text
    (tmp_path / "go").touch()
    assert "start 2" in "".join(output)
    job.close()
    await_true(lambda: gateway.rest("/sessions")["sessions"] == [])


@pytest.mark.slow
def test_a_job_that_is_closed_after_its_driver_has_died_leaves_the_function_alone(
    gateway: Gateway, folder: Path, tmp_path: Path
) -> None:
    with gateway.connect() as job, contextlib.suppress(loom.SessionRestarted):
        run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=1)
        until_it_prints(run, "start 1")
        os.kill(starts_of(folder)[0], signal.SIGKILL)
        run.result(BOUND)

    with pytest.raises(loom.SessionRestarted):
        job.runs()
    with gateway.connect(job.session) as again:
        (tmp_path / "go").touch()
        assert again.runs()["counts"].result(BOUND) == (2, 1)


def test_a_mesh_of_the_driver_is_no_argument_of_a_function_with_restarts(gateway: Gateway, folder: Path) -> None:
    with gateway.connect() as job:
        procs = job.hosts.spawn_procs(name="procs")
        with pytest.raises(loom.WrongArguments, match=r"give it job\.hosts"):
            job.run(len, [procs], restarts=1)
        assert job.run(len, [procs]) == 1


def test_a_function_that_is_too_large_to_be_kept_is_refused(gateway: Gateway) -> None:
    with gateway.connect() as job, pytest.raises(loom.WrongArguments, match="64 MiB in a session"):
        job.run(len, bytes(65 << 20), restarts=1)


@pytest.mark.slow
def test_a_session_whose_driver_and_gateway_die_goes_on_with_the_next_gateway(
    cluster: LocalCluster, folder: Path, tmp_path: Path
) -> None:
    """As when the machine of both is lost, and the state folder is on another one."""
    with gateway_of(cluster) as gateway:
        job = gateway.connect()
        run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=1)
        until_it_prints(run, "start 1")
        drivers = gateway.drivers()
        gateway.end(signal.SIGKILL)
        for driver in drivers:
            with contextlib.suppress(psutil.NoSuchProcess):  # a spare ends with its gateway
                driver.kill()
        assert still_there(drivers, timeout=BOUND) == []

        gateway.start()

        # The client that stayed is told, and another one finds the function.
        with pytest.raises(loom.SessionRestarted):
            run.result(BOUND)
        with gateway.connect(job.session) as again:
            await_true(lambda: len(starts_of(folder)) == 2)
            (tmp_path / "go").touch()
            assert again.runs()["counts"].result(BOUND) == (2, 1)


@pytest.mark.slow
def test_a_session_that_is_ended_while_it_restarts_has_ended(cluster: LocalCluster, folder: Path) -> None:
    with gateway_of(cluster) as gateway:
        job = gateway.connect()
        run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=1)
        until_it_prints(run, "start 1")
        await_true(lambda: gateway.rest("/status")["spare_ready"])
        (spare,) = (driver for driver in gateway.drivers() if driver.pid != starts_of(folder)[0])
        spare.suspend()
        try:
            os.kill(starts_of(folder)[0], signal.SIGKILL)
            await_true(lambda: gateway.session(job.session)["state"] == "restarting")

            gateway.rest(f"/sessions/{job.session}", method="DELETE")

            await_true(lambda: gateway.rest("/sessions")["sessions"] == [])
            with pytest.raises(loom.UnknownSession, match="has ended"):
                gateway.connect(job.session)
        finally:
            spare.resume()
        await_true(lambda: list(gateway.state.glob("*.restart")) == [])


@pytest.mark.slow
def test_a_gateway_that_is_told_to_stop_leaves_a_session_that_restarts_to_the_next(
    cluster: LocalCluster, folder: Path, tmp_path: Path
) -> None:
    with gateway_of(cluster) as gateway:
        job = gateway.connect()
        run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=1)
        until_it_prints(run, "start 1")
        await_true(lambda: gateway.rest("/status")["spare_ready"])
        (spare,) = (driver for driver in gateway.drivers() if driver.pid != starts_of(folder)[0])
        spare.suspend()
        os.kill(starts_of(folder)[0], signal.SIGKILL)
        await_true(lambda: gateway.session(job.session)["state"] == "restarting")
        spare.kill()

        gateway.end(signal.SIGTERM)
        assert len(starts_of(folder)) == 1
        gateway.start()

        with gateway.connect(job.session) as again:
            (tmp_path / "go").touch()
            assert again.runs()["counts"].result(BOUND) == (2, 1)


@pytest.mark.slow
def test_a_synced_folder_is_there_again_with_the_next_driver(
    gateway: Gateway, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "trained_here.py").write_text(
        "import os, time\n\n"
        "def train(folder):\n"
        "    open(os.path.join(folder, f'start-{len(os.listdir(folder))}'), 'w').write(str(os.getpid()))\n"
        "    while len(os.listdir(folder)) < 2:\n"
        "        time.sleep(0.01)\n"
        "    return __file__\n"
    )
    monkeypatch.syspath_prepend(str(project))
    import trained_here  # type: ignore[import-not-found]

    job = gateway.connect()
    job.sync(project)
    job.run(trained_here.train, str(folder), detach=True, name="train", restarts=1)
    first = folder / "start-0"
    await_true(lambda: first.exists() and first.read_text() != "")

    os.kill(starts_of(folder)[0], signal.SIGKILL)

    with gateway.connect(job.session) as again:
        found = again.runs()["train"].result(BOUND)
    assert found.endswith("trained_here.py")
    assert not found.startswith(str(project))


@pytest.mark.slow
def test_restarts_do_not_outlive_the_longest_life_of_a_session(
    cluster: LocalCluster, folder: Path, tmp_path: Path
) -> None:
    with gateway_of(cluster, "--session-max", "12") as gateway:
        job = gateway.connect()
        opened = time.time()
        run = job.run(count, str(folder), job.hosts, 1, detach=True, name="counts", restarts=9)
        until_it_prints(run, "start 1")
        os.kill(starts_of(folder)[0], signal.SIGKILL)

        await_true(lambda: gateway.rest("/sessions")["sessions"] == [])
        ended = gateway.ended(job.session)
        assert "--session-max" in ended["reason"]
        assert ended["ended_at"] - opened < 12 + BOUND / 2
        assert list(gateway.state.glob("*.restart")) == []
