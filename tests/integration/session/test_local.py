"""`loom.local`: a cluster of child processes that is there when it returns and gone when its parent is."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import loom
from loom_proxy import local as local_module
from loom_proxy.local import LocalCluster
from tests.support.processes import read_json, start, still_there, tree

PROGRAM = """
import json, os, subprocess, sys
import loom

class Parent(loom.Actor):
    @loom.endpoint
    def pids(self):
        return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]

def main(job):
    parents = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("parents", Parent)
    pids = [pid for pair in parents.pids.call().get().values() for pid in pair]
    print(json.dumps(pids), flush=True)
    sys.stdin.readline()

"""

LEAVING_OPEN = PROGRAM + "main(loom.local(hosts=2))"
RAISING = PROGRAM + "with loom.local(hosts=2) as job:\n    main(job)\n    raise SystemExit(3)"
FORKING = PROGRAM + ("job = loom.local(hosts=2)\nif os.fork() == 0:\n    import time; time.sleep(600)\nmain(job)")


class Environment(loom.Actor):
    """Tells what the process that it lives in was given."""

    @loom.endpoint
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """Checks that the test has ended every process that it started."""
    before = set(psutil.Process().children())
    yield
    assert still_there(set(psutil.Process().children()) - before, timeout=0) == []


def close_standard_input(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()


def send(number: signal.Signals) -> Callable[[subprocess.Popen[str]], None]:
    return lambda process: process.send_signal(number)


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    """Interrupt a program, again if that shows no effect: it may hit a destructor, in which Python drops it."""
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


@pytest.mark.parametrize(
    ("program", "end"),
    [
        pytest.param(
            LEAVING_OPEN, close_standard_input, id="returns without closing the job", marks=pytest.mark.slow
        ),
        pytest.param(RAISING, close_standard_input, id="raises", marks=pytest.mark.slow),
        pytest.param(LEAVING_OPEN, press_ctrl_c, id="Ctrl-C"),
        pytest.param(LEAVING_OPEN, send(signal.SIGTERM), id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(LEAVING_OPEN, send(signal.SIGKILL), id="SIGKILL"),
    ],
)
def test_nothing_is_left_when_the_parent(program: str, end: Callable[[subprocess.Popen[str]], None]) -> None:
    parent = start("-c", program)
    pids = read_json(parent)
    everything = {*tree(parent.pid), *map(psutil.Process, pids)}
    assert len(everything) >= 1 + 1 + 2 + 1 + len(pids)  # parent, gateway, workers, driver, procs and theirs

    end(parent)

    assert still_there(everything) == []
    parent.wait()


@pytest.mark.slow
def test_a_forked_copy_of_the_parent_does_not_keep_the_cluster_alive() -> None:
    parent = start("-c", FORKING)
    read_json(parent)
    copies = [child for child in psutil.Process(parent.pid).children() if os.getsid(child.pid) == parent.pid]
    cluster = [process for process in tree(parent.pid) if process not in copies]

    parent.kill()
    parent.wait()

    assert still_there(cluster) == []
    assert [copy.is_running() for copy in copies] == [True]
    copies[0].kill()


@pytest.fixture
def earlier_children() -> set[int]:
    """What runs already, such as the cluster that other tests share."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture
def job(earlier_children: set[int]) -> Iterator[loom.Job]:
    with loom.local(hosts=2, env={"LOOM_TEST_COLOUR": "blue"}, token="a secret") as job:
        yield job


def test_a_job_on_a_local_cluster_runs_and_ends_with_it(earlier_children: set[int], job: loom.Job) -> None:
    actors = job.hosts.spawn_procs().spawn("environment", Environment)

    assert list(actors.variable.call("LOOM_TEST_COLOUR").get().values()) == ["blue", "blue"]
    assert list(actors.variable.call("LOOM_TOKEN").get().values()) == [None, None]
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in earlier_children]

    job.close()

    assert still_there(children, timeout=0) == []


def test_a_cluster_says_where_it_is() -> None:
    with LocalCluster(2, token="a secret") as cluster:
        assert cluster.url.startswith("ws://127.0.0.1:")
        assert cluster.token == "a secret"
        assert len(set(cluster.workers)) == 2
        assert [psutil.Process(pid).ppid() for pid in cluster.pids] == [os.getpid()] * 3


def test_the_token_is_on_no_command_line() -> None:
    with LocalCluster(1, token="do-not-show"):
        children = psutil.Process().children(recursive=True)
        lines = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, or is a zombie
                lines.append(" ".join(child.cmdline()))
        assert len(lines) >= 2
        assert not [line for line in lines if "do-not-show" in line]


@pytest.mark.usefixtures("no_child_left")
def test_a_taken_gateway_port_is_an_error_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(loom.PortInUse, match=str(port)):
            LocalCluster(1, port=port).start()


def test_a_worker_port_that_was_taken_meanwhile_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = local_module.free_ports
    with socket.create_server(("127.0.0.1", 0)) as taken:
        choices = iter([[taken.getsockname()[1]], choose(1)])
        monkeypatch.setattr(local_module, "free_ports", lambda count: next(choices))

        with LocalCluster(1) as cluster:
            assert len(cluster.pids) == 2
            assert str(taken.getsockname()[1]) not in cluster.workers[0]


@pytest.mark.usefixtures("no_child_left")
def test_worker_ports_that_are_taken_each_time_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(local_module, "free_ports", lambda count: [port])

        with pytest.raises(loom.PortInUse, match=f"the worker at tcp://127.0.0.1:{port}"):
            LocalCluster(1).start()


@pytest.mark.usefixtures("no_child_left")
def test_a_child_that_cannot_start_is_an_error_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "monarch").mkdir()
    (tmp_path / "monarch" / "__init__.py").write_text("raise RuntimeError('this Monarch is broken')")

    with pytest.raises(loom.LoomError, match="this Monarch is broken"):
        LocalCluster(1, env={"PYTHONPATH": str(tmp_path)}).start()


@pytest.mark.usefixtures("no_child_left")
def test_children_that_are_late_are_an_error_and_ended() -> None:
    with pytest.raises(loom.LoomError, match=r"the gateway and the worker at .* not ready within 0.01 s"):
        LocalCluster(1, timeout=0.01).start()


@pytest.mark.usefixtures("no_child_left")
def test_a_missing_extra_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)

    with pytest.raises(loom.MissingDependency, match=r"uvicorn.*pip install 'monarch-loom\[gateway\]'"):
        loom.local()


def test_waiting_for_a_cluster_ends_when_a_child_does() -> None:
    with LocalCluster(1) as cluster:
        os.kill(cluster.pids[1], signal.SIGKILL)

        with pytest.raises(loom.LoomError, match=r"the worker at tcp://.* ended \(exit code -9\)"):
            cluster.wait()


def test_a_cluster_without_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one host"):
        loom.local(hosts=0)
