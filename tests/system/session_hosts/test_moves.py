"""Sessions whose session host is gone, or hangs, go on on another one, if they have functions with restarts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter
from tests.support.gateways import BOUND, await_true
from tests.support.other_users import as_root, reachable_python
from tests.support.session_hosts import HostedCluster, Member
from tests.system.train.test_recovery import assert_exact
from tests.system.train.test_restarts import await_step
from tests.system.train.trainers import a_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def hosted(cluster: LocalCluster) -> Iterator[HostedCluster]:
    with HostedCluster(cluster.workers, peers=True) as running:
        yield running


def count(folder: str, hosts: Any, until: int) -> tuple[int, int]:
    """Note the start, and from where the steps go on; make one every 10 ms until a file is there."""
    steps = Path(folder) / "steps"
    (Path(folder) / f"start-{time.time_ns()}").write_text(f"{os.getpid()} {steps.stat().st_size}")
    counters = hosts.spawn_procs(name="procs").spawn("counters", Counter)
    print("started", flush=True)
    while not (Path(folder) / "go").exists():
        counters.add.call(1).get()
        with steps.open("a") as file:  # the checkpoint
            file.write(".")
        time.sleep(0.01)
    return until, steps.stat().st_size


def starts_of(folder: Path) -> list[int]:
    """The processes in which the function was started."""
    return [int(path.read_text().split()[0]) for path in sorted(folder.glob("start-*")) if path.stat().st_size]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "steps").touch()
    return tmp_path


def begin(hosted: HostedCluster, folder: Path) -> tuple[loom.Job, loom.Run[Any], Member, Member]:
    """A session that counts with restarts, its host and another one, which has its copy."""
    job = hosted.connect(timeout=BOUND)
    run = job.run(count, str(folder), job.hosts, 7, detach=True, name="counts", restarts=3)
    await_true(lambda: (folder / "steps").stat().st_size > 10)
    host = hosted.host_of(job.session)
    (other,) = [one for one in hosted.hosts if one is not host]
    await_true(lambda: copy_of(hosted, other, job.session).exists())
    return job, run, host, other


def copy_of(hosted: HostedCluster, host: Member, session: str) -> Path:
    (name,) = [*(hosted.folder / host.name / "copies").glob("*"), Path("none")][:1]
    return name / f"{session}.json"


def kill_whole(host: Member) -> None:
    """Kill a session host with its drivers, as the end of a container does."""
    drivers = host.drivers()
    for one in (psutil.Process(host.process.pid), *drivers):
        one.kill()
    host.process.communicate(timeout=BOUND)


def test_a_session_whose_host_is_killed_goes_on_on_another_one(hosted: HostedCluster, folder: Path) -> None:
    job, run, host, other = begin(hosted, folder)
    bystanders = [hosted.connect(timeout=BOUND) for _ in range(4)]
    here = [one for one in bystanders if hosted.host_of(one.session) is other]
    counters = [one.hosts.spawn_procs().spawn("counters", Counter) for one in here]
    before = (folder / "steps").stat().st_size

    kill_whole(host)
    began = time.monotonic()
    for counter in counters:  # other sessions notice nothing
        assert set(counter.add.call(1).get(timeout=BOUND).values()) == {1}
    await_true(lambda: len(starts_of(folder)) == 2)
    print(f"went on after {time.monotonic() - began:.1f} s")

    with pytest.raises(loom.SessionRestarted, match="was on a session host that does not answer"):
        run.result(BOUND)
    assert starts_of(folder)[1] in [driver.pid for driver in other.drivers()]
    (folder / "go").touch()
    until, steps = run.result(BOUND)
    assert until == 7
    assert steps >= before
    assert hosted.host_of(job.session) is other
    # Its own host is back, and leaves it where it is.
    host.start()
    await_true(lambda: not list((hosted.folder / host.name).glob("*.restart")))
    assert hosted.host_of(job.session) is other
    assert len(starts_of(folder)) == 2
    job.close()
    for one in here:
        one.close()


@pytest.mark.guarantees(
    "training",
    "A training with restarts goes on from its last checkpoint, as one run, when its session host is gone",
)
def test_a_training_goes_on_on_another_host_as_one_run(hosted: HostedCluster, tmp_path: Path) -> None:
    job = hosted.connect(timeout=BOUND)
    training = a_job(steps=300, checkpoints=str(tmp_path), checkpoint_every=20)
    training.start(job, restarts=2)
    name = job.session
    await_step(job.weaver, 60)
    host = hosted.host_of(name)
    (other,) = [one for one in hosted.hosts if one is not host]
    await_true(lambda: copy_of(hosted, other, name).exists())
    job.detach()

    kill_whole(host)  # no laptop is there
    began = time.monotonic()

    await_true(lambda: hosted.member_of(name) is other, 60)
    print(f"another driver after {time.monotonic() - began:.1f} s")
    with hosted.connect(name, timeout=BOUND) as found:
        summary = found.runs()["train"].result(120)
        (run,) = found.weaver.runs("train")
        details, points = run.info, run.history("loss")
    assert_exact(summary, groups=2)
    assert (details.state, details.step, details.restarts) == ("completed", 300, 1)
    assert min(report.restored_step for report in summary.reports.values()) >= 40
    back = [before.step - after.step for before, after in pairwise(points) if after.step < before.step]
    assert len(back) <= 1
    assert all(steps <= 40 for steps in back)


def test_a_synced_folder_comes_from_the_workers_where_its_contents_are(
    hosted: HostedCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = folder / "project"
    project.mkdir()
    (project / "counted_here.py").write_text(
        "from tests.system.session_hosts.test_moves import count as imported\n\n\n"
        "def count(*args):\n    return imported(*args), __file__\n"
    )
    (project / "large.bin").write_bytes(os.urandom(9 << 20))
    monkeypatch.syspath_prepend(str(project))
    import counted_here  # type: ignore[import-not-found]

    job = hosted.connect(timeout=BOUND)
    job.sync(project)
    job.run(counted_here.count, str(folder), job.hosts, 7, detach=True, name="counts", restarts=3)
    await_true(lambda: len(starts_of(folder)) == 1)
    host = hosted.host_of(job.session)
    (other,) = [one for one in hosted.hosts if one is not host]
    await_true(lambda: copy_of(hosted, other, job.session).exists())

    kill_whole(host)

    (folder / "go").touch()
    await_true(lambda: len(starts_of(folder)) == 2)
    with hosted.connect(job.session, timeout=BOUND) as again:
        _, file = again.runs()["counts"].result(BOUND)
    assert str(hosted.folder / f"cache-{other.name}") in file
    assert (Path(file).parent / "large.bin").read_bytes() == (project / "large.bin").read_bytes()


def test_a_host_that_hangs_has_ended_the_drivers_of_what_goes_on_elsewhere(
    hosted: HostedCluster, folder: Path
) -> None:
    job, run, host, other = begin(hosted, folder)
    (first,) = starts_of(folder)

    host.process.send_signal(signal.SIGSTOP)
    try:
        await_true(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == "zombie")
        assert len(starts_of(folder)) == 1  # it ended before another one began
        await_true(lambda: len(starts_of(folder)) == 2)
    finally:
        host.process.send_signal(signal.SIGCONT)

    with pytest.raises(loom.SessionRestarted):
        run.result(BOUND)
    await_true(lambda: not list((hosted.folder / host.name).glob("*.restart")))
    (folder / "go").touch()
    assert run.result(BOUND)[0] == 7
    assert hosted.host_of(job.session) is other
    assert len(starts_of(folder)) == 2
    job.close()


def test_while_the_weaver_is_away_hosts_that_hear_each_other_keep_their_sessions(
    hosted: HostedCluster, folder: Path
) -> None:
    job, run, host, _ = begin(hosted, folder)

    hosted.weaver.end()
    time.sleep(25)  # two leases; the absence of a move has no event
    assert len(starts_of(folder)) == 1
    kill_whole(host)
    time.sleep(16)
    assert len(starts_of(folder)) == 1  # nobody can say that the host is not only cut off
    hosted.weaver.start()

    await_true(lambda: len(starts_of(folder)) == 2)
    (folder / "go").touch()
    with pytest.raises(loom.SessionRestarted):
        run.result(BOUND)
    assert run.result(BOUND)[0] == 7
    job.close()


def test_a_host_that_is_started_again_soon_goes_on_with_its_sessions(hosted: HostedCluster, folder: Path) -> None:
    job, run, host, _ = begin(hosted, folder)

    kill_whole(host)
    host.start()

    await_true(lambda: len(starts_of(folder)) == 2)
    (folder / "go").touch()
    with pytest.raises(loom.SessionRestarted):
        run.result(BOUND)
    assert run.result(BOUND)[0] == 7
    assert hosted.host_of(job.session) is host
    job.close()


@as_root
def test_a_session_whose_driver_has_a_user_id_of_its_own_goes_on_under_one_of_the_other_host(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    low = 1_000_000 + 16 * os.getpid()
    with (
        reachable_python() as before,
        HostedCluster(
            cluster.workers, host_options=["--driver-uids", f"{low}-{low + 3}"], peers=True, before_hosts=before
        ) as hosted,
    ):
        folder = hosted.folder / "counts"
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "steps").touch()
        (folder / "steps").chmod(0o666)
        job, run, host, other = begin(hosted, folder)

        kill_whole(host)

        with pytest.raises(loom.SessionRestarted):
            run.result(BOUND)
        (folder / "go").touch()
        assert run.result(BOUND)[0] == 7
        assert hosted.host_of(job.session) is other
        job.close()
