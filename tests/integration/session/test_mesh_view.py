"""A session's meshes and runs, as whoever may look at the session sees them over REST and with ``loom meshes``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom.errors import DriverUnavailable, LoomError, SessionLost, UnknownSession
from loom.rest_client import Gateway as Rest
from loom.wire.bodies import Describe, Description
from loom.wire.frames import decode_frame
from loom.wire.handshake import error_from_refusal
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame
from loom_gateway.sessions.session import PATIENCE
from loom_proxy.local import LocalCluster
from tests.support.actors import Broken, Counter, Gate, open_gate
from tests.support.gateways import TOKEN, Gateway, await_true, gateway_of
from tests.support.users import House

BOUND = 40.0


@pytest.fixture
def rest(cluster: LocalCluster) -> Rest:
    return Rest(cluster.url, cluster.token)


def named(name: str, ask: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """The one with a name of what is asked for, once it is there: an answer is good for up to a second."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [one for one in ask() if one["name"] == name]
        return bool(found)

    await_true(is_there)
    (only,) = found
    return only


def proc_mesh(rest: Rest, job: loom.Job, name: str) -> dict[str, Any]:
    return named(name, lambda: rest.meshes(job.session)["hosts"]["procs"])


def actor_mesh(rest: Rest, job: loom.Job, procs: str, name: str) -> dict[str, Any]:
    return named(name, lambda: proc_mesh(rest, job, procs)["actors"])


def endpoint(rest: Rest, job: loom.Job, name: str) -> dict[str, Any]:
    return named(name, lambda: actor_mesh(rest, job, "workers", "counters")["endpoints"])


def test_a_session_has_a_tree_of_its_meshes(rest: Rest, job: loom.Job) -> None:
    empty = rest.meshes(job.session)["hosts"]
    assert (empty["id"], empty["extent"], empty["procs"]) == (0, {"hosts": 2}, [])
    assert empty["elements"] == {"counts": {"alive": 2}, "states": ["alive", "alive"], "failures": []}

    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="workers")
    counters = procs.spawn("counters", Counter)
    corner = procs.slice(hosts=1, gpus=0).spawn("corner", Counter)
    counters.value.call().get(BOUND), corner.value.call_one().get(BOUND)

    await_true(lambda: proc_mesh(rest, job, "workers")["elements"]["counts"] == {"alive": 4})
    actor_mesh(rest, job, "workers", "corner")
    workers = proc_mesh(rest, job, "workers")
    assert workers["extent"] == {"hosts": 2, "gpus": 2}
    of_all, of_one = workers["actors"]
    assert (of_all["name"], of_all["class_name"], of_all["extent"]) == ("counters", "Counter", workers["extent"])
    assert (of_one["name"], of_one["elements"]["states"]) == ("corner", ["alive"])


