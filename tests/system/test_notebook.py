"""Loom in a real Jupyter kernel: waiting both ways, interrupts, redefined classes, a lost kernel, the example."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import loom
from loom.remote_traceback import HIDDEN
from loom_proxy.local import LocalCluster
from tests.support.kernels import BOUND, Kernel, Output, Pipe, waits
from tests.support.paths import EXAMPLES
from tests.support.users import House

EXAMPLE = EXAMPLES / "notebook.ipynb"

SETUP = """
import asyncio, os, signal
import loom
from loom import Actor, current_rank, endpoint

class Counter(Actor):
    def __init__(self):
        self.n = 0
    @endpoint
    def add(self, k):
        self.n += k
        return self.n
    @endpoint
    def length(self, data):
        return len(data)
    @endpoint
    def pid(self):
        return os.getpid()

def read(pipe):
    with open(pipe, "rb", 0) as gate:
        gate.read(1)

class Gate(Actor):
    @endpoint
    def wait(self, pipe):
        read(pipe)
        return "open"

job = loom.connect()
procs = job.hosts.spawn_procs(name="procs")
counters = procs.spawn("counters", Counter)
one = counters.slice(hosts=0)
gates = job.hosts.spawn_procs(name="gate_procs").spawn("gates", Gate)
counters.add.call(0).get(); gates.initialized.get();
"""


@pytest.fixture
def environment(cluster: LocalCluster) -> dict[str, str]:
    """How a kernel finds the cluster."""
    return {"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[Kernel]:
    """A kernel with a session, for all tests that leave both usable."""
    kernel = Kernel({"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token})
    try:
        kernel.check(SETUP)
        yield kernel
        kernel.check("job.close()")
    finally:
        kernel.close()


@pytest.fixture
def kernel(shared: Kernel) -> Iterator[Kernel]:
    """The shared kernel, which has to work after each test as it did before."""
    yield shared
    shared.check("assert len(counters.add.call(1).get(timeout=30)) == 2")


@pytest.fixture(scope="module")
def pipes(shared: Kernel) -> Iterator[list[Pipe]]:
    """All pipes, kept open: an interrupted call may read from one when its test is over already."""
    opened: list[Pipe] = []
    yield opened
    for pipe in opened:
        os.close(pipe.descriptor)


@pytest.fixture
def pipe(tmp_path: Path, pipes: list[Pipe]) -> Pipe:
    pipes.append(Pipe(tmp_path / "pipe"))
    return pipes[-1]


# -- waiting ------------------------------------------------------------------------------------------------


def test_get_and_await_both_work_in_a_cell(kernel: Kernel) -> None:
    output = kernel.check(
        """
        print(one.length.call_one(b"abc").get())
        print(await one.length.call_one(b"abcd"))
        print(await asyncio.gather(*[one.length.call_one(bytes(n)).as_asyncio() for n in range(3)]))
        """
    )
    assert output.stdout == "3\n4\n[0, 1, 2]\n"


def test_a_mesh_a_value_mesh_and_a_future_are_shown_as_html(kernel: Kernel, pipe: Pipe) -> None:
    assert "2 actors: 2 alive" in kernel.check("counters").value["text/html"]
    assert "ValueMesh" in kernel.check("counters.length.call(b'').get()").value["text/html"]
    assert "pending" in kernel.check(f"gates.wait.call({pipe.path!r})").value["text/html"]
    pipe.open()
    assert "2 hosts: 2 alive" in kernel.check("job").value["text/html"]
    assert "Counter.add(k)" in kernel.check("counters.add").value["text/html"]


def test_a_failure_in_the_cluster_shows_the_cells_lines_and_not_loom_s(kernel: Kernel) -> None:
    kernel.check(
        """
        def look(values):
            return values["missing"]

        class Failing(Actor):
            @endpoint
            def boom(self):
                if current_rank().rank == 1:
                    return look({})

        trainers = job.hosts.spawn_procs({"gpus": 2}, name="failing").spawn("trainers", Failing)
        """
    )
    output = kernel.run("trainers.boom.call().get()")
    lines = output.traceback.splitlines()
    assert lines[0] == "rank 1 (hosts=0, gpus=1) of trainers.boom: KeyError: 'missing'"
    assert re.findall(r"Cell .*, in (\S+)", output.traceback) == ["boom", "look", "<module>"]
    assert [line.split()[0] for line in lines if 'return values["missing"]' in line] == ["---->"]
    assert "loom_" not in output.traceback
    assert lines[-1] == HIDDEN

    shown = kernel.run("loom.show_internal_frames(); trainers.boom.call().get()").traceback
    assert "loom_proxy/futures/future.py" in shown
    assert "monarch/_src/actor" in shown
    assert HIDDEN not in shown
    kernel.check("loom.show_internal_frames(False)")

    ran = kernel.run("job.run(look, {})")
    assert ran.error == "KeyError"
    assert ran.traceback.startswith("KeyError: 'missing'\n\nIn the cluster:\n  Cell ")
    kernel.check("trainers.slice(hosts=0, gpus=0).stop() if hasattr(trainers, 'stop') else None")


def test_completion_offers_endpoints(kernel: Kernel) -> None:
    reply = kernel.client.complete("counters.ad", reply=True, timeout=BOUND)
    assert any(match.endswith("add") for match in reply["content"]["matches"])


# -- interrupts ---------------------------------------------------------------------------------------------

WAITS = {
    "get": "future.get()",
    "result": "future.result()",
    "exception": "future.exception()",
    "await": "await future",
    "gather": "await asyncio.gather(future.as_asyncio(), asyncio.sleep(3600))",
    "stream": "[each.get() for each in gates.wait.stream(pipe)]",
    "run": "job.run(read, pipe)",
    "initialized": "slow = job.hosts.spawn_procs(bootstrap=lambda: read(pipe)); slow.initialized.get()",
    "events": "list(job.events())",
    "local": "another = loom.local(hosts=1); print('it was faster'); raise KeyboardInterrupt",
}


@pytest.mark.parametrize("how", WAITS)
def test_an_interrupt_ends_the_wait_and_nothing_else(kernel: Kernel, pipe: Pipe, how: str) -> None:
    kernel.check(f"pipe = {pipe.path!r}; gate = gates.slice(hosts=0); future = gate.wait.call_one(pipe)")
    for _ in range(3):
        output = kernel.run(f"print('waiting', flush=True); {WAITS[how]}", until=waits)
        assert output.error in ("KeyboardInterrupt", "CancelledError"), output
        kernel.check("try: future.get(timeout=0)\nexcept loom.WaitTimeout: pass")
        kernel.check("counters.add.call(1).get(timeout=30)")
    pipe.open()
    assert kernel.check("print(future.get(timeout=30))").stdout == "open\n"


def test_interrupts_in_the_middle_of_many_calls_lose_none(kernel: Kernel) -> None:
    """Most of these interrupts come while something is being sent. Fewer wait than a gateway takes of a user."""
    kernel.check("sent = 0; start = one.add.call_one(0).get()")
    for _ in range(10):
        output = kernel.run(
            """
            print('waiting', flush=True)
            while True:
                last = one.add.call_one(1)
                sent += 1
                if sent % 5000 == 0:
                    last.get()
            """,
            until=waits,
        )
        assert output.error == "KeyboardInterrupt", output
    # A call between whose sending and counting the interrupt came is one more.
    output = kernel.check("print(one.add.call_one(0).get(timeout=30) - start - sent)")
    assert 0 <= int(output.stdout) <= 10


def test_an_interrupt_while_a_large_argument_is_sent_leaves_the_session_usable(kernel: Kernel) -> None:
    output = kernel.run(
        """
        data = bytes(160 << 20)
        print('waiting', flush=True)
        large = one.length.call_one(data)
        large.get()
        raise KeyboardInterrupt  # it was faster than the interrupt
        """,
        until=waits,
    )
    assert output.error == "KeyboardInterrupt", output
    assert kernel.check("print(one.length.call_one(b'abc').get(timeout=60))").stdout == "3\n"


# -- progress -----------------------------------------------------------------------------------------------


def texts(output: Output) -> list[str]:
    return [re.sub("<[^>]*>", "", shown.get("text/html", "")) for shown in output.shown]


@pytest.mark.parametrize("wait", ["future.get(timeout=60)", pytest.param("await future", marks=pytest.mark.slow)])
def test_a_long_wait_says_what_it_waits_for(kernel: Kernel, pipe: Pipe, wait: str) -> None:
    kernel.check(f"future = gates.slice(hosts=0).wait.call_one({pipe.path!r})")
    output = kernel.run(wait, until=lambda output: any("waiting for gates.wait" in text for text in texts(output)))
    assert output.error in ("KeyboardInterrupt", "CancelledError"), output
    assert output.stderr == ""
    assert texts(output)[-1] == ""  # it is taken away
    pipe.open()
    kernel.check("future.get(timeout=30)")


@pytest.mark.slow
def test_a_long_spawn_says_how_far_it_is(kernel: Kernel, pipe: Pipe) -> None:
    output = kernel.run(
        f"""
        def wait_at_the_gate():
            if loom.current_rank().rank == 1:
                read({pipe.path!r})
        slow = job.hosts.spawn_procs(name="slow", bootstrap=wait_at_the_gate)
        slow.initialized.get()
        """,
        until=lambda output: any("starting slow" in text for text in texts(output)),
    )
    assert output.error == "KeyboardInterrupt", output
    pipe.open()
    kernel.check("slow.initialized.get(timeout=30); slow.stop().get(timeout=30)")


def test_progress_can_be_turned_off(kernel: Kernel, pipe: Pipe) -> None:
    output = kernel.check(
        f"""
        job.progress = False
        future = gates.slice(hosts=0).wait.call_one({pipe.path!r})
        try:
            future.get(timeout=1.5)
        except loom.WaitTimeout:
            pass
        job.progress = None
        """
    )
    pipe.open()
    kernel.check("future.get(timeout=30)")
    assert output.shown == []


# -- states, from what the driver tells --------------------------------------------------------------------


def summary(mesh: Any) -> str:
    found = re.search(r"<div>([^<>]*: [^<>]*)</div>", mesh._repr_html_())
    assert found is not None
    return found[1]


def event(job: loom.Job, name: str) -> Any:
    return next(event for event in job.events(timeout=BOUND) if event.name == name)


class Quitter(loom.Actor):
    @loom.endpoint
    def ready(self) -> None: ...

    @loom.endpoint
    def quit(self) -> None:
        os._exit(3)

    @loom.endpoint
    def fail(self) -> None:
        raise ValueError("it fails")


def test_a_mesh_comes_alive_as_it_answers(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    quitters = procs.spawn("quitters", Quitter)
    assert summary(quitters) == "4 actors: 4 starting"
    quitters.slice(hosts=0).ready.call().get(timeout=BOUND)
    assert summary(quitters) == "4 actors: 2 starting, 2 alive"
    procs.initialized.get(timeout=BOUND)
    assert summary(procs) == "4 processes: 4 alive"


def test_a_process_that_ends_by_itself_is_shown_in_its_proc_mesh_and_its_actor_meshes(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="mortals")
    part = procs.slice(hosts=1)
    quitters = part.spawn("quitters", Quitter)
    quitters.ready.call().get(timeout=BOUND)
    quitters.slice(gpus=1).quit.broadcast()
    lost = event(job, "process_lost")
    assert (lost.details["mesh"], lost.details["rank"]) == ("mortals", 3)
    assert summary(quitters) == "2 actors: 1 alive, 1 failed"
    assert summary(procs.slice(hosts=1, gpus=1)) == "1 process: 1 failed"


@pytest.mark.slow
def test_an_actor_that_dies_without_its_process_is_shown(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    quitters, others = procs.spawn("quitters", Quitter), procs.spawn("others", Quitter)
    quitters.ready.call().get(timeout=BOUND)
    others.ready.call().get(timeout=BOUND)
    quitters.slice(hosts=0, gpus=1).fail.broadcast()
    event(job, "failure")
    assert summary(quitters) == "4 actors: 3 alive, 1 failed"
    assert summary(others) == "4 actors: 4 alive"


def test_stopped_processes_are_not_told_as_lost(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="stopped")
    quitters = procs.spawn("quitters", Quitter)
    quitters.ready.call().get(timeout=BOUND)
    procs.stop().get(timeout=BOUND)
    assert summary(procs) == "4 processes: 4 stopped"
    assert summary(quitters) == "4 actors: 4 stopped"
    other = job.hosts.spawn_procs(name="other").spawn("quitters", Quitter)
    other.slice(hosts=0).quit.broadcast()
    assert event(job, "process_lost").details["mesh"] == "other"  # and none before it


def test_stopping_the_hosts_stops_all_meshes(job: loom.Job) -> None:
    procs = job.hosts.spawn_procs(per_host={"gpus": 2})
    procs.initialized.get(timeout=BOUND)
    job.hosts.stop().get(timeout=BOUND)
    other = job.hosts.spawn_procs(name="other").spawn("quitters", Quitter)
    other.slice(hosts=0).quit.broadcast()
    assert event(job, "process_lost").details["mesh"] == "other"  # and none before it
    until = time.monotonic() + BOUND
    while summary(procs) != "4 processes: 4 stopped" and time.monotonic() < until:
        time.sleep(0.05)  # the driver tells of them, but not as an event that can be waited for
    assert summary(procs) == "4 processes: 4 stopped"


@pytest.mark.slow
def test_a_lost_host_is_shown(own_cluster: LocalCluster) -> None:
    with loom.connect(own_cluster.url, own_cluster.token) as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": 2})
        procs.initialized.get(timeout=BOUND)
        os.kill(own_cluster.pids[2], signal.SIGKILL)
        event(job, "host_lost")
        assert summary(job.hosts) == "2 hosts: 1 alive, 1 failed"
        assert summary(procs) == "4 processes: 2 alive, 2 failed"


# -- code ---------------------------------------------------------------------------------------------------


def test_a_class_that_a_cell_defines_again_is_the_one_that_is_spawned_from_then_on(kernel: Kernel) -> None:
    cell = """
        class Greeter(Actor):
            @endpoint
            def greet(self):
                return helper({greeting!r})
        def helper(text):
            return text + {mark!r}
        {name} = procs.spawn({name!r}, Greeter)
        print({name}.slice(hosts=0).greet.call_one().get())
        """
    assert kernel.check(cell.format(name="first", greeting="hello", mark="!")).stdout == "hello!\n"
    assert kernel.check(cell.format(name="second", greeting="good day", mark="?")).stdout == "good day?\n"
    assert kernel.check("print(first.slice(hosts=0).greet.call_one().get())").stdout == "hello!\n"


# -- the end of a kernel ------------------------------------------------------------------------------------


def test_a_session_outlives_its_kernel_and_is_found_again(environment: dict[str, str]) -> None:
    first = Kernel(environment)
    try:
        first.check(SETUP)
        first.check("counters.add.call(41).get()")
        session = first.check("print(job.session)").stdout.strip()
        victim = int(first.check("print(counters.slice(hosts=1).pid.call_one().get())").stdout)
    finally:
        first.close()  # with SIGKILL: it cannot say goodbye
    os.kill(victim, signal.SIGKILL)
    second = Kernel(environment)
    try:
        output = second.check(
            f"""
            import loom
            job = loom.connect(session={session!r})
            counters = job.meshes["counters"]
            print(counters.slice(hosts=0).add.call_one(1).get(timeout=30))
            next(event for event in job.events(timeout=30) if event.name == "process_lost")
            counters
            """
        )
        assert output.stdout == "42\n"
        assert "2 actors: 1 alive, 1 failed" in output.value["text/html"]
        second.check("job.close()")
    finally:
        second.close()


@pytest.mark.slow
def test_two_users_share_a_session_from_their_kernels(cluster: LocalCluster, tmp_path: Path) -> None:
    house = House(list(cluster.workers), tmp_path)
    of_ann, of_bob = ({"LOOM_URL": house.url, "LOOM_TOKEN": house.tokens[user]} for user in ("ann", "bob"))
    kernels = [Kernel(of_ann), Kernel(of_bob)]
    try:
        ann, bob = kernels
        ann.check(SETUP)
        ann.check("counters.add.call(40).get()")
        session = ann.check("print(job.session)").stdout.strip()
        attach = f"import loom; job = loom.connect(session={session!r}, take_over=True)"
        assert bob.run(attach).error == "UnknownSession"

        ann.check("job.share('bob', 'drive')")
        bob.check(attach)
        assert ann.run("one.add.call_one(1).get(timeout=30)").error == "SessionTakenOver"
        assert bob.check("print(await job.meshes['counters'].slice(hosts=0).add.call_one(1))").stdout == "41\n"
        bob.check("job.close()")  # a guest's close leaves it running

        ann.close()
        kernels[0] = ann = Kernel(of_ann)
        ann.check(attach)
        assert ann.check("print(job.meshes['counters'].slice(hosts=0).add.call_one(1).get())").stdout == "42\n"
        ann.check("job.unshare('bob')")
        assert bob.run(attach).error == "UnknownSession"
        ann.check("job.close()")
    finally:
        for kernel in kernels:
            kernel.close()
        house.gateway.close()


# -- the example --------------------------------------------------------------------------------------------


def test_the_example_notebook_runs_and_has_no_outputs_in_it(tmp_path: Path) -> None:
    notebook: Any = nbformat.read(EXAMPLE, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)

    NotebookClient(notebook, timeout=BOUND, resources={"metadata": {"path": str(tmp_path)}}).execute()

    shown = "".join(output.get("data", {}).get("text/html", "") for cell in cells for output in cell.outputs)
    assert "4 actors: 4 alive" in shown
    assert "1 failed" in shown
    assert "ValueMesh" in shown
    assert shown.count('<div style="background:#1a7f37;height') == 20


def test_the_tests_cluster_is_left_as_it_was(job: loom.Job) -> None:
    assert job.hosts.spawn_procs().initialized.get(timeout=30)
