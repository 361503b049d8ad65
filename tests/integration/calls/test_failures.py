"""What a program sees when something dies: a user's process, a worker host, a driver, a gateway."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
import urllib.error
import urllib.request
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter, Hang

BOUND = 30.0
"""Seconds; far over what detection takes, so that only a hang fails."""


def rest(cluster: LocalCluster, path: str, method: str = "GET", token: str | None = None) -> Any:
    url = cluster.url.replace("ws://", "http://") + path
    request = urllib.request.Request(url, method=method)
    request.add_header("Authorization", f"Bearer {cluster.token if token is None else token}")
    with urllib.request.urlopen(request, timeout=BOUND) as response:
        return json.load(response)


def driver_pid(cluster: LocalCluster, job: loom.Job) -> int:
    (pid,) = [s["pid"] for s in rest(cluster, "/api/v1/sessions")["sessions"] if s["name"] == job.session]
    return int(pid)


def wait_gone(pids: list[int]) -> None:
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=BOUND)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# -- a user's process ---------------------------------------------------------------------------------------


def test_a_dead_process_fails_pending_and_later_calls_on_it_and_no_others(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    counters, hang = procs.spawn("counters", Counter), procs.spawn("hang", Hang)
    counters.add.call(1).get()
    hanging = hang.slice(hosts=0, gpus=0).forever.call_one()
    victim = counters.slice(hosts=0, gpus=0)
    os.kill(victim.pid.call_one().get(), signal.SIGKILL)
    with pytest.raises(loom.SupervisionError, match=r"Killed\(sig=9\)"):
        hanging.get(timeout=BOUND)
    with pytest.raises(loom.SupervisionError):
        victim.add.call_one(1).get(timeout=BOUND)
    with pytest.raises(loom.SupervisionError):
        counters.add.call(1).get(timeout=BOUND)
    assert counters.slice(hosts=1, gpus=0).add.call_one(1).get(timeout=BOUND) > 1
    event = next(event for event in job.events(timeout=BOUND) if event.name == "failure")
    assert "Killed(sig=9)" in event.details["report"]
    assert not job.closed


def test_a_new_mesh_can_be_spawned_after_a_process_died(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="first")
    counters = procs.spawn("counters", Counter)
    with pytest.raises(loom.LoomError):
        counters.slice(hosts=0).die.call_one().get(timeout=BOUND)
    procs.stop().exception(timeout=BOUND)
    again = job.hosts.spawn_procs(name="second").spawn("counters", Counter, 5)
    assert list(again.add.call(1).get(timeout=BOUND).values()) == [6, 6]


def test_an_actor_cannot_be_spawned_where_a_process_has_died(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs()
    counters = procs.spawn("counters", Counter)
    os.kill(counters.slice(hosts=0).pid.call_one().get(), signal.SIGKILL)
    with pytest.raises(loom.SupervisionError):
        counters.add.call(1).get(timeout=BOUND)
    with pytest.raises(loom.SupervisionError):
        procs.spawn("more", Counter).add.call(1).get(timeout=BOUND)


def test_a_raise_in_a_broadcast_is_an_event_and_not_the_end(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs()
    counters, others = procs.spawn("counters", Counter), procs.spawn("others", Counter)
    counters.fail.broadcast("nobody listens")
    event = next(event for event in job.events(timeout=BOUND) if event.name == "failure")
    assert "nobody listens" in event.details["report"]
    assert list(others.add.call(1).get(timeout=BOUND).values()) == [1, 1]


# -- a worker host ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dead_worker_host_fails_its_calls_and_no_others(own_cluster: LocalCluster) -> None:
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        pids = list(counters.pid.call().get().values())
        # Not waited for: its processes may not have started when the host dies.
        hang = job.hosts.spawn_procs().spawn("hang", Hang)
        hanging = hang.slice(hosts=0).forever.call_one()
        os.kill(own_cluster.pids[1], signal.SIGKILL)
        with pytest.raises(loom.SupervisionError):
            hanging.get(timeout=BOUND)
        with pytest.raises(loom.SupervisionError):
            counters.slice(hosts=0).add.call_one(1).get(timeout=BOUND)
        assert counters.slice(hosts=1).add.call_one(1).get(timeout=BOUND) == 1
        assert [w["reachable"] for w in rest(own_cluster, "/api/v1/status")["workers"]] == [False, True]
        wait_gone(pids[:1])
        assert any(event.name == "host_lost" for event in job.events(timeout=BOUND))
        later = job.hosts.spawn_procs().spawn("later", Counter)
        with pytest.raises(loom.SupervisionError):
            later.add.call(1).get(timeout=BOUND)
        with pytest.raises(loom.WorkerUnreachable, match=own_cluster.workers[0]):
            loom.connect(own_cluster.url, own_cluster.token)
        assert counters.slice(hosts=1).add.call_one(1).get(timeout=BOUND) == 2


# -- a driver -----------------------------------------------------------------------------------------------


def test_a_dead_driver_is_told_to_its_client_and_harms_no_other_session(
    cluster: LocalCluster, job: loom.Job
) -> None:
    survivor = job.hosts.spawn_procs().spawn("survivor", Counter)
    survivor.add.call(1).get()
    doomed = loom.connect(cluster.url, cluster.token)
    procs = doomed.hosts.spawn_procs()
    hang = procs.spawn("hang", Hang)
    pids = list(hang.pid.call().get().values())
    hanging = hang.forever.call()
    os.kill(driver_pid(cluster, doomed), signal.SIGKILL)
    with pytest.raises(loom.SessionLost, match=r"killed by SIGKILL.*loom\.connect") as caught:
        hanging.get(timeout=BOUND)
    assert caught.value.exit_code == -signal.SIGKILL
    with pytest.raises(loom.SessionLost):
        procs.spawn("more", Counter)
    assert [event.name for event in doomed.events(timeout=BOUND)][-1] == "ended"
    doomed.close()
    assert list(survivor.add.call(1).get(timeout=BOUND).values()) == [2, 2]
    assert doomed.session not in [s["name"] for s in rest(cluster, "/api/v1/sessions")["sessions"]]
    wait_gone(pids)
    with pytest.raises(loom.SessionLost, match="killed by SIGKILL") as later:
        loom.connect(cluster.url, cluster.token, session=doomed.session)
    assert later.value.exit_code == -signal.SIGKILL


def test_a_driver_that_exits_says_its_last_words(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)

    def leave() -> None:
        print("these were my last words", flush=True)
        os._exit(7)

    with pytest.raises(loom.SessionLost, match="exited with code 7") as caught:
        job.run(leave)
    assert caught.value.exit_code == 7
    assert "these were my last words" in caught.value.output
    job.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dead_driver_takes_no_host_from_other_sessions_later(cluster: LocalCluster, job: loom.Job) -> None:
    """Monarch's hosts give up on messages to a dead root client after 60 s, and would exit."""
    survivor = job.hosts.spawn_procs().spawn("survivor", Counter)
    doomed = loom.connect(cluster.url, cluster.token)
    hang = doomed.hosts.spawn_procs().spawn("hang", Hang)
    hang.pid.call().get()
    hang.forever.call()
    os.kill(driver_pid(cluster, doomed), signal.SIGKILL)
    until = time.monotonic() + 90
    while time.monotonic() < until:
        survivor.add.call(1).get(timeout=BOUND)
        time.sleep(0.5)
    assert list(job.hosts.spawn_procs().spawn("new", Counter).value.call().get(timeout=BOUND).values()) == [0, 0]