def test_the_calls_of_each_endpoint_are_counted_and_timed(rest: Rest, job: loom.Job, tmp_path: Path) -> None:
    procs = job.hosts.spawn_procs(name="workers")
    counters = procs.spawn("counters", Counter)
    for _ in range(20):
        counters.add.call(1).get(BOUND)
    for _ in range(10):
        counters.slice(hosts=0).add.call_one(1).get(BOUND)
        counters.add.choose(1).get(BOUND)
    assert len([future.get(BOUND) for future in counters.add.stream(1)]) == 2
    for _ in range(3):
        with pytest.raises(loom.ActorError):
            counters.fail.call("bad luck").get(BOUND)
    counters.append.broadcast([])
    counters.value.call().get(BOUND)

    add, fail, append = (endpoint(rest, job, name) for name in ("add", "fail", "append"))

    assert (add["calls"], add["failures"], add["in_flight"]) == (42, 0, 0)
    assert 0.00001 < add["p50"] <= add["p99"] < BOUND
    assert 0 < add["calls_per_second"] <= 42
    assert (fail["calls"], fail["failures"]) == (3, 3)
    assert (append["calls"], append["failures"], append["p50"]) == (1, 0, None)

    gates = procs.spawn("gates", Gate)
    pipes = [str(tmp_path / str(rank)) for rank in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    waiting = gates.wait.call(pipes)
    await_true(lambda: any(one["in_flight"] for one in actor_mesh(rest, job, "workers", "gates")["endpoints"]))
    (wait,) = actor_mesh(rest, job, "workers", "gates")["endpoints"]
    assert (wait["calls"], wait["in_flight"], wait["p99"]) == (1, 1, None)
    for pipe in pipes:
        open_gate(pipe)
    waiting.get(BOUND)
    await_true(lambda: actor_mesh(rest, job, "workers", "gates")["endpoints"][0]["in_flight"] == 0)
    (wait,) = actor_mesh(rest, job, "workers", "gates")["endpoints"]
    assert (wait["calls"], wait["failures"]) == (1, 0)


def test_a_killed_process_and_its_actors_have_failed_with_the_reason(rest: Rest, job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="workers")
    counters = procs.spawn("counters", Counter)
    victim = list(counters.pid.call().get(BOUND).values())[2]

    os.kill(victim, signal.SIGKILL)

    await_true(lambda: proc_mesh(rest, job, "workers")["elements"]["counts"] == {"alive": 3, "failed": 1})
    elements = proc_mesh(rest, job, "workers")["elements"]
    assert elements["states"] == ["alive", "alive", "failed", "alive"]
    assert elements["failures"][0]["rank"] == 2
    assert "gone" in elements["failures"][0]["reason"]
    await_true(lambda: "Killed(sig=9)" in str(actor_mesh(rest, job, "workers", "counters")["elements"]["failures"]))
    assert actor_mesh(rest, job, "workers", "counters")["elements"]["states"][2] == "failed"


@pytest.mark.slow
def test_an_actor_that_cannot_be_made_has_failed_on_a_process_that_lives(rest: Rest, job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="workers")
    broken = procs.spawn("broken", Broken)
    with pytest.raises(LoomError):
        broken.anything.call().get(BOUND)

    await_true(lambda: actor_mesh(rest, job, "workers", "broken")["elements"]["counts"].get("failed"))
    failures = actor_mesh(rest, job, "workers", "broken")["elements"]["failures"]
    assert "cannot be made" in failures[0]["reason"]
    assert proc_mesh(rest, job, "workers")["elements"]["counts"] == {"alive": 2}


def test_a_stopped_mesh_is_stopped_and_its_calls_are_gone(rest: Rest, job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="workers")
    first, second = (procs.spawn(name, Counter) for name in ("first", "second"))
    first.add.call(1).get(BOUND), second.add.call(1).get(BOUND)

    first.stop().get(BOUND)
    await_true(lambda: actor_mesh(rest, job, "workers", "first")["stopped"])
    stopped, living = proc_mesh(rest, job, "workers")["actors"]
    assert (stopped["stopped"], stopped["elements"]["counts"], stopped["endpoints"]) == (True, {"stopped": 2}, [])
    assert (living["stopped"], [one["name"] for one in living["endpoints"]]) == (False, ["add"])

    procs.stop().get(BOUND)
    await_true(lambda: proc_mesh(rest, job, "workers")["stopped"])
    workers = proc_mesh(rest, job, "workers")
    assert (workers["stopped"], workers["elements"]["states"]) == (True, ["stopped"] * 2)
    assert {one["stopped"] for one in workers["actors"]} == {True}


# -- runs ----------------------------------------------------------------------------------------------------


def wait_for(path: str, name: str) -> str:
    """A function that prints until a file is there."""
    print(f"{name} has begun")
    print(f"{name} complains", file=sys.stderr)
    until = time.monotonic() + BOUND
    while not os.path.exists(path):
        assert time.monotonic() < until
        time.sleep(0.01)
    print(f"{name} is over")
    return name


def fail() -> None:
    raise ValueError("no luck")


def states(rest: Rest, job: loom.Job) -> dict[str, str]:
    return {one["name"]: one["state"] for one in rest.runs(job.session)}


@pytest.mark.guarantees(
    "page actions", "What functions of `job.run` print is followed apart, and marked in the log"
)
def test_the_runs_of_a_session_have_states_and_output_of_their_own(
    rest: Rest, job: loom.Job, tmp_path: Path
) -> None:
    assert job.run(len, "forgotten when it is answered") > 0
    await_true(lambda: rest.runs(job.session) == [])
    ends = [str(tmp_path / name) for name in ("first", "second")]
    first, second = (
        job.run(wait_for, end, name, name=name, detach=True)
        for end, name in zip(ends, ("first", "second"), strict=True)
    )
    with pytest.raises(ValueError, match="no luck"):
        job.run(fail, name="fail", detach=True).result(BOUND)

    await_true(lambda: states(rest, job) == {"first": "running", "second": "running", "fail": "failed"})
    lines = rest.logs(job.session, True, run=first.id)
    followed = [next(lines)["text"] for _ in range(2)]
    Path(ends[1]).touch()
    assert second.result(BOUND) == "second"
    Path(ends[0]).touch()
    followed.append(next(lines)["text"])
    assert first.result(BOUND) == "first"

    assert followed == ["first has begun", "first complains", "first is over"]
    await_true(lambda: states(rest, job) == {"first": "done", "second": "done", "fail": "failed"})
    run = named("second", lambda: rest.runs(job.session))
    assert run["started"] <= run["finished"] <= time.time()
    marked = [(line["run_name"], line["stream"]) for line in rest.logs(job.session, False, run=second.id)]
    assert marked == [("second", "stdout"), ("second", "stderr"), ("second", "stdout")]


def print_pieces(turn: str, other: str) -> None:
    """Print one line in two pieces, around a piece of another run's."""
    print("one and ", end="")
    Path(turn).touch()
    until = time.monotonic() + BOUND
    while not os.path.exists(other):
        assert time.monotonic() < until
        time.sleep(0.01)
    print("the rest")


def test_lines_of_two_runs_that_print_in_turns_stay_whole(rest: Rest, job: loom.Job, tmp_path: Path) -> None:
    turns = [str(tmp_path / name) for name in ("first", "second")]
    runs = [
        job.run(print_pieces, turn, other, name=name, detach=True)
        for turn, other, name in ((*turns, "first"), (*turns[::-1], "second"))
    ]
    for run in runs:
        run.result(BOUND)
    texts = [line["text"] for line in rest.logs(job.session, False, mesh="driver")]
    assert texts == ["one and the rest"] * 2


def test_a_filter_for_a_run_of_another_mesh_makes_no_sense(rest: Rest, job: loom.Job) -> None:
    with pytest.raises(loom.WrongArguments, match="run=1 is about the mesh 'driver'"):
        list(rest.logs(job.session, False, run=1, mesh="workers"))


# -- who may look, and what a driver that does not answer looks like ------------------------------------------


@pytest.mark.guarantees(
    "page actions",
    "The meshes of a session are on the page with their states and calls, for whom the session is shared "
    "with, and for nobody else",
)
def test_others_see_a_sessions_meshes_only_when_it_is_shared(cluster: LocalCluster, tmp_path: Path) -> None:
    house = House(cluster.workers, tmp_path)
    try:
        with house.connect("ann") as job:
            job.hosts.spawn_procs(name="workers").spawn("counters", Counter).value.call().get(BOUND)
            asks: list[Callable[[str], object]] = [
                lambda user: house.rest(user).meshes(job.session),
                lambda user: house.rest(user).runs(job.session),
            ]
            for ask in asks:
                for user in ("ann", "root"):
                    ask(user)
                with pytest.raises(UnknownSession):
                    ask("bob")
            job.share("bob", "view")
            assert house.rest("bob").meshes(job.session)["hosts"]["procs"][0]["name"] == "workers"
            assert house.rest("bob").runs(job.session) == []
            job.unshare("bob")
            for ask in asks:
                with pytest.raises(UnknownSession):
                    ask("bob")
    finally:
        house.gateway.close()


@pytest.fixture
def gateway(cluster: LocalCluster) -> Iterator[Gateway]:
    """A gateway that a test may break."""
    with gateway_of(cluster) as running:
        yield running


def fails(ask: Callable[[], object], error: type[LoomError]) -> bool:
    """Whether a question fails so. An answer is good for up to a second."""
    try:
        ask()
    except error:
        return True
    return False


@pytest.mark.guarantees(
    "page actions",
    "A driver that is busy, starting or dead costs whoever looks at its meshes seconds, and no connection more",
)
@pytest.mark.slow
def test_a_driver_that_is_stopped_is_busy_until_it_goes_on(gateway: Gateway) -> None:
    rest = Rest(gateway.url, TOKEN)
    with gateway.connect() as job:
        driver = psutil.Process(gateway.session(job.session)["pid"])
        rest.meshes(job.session)
        descriptors = driver.num_fds()
        driver.suspend()
        try:
            await_true(lambda: fails(lambda: rest.meshes(job.session), DriverUnavailable))
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(DriverUnavailable, match="it is busy"):
                    rest.meshes(job.session)
                assert time.monotonic() - began < PATIENCE + 5.0
        finally:
            driver.resume()
        await_true(lambda: not fails(lambda: rest.meshes(job.session), DriverUnavailable))
        assert driver.num_fds() == descriptors


def test_a_dead_driver_has_no_meshes(gateway: Gateway) -> None:
    rest = Rest(gateway.url, TOKEN)
    name = gateway.connect().session
    rest.meshes(name)
    psutil.Process(gateway.session(name)["pid"]).kill()
    gateway.ended(name)
    with pytest.raises(SessionLost, match="is lost"):
        rest.meshes(name)


def test_the_next_gateway_sees_the_meshes_too(gateway: Gateway) -> None:
    with gateway.connect() as job:
        job.hosts.spawn_procs(name="workers").spawn("counters", Counter).value.call().get(BOUND)
        rest = Rest(gateway.url, TOKEN)
        rest.meshes(job.session)
        gateway.end()
        gateway.start()
        assert endpoint(rest, job, "value")["calls"] == 1


def asked(path: str, *subjects: str) -> list[Message]:
    """What a driver answers on a connection that is not a client's."""
    found = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(BOUND)
        sock.connect(path)
        for subject in subjects:
            sock.sendall(behind_length(unnumbered_frame(Describe(subject).message())))
            (length,) = LENGTH.unpack(sock.recv(LENGTH.size, socket.MSG_WAITALL))
            (message,) = decode_frame(sock.recv(length, socket.MSG_WAITALL)).messages
            found.append(message)
    return found


def test_a_driver_without_a_session_says_that_it_is_starting(gateway: Gateway) -> None:
    await_true(lambda: gateway.rest("/status")["spare_ready"])
    (spare,) = gateway.sockets()
    for message in asked(str(gateway.state / spare), "meshes", "runs"):
        error = error_from_refusal(message)
        assert (type(error), str(error)) == (DriverUnavailable, "the session is starting")


def test_a_driver_says_what_it_can_describe_and_goes_on(gateway: Gateway) -> None:
    with gateway.connect() as job:
        wrong, right = asked(gateway.socket(job.session), "secrets", "meshes")
        refusal = str(error_from_refusal(wrong))
        assert "this driver describes life and meshes and runs and tensors, not 'secrets'" in refusal
        assert (right.kind, right.body) == (Kind.DESCRIPTION, tuple(Description().to_body()))
        assert json.loads(bytes(right.parts[0]))["left_out"] == 0


# -- the command line ----------------------------------------------------------------------------------------


def test_loom_meshes_shows_the_tree_and_the_calls(cluster: LocalCluster, job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(name="workers")
    procs.spawn("counters", Counter).add.call(1).get(BOUND)
    environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, "COLUMNS": "200"}
    command = [sys.executable, "-c", "from loom.cli import main; main()", "meshes", "--session", job.session]

    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=BOUND, check=True
    ).stdout
    told = subprocess.run(
        [*command, "--json"], env=environment, capture_output=True, text=True, timeout=BOUND, check=True
    ).stdout

    (counters,) = [line for line in shown.splitlines() if "counters" in line and "actors" in line]
    assert "hosts 2" in counters
    (add,) = [line for line in shown.splitlines() if " add " in line]
    assert " ms " in add
    assert json.loads(told)["hosts"]["procs"][0]["name"] == "workers"