# -- sessions and the gateway -------------------------------------------------------------------------------


def test_closing_a_session_ends_its_processes_and_its_driver(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)
    counters = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter)
    pids = [*counters.pid.call().get().values(), driver_pid(cluster, job)]
    job.close()
    wait_gone(pids)


def test_a_session_ended_over_rest_is_told_to_its_client(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)
    hang = job.hosts.spawn_procs().spawn("hang", Hang)
    pids = list(hang.pid.call().get().values())
    hanging = hang.forever.call()
    assert rest(cluster, f"/api/v1/sessions/{job.session}", "DELETE")["state"] == "ended"
    with pytest.raises(loom.LoomError):
        hanging.get(timeout=BOUND)
    with pytest.raises(loom.SessionClosed):
        job.hosts.spawn_procs()
    wait_gone(pids)


def test_a_session_without_a_client_ends_after_its_linger_time() -> None:
    with LocalCluster(hosts=1, gateway_options=["--session-linger", "0.2"]) as brief:
        job = loom.connect(brief.url, brief.token)
        pids = list(job.hosts.spawn_procs().spawn("counters", Counter).pid.call().get().values())
        job.detach()
        wait_gone(pids)
        with pytest.raises(loom.UnknownSession):
            loom.connect(brief.url, brief.token, session=job.session)


def test_a_dead_gateway_leaves_nothing_behind(own_cluster: LocalCluster) -> None:
    job = loom.connect(own_cluster.url, own_cluster.token, reconnect_timeout=1.0)
    hang = job.hosts.spawn_procs().spawn("hang", Hang)
    pids = [*hang.pid.call().get().values(), driver_pid(own_cluster, job)]
    hanging = hang.forever.call()
    os.kill(own_cluster.pids[0], signal.SIGKILL)
    with pytest.raises(loom.ConnectionLost):
        hanging.get(timeout=BOUND)
    wait_gone(pids)
    job.close()


# -- REST ---------------------------------------------------------------------------------------------------


def test_rest_needs_a_token_for_everything_but_health(cluster: LocalCluster) -> None:
    assert rest(cluster, "/healthz", token="wrong") == {"status": "ok"}
    for path in ("/api/v1/sessions", "/api/v1/status", "/api/v1/openapi.json"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            rest(cluster, path, token="wrong")
        assert caught.value.code == 401
        assert json.load(caught.value)["error"]["code"] == "authentication"


def test_rest_lists_sessions_and_refuses_unknown_ones(cluster: LocalCluster, job: loom.Job) -> None:
    (session,) = [s for s in rest(cluster, "/api/v1/sessions")["sessions"] if s["name"] == job.session]
    assert session["state"] == "open"
    assert session["client_connected"] is True
    assert abs(session["created_at"] - time.time()) < 3600
    with pytest.raises(urllib.error.HTTPError) as caught:
        rest(cluster, "/api/v1/sessions/nobody", "DELETE")
    assert caught.value.code == 404
    assert "/api/v1/sessions/{name}" in rest(cluster, "/api/v1/openapi.json")["paths"]


# -- callbacks ----------------------------------------------------------------------------------------------


def test_failure_callbacks_are_told_and_may_call_the_session(job: loom.Job) -> None:
    told: queue.Queue[Any] = queue.Queue()

    def broken(failure: Any) -> None:
        raise RuntimeError("a callback of the test raises")

    def recover(failure: Any) -> None:
        again = job.hosts.spawn_procs(name="again").spawn("again", Counter, 5)
        told.put((failure.mesh_name, failure.report(), list(again.add.call(1).get(timeout=BOUND).values())))

    job.on_failure(broken)
    job.on_failure(recover)
    counters = job.hosts.spawn_procs().spawn("fragile", Counter)
    counters.slice(hosts=1).fail.broadcast("nobody listens")
    name, report, values = told.get(timeout=BOUND)
    assert "fragile" in name
    assert "nobody listens" in report
    assert values == [6, 6]


@pytest.mark.slow
def test_a_removed_failure_callback_is_not_called(job: loom.Job) -> None:
    told: queue.Queue[Any] = queue.Queue()
    removed: list[Any] = []
    job.on_failure(removed.append)()
    job.on_failure(told.put)
    job.hosts.spawn_procs().spawn("fragile", Counter).fail.broadcast("nobody listens")
    assert "nobody listens" in told.get(timeout=BOUND).report()
    assert not removed


def of_actors(told: queue.Queue[Any], count: int) -> list[tuple[str, int]]:
    """The mesh and rank of the next failures of the user's actors; Monarch has its own in each process, too."""
    found: list[tuple[str, int]] = []
    while len(found) < count:
        failure = told.get(timeout=BOUND)
        if failure.mesh_name.startswith(("setup-", "logger-", "log_level-")):
            continue
        assert failure.report().startswith("The actor <root>.<"), failure.report()
        assert "the process this actor was running on failed" in failure.report()
        found += [(failure.mesh_name, rank) for rank in failure.event.details["ranks"]]
    return found


def test_two_processes_that_die_at_once_are_two_failures(job: loom.Job) -> None:
    told: queue.Queue[Any] = queue.Queue()
    job.on_failure(told.put)
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    pids = list(procs.spawn("fragile", Counter).pid.call().get(timeout=BOUND).values())

    for rank in (1, 2):
        os.kill(pids[rank], signal.SIGKILL)
    both = of_actors(told, 2)
    os.kill(pids[0], signal.SIGKILL)
    later = of_actors(told, 1)

    assert sorted(rank for _, rank in both) == [1, 2]
    assert [rank for _, rank in later] == [0]
    assert len({name for name, _ in (*both, *later)}) == 1


def test_two_processes_without_actors_that_die_at_once_are_two_failures(job: loom.Job) -> None:
    told: queue.Queue[Any] = queue.Queue()
    job.on_failure(told.put)
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="idle")
    counters = procs.spawn("counters", Counter)
    pids = list(counters.pid.call().get(timeout=BOUND).values())
    counters.stop().get(timeout=BOUND)

    for rank in (0, 3):
        os.kill(pids[rank], signal.SIGKILL)
    points = {"{'hosts': 0/2, 'gpus': 0/2}", "{'hosts': 1/2, 'gpus': 1/2}"}
    while points:
        report = told.get(timeout=BOUND).report()
        points = {point for point in points if point not in report}


@pytest.mark.slow
def test_a_lost_host_is_one_failure_and_a_process_that_dies_later_another(own_cluster: LocalCluster) -> None:
    told: queue.Queue[Any] = queue.Queue()
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        job.on_failure(told.put)
        procs = job.hosts.spawn_procs(per_host={"gpus": 2})
        pids = list(procs.spawn("fragile", Counter).pid.call().get(timeout=BOUND).values())

        os.kill(own_cluster.pids[2], signal.SIGKILL)
        names = [told.get(timeout=BOUND).mesh_name]
        while names[-1] != "hosts":
            names.append(told.get(timeout=BOUND).mesh_name)
        os.kill(pids[0], signal.SIGKILL)
        found = of_actors(told, 1)

    assert names == ["hosts"]
    assert [rank for _, rank in found] == [0]
