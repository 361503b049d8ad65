"""`job.run`: functions in the driver, beside the meshes, which go on while the laptop is away."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.runs import Run, Runs
from loom_proxy.local import LocalCluster
from loom_proxy.runs import KnownRuns, RunHandle
from tests.integration.calls.test_failures import driver_pid
from tests.support.actors import Counter
from tests.support.gateways import await_true

IN_TIME = 30.0
"""Seconds that no wait may take."""


class Odd(Exception):
    """What only this program knows."""

    def __init__(self, number: int, text: str = "odd") -> None:
        super().__init__(number, text)
        self.number = number


class Unbuildable(Exception):
    """Cannot be unpickled: its arguments do not fit its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def wait_for(path: str) -> str:
    """A function that goes on until a file is there."""
    print("waiting", flush=True)
    deadline = time.monotonic() + IN_TIME
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    print("there")
    return path


def go_on_for_ever() -> None:
    print("begun")
    while True:
        time.sleep(0.01)


async def wait_for_ever() -> None:
    print("begun")
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up")


def until_it_prints(run: RunHandle, text: str) -> None:
    seen = ""
    for piece in run.follow():
        seen += piece
        if text in seen:
            return
    raise AssertionError(f"{text!r} is not in {seen!r}")


# -- results and failures -----------------------------------------------------------------------------------


def test_a_function_and_a_coroutine_function_give_their_result(job: loom.Job) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert job.run(lambda a, b=0: a + b, 2, b=3) == 5
    assert job.run(double, 4) == 8
    assert job.runs() == {}


def test_meshes_are_the_real_ones(job: loom.Job) -> None:
    counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)

    def total(mesh: Any) -> int:
        return sum(value for _, value in mesh.add.call(1).get().items())

    assert job.run(total, counters, detach=True).result(IN_TIME) == 22


@pytest.mark.parametrize("detach", [False, True])
def test_what_a_function_raises_is_raised_as_its_own_class(job: loom.Job, detach: bool) -> None:
    def fail() -> None:
        raise Odd(7)

    with pytest.raises(Odd) as caught:
        job.run(fail, detach=True).result(IN_TIME) if detach else job.run(fail)

    assert caught.value.number == 7
    assert "in fail" in str(caught.value.__cause__)
    last = str(caught.value.__cause__).rstrip().splitlines()[-1]
    assert last == f"{Odd.__module__}.Odd: (7, 'odd')"


def test_what_cannot_be_rebuilt_here_is_an_operation_failed(job: loom.Job) -> None:
    def fail() -> None:
        raise Unbuildable(1, 2)

    with pytest.raises(loom.OperationFailed, match="Unbuildable: 1 and 2") as caught:
        job.run(fail)

    assert "in fail" in str(caught.value.__cause__)


def test_what_an_actor_raises_in_a_run_is_an_actor_error(job: loom.Job) -> None:
    counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)

    def call(mesh: Any) -> None:
        mesh.add.call("not a number").get()

    with pytest.raises(loom.ActorError) as caught:
        job.run(call, counters)

    assert isinstance(caught.value.exception, TypeError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_programs_ends_only_the_run(job: loom.Job, error: BaseException) -> None:
    def leave() -> None:
        raise error

    async def leave_on_a_loop() -> None:
        raise error

    for fn in (leave, leave_on_a_loop):
        with pytest.raises(loom.OperationFailed, match=type(error).__name__):
            job.run(fn)
    assert job.run(lambda: "alive") == "alive"


def test_a_result_that_cannot_be_pickled_is_a_clear_error(job: loom.Job) -> None:
    def locked() -> Any:
        return {"state": threading.Lock()}

    with pytest.raises(loom.UnpicklableError, match=r"the result of run 'locked-\d+'\['state'\] cannot be pickled"):
        job.run(locked)


def test_an_exception_that_cannot_be_pickled_arrives_as_text(job: loom.Job) -> None:
    def fail() -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(loom.OperationFailed, match="ValueError: with a lock"):
        job.run(fail)


def test_an_argument_that_cannot_be_unpickled_there_fails_the_run(job: loom.Job) -> None:
    class Broken:
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    with pytest.raises(loom.UnpicklableError, match="an argument of run"):
        job.run(print, Broken())

    run = job.run(print, Broken(), detach=True)
    assert isinstance(run.exception(IN_TIME), loom.UnpicklableError)
    assert run.status == "failed"


def test_what_is_no_function_is_refused_before_anything_is_sent(job: loom.Job) -> None:
    with pytest.raises(TypeError, match="5 is not a function"):
        job.run(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the name of a run"):
        job.run(print, name="")
    with pytest.raises(loom.UnpicklableError):
        job.run(print, threading.Lock())


# -- output -------------------------------------------------------------------------------------------------


def test_what_it_prints_is_printed_here(job: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        sys.stdout.buffer.write(b"as bytes\n")

    job.run(speak)

    captured = capsys.readouterr()
    assert captured.out == "to stdout\nas bytes\n"
    assert captured.err == "to stderr\n"


def test_threads_tasks_and_logging_belong_to_the_run(job: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    async def speak() -> None:
        async def task() -> None:
            print("task")

        await asyncio.gather(task())
        await asyncio.to_thread(print, "to_thread")
        await asyncio.get_running_loop().run_in_executor(None, print, "executor")
        thread = threading.Thread(target=print, args=("thread",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(print, "pool").result()
        logging.getLogger("farm").warning("logged")

    job.run(speak)

    captured = capsys.readouterr()
    assert captured.out.split() == ["task", "to_thread", "executor", "thread", "pool"]
    assert "logged" in captured.err


def test_two_runs_do_not_mix_their_output(job: loom.Job) -> None:
    def speak(word: str) -> None:
        for _ in range(200):
            print(word)
            time.sleep(0)

    runs = {word: job.run(speak, word, detach=True) for word in ("left", "right")}

    for word, run in runs.items():
        run.result(IN_TIME)
        assert run.output() == f"{word}\n" * 200


def test_output_comes_while_the_function_runs(job: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"
    run = job.run(wait_for, str(path), detach=True)
    follow = run.follow()

    assert next(follow).startswith("waiting")
    assert run.output().startswith("waiting")
    path.touch()

    assert "there\n" in "".join(follow)
    assert run.output() == "waiting\nthere\n"
    assert "".join(run.follow()) == "waiting\nthere\n"


def test_output_can_be_followed_on_an_event_loop(job: loom.Job) -> None:
    def speak() -> None:
        for number in range(50):
            print(number)

    async def follow() -> str:
        run = job.run(speak, detach=True)
        text = "".join([piece async for piece in run.follow()])
        await run
        return text

    assert asyncio.run(follow()) == "".join(f"{number}\n" for number in range(50))


def test_output_is_bounded_and_says_what_is_missing(job: loom.Job) -> None:
    def speak() -> None:
        for number in range(30_000):
            print(f"{number:099}")

    run = job.run(speak, detach=True)
    run.result(IN_TIME)

    first, _, rest = run.output().partition("\n")
    assert first == f"… {3_000_000 - 2**20} characters of output dropped …"
    assert len(rest) == 2**20
    assert rest.endswith(f"{29_999:099}\n")


# -- detached -----------------------------------------------------------------------------------------------


def test_a_detached_run_is_a_handle_at_once(job: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"
    before = time.time()
    run = job.run(wait_for, str(path), detach=True, name="waiter")
    assert isinstance(run, loom.RunHandle)
    assert (run.name, run.status, run.finished) == ("waiter", "running", None)
    assert repr(run) == "<RunHandle 'waiter' running>"
    with pytest.raises(loom.WaitTimeout):
        run.result(timeout=0.05)
    assert job.runs() == {"waiter": run}

    path.touch()

    assert run.result(IN_TIME) == str(path)
    assert run.result(0) == str(path)
    assert run.exception() is None
    assert run.status == "done"
    assert run.started is not None
    assert run.finished is not None
    assert before - 60 < run.started <= run.finished < time.time() + 60


def test_a_detached_run_can_be_awaited(job: loom.Job) -> None:
    async def wait() -> int:
        return await job.run(lambda: 5, detach=True)  # type: ignore[no-any-return]

    assert asyncio.run(wait()) == 5


def test_a_run_goes_on_while_nobody_is_connected(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = loom.connect(cluster.url, cluster.token)
    job.run(wait_for, str(path), detach=True, name="waiter")
    job.run(lambda: 1 / 0, detach=True, name="failing").exception(IN_TIME)
    job.detach()
    path.touch()

    with attached(cluster, job.session) as later:
        runs = later.runs()
        assert list(runs) == ["waiter", "failing"]
        assert runs["waiter"].result(IN_TIME) == str(path)
        assert runs["waiter"].output() == "waiting\nthere\n"
        assert runs["waiter"].status == "done"
        assert runs["failing"].status == "failed"
        with pytest.raises(ZeroDivisionError):
            runs["failing"].result(IN_TIME)


def attached(cluster: LocalCluster, session: str) -> loom.Job:
    """Attach as soon as the session has noticed that its client is gone."""
    deadline = time.monotonic() + IN_TIME
    while True:
        try:
            return loom.connect(cluster.url, cluster.token, session=session)
        except loom.SessionInUse:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_that_was_waited_for_goes_on_without_the_connection(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = loom.connect(cluster.url, cluster.token)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.run, wait_for, str(path), name="waiter")
        deadline = time.monotonic() + IN_TIME
        while "waiter" not in job.runs():
            assert time.monotonic() < deadline
        job.detach()
        with pytest.raises(loom.SessionClosed):
            waiting.result(IN_TIME)

    with attached(cluster, job.session) as later:
        run = later.runs()["waiter"]
        path.touch()
        assert run.result(IN_TIME) == str(path)
        assert run.output() == "waiting\nthere\n"


def test_a_run_that_ends_under_a_later_client_tells_it(cluster: LocalCluster, tmp_path: Path) -> None:
    path = tmp_path / "go"
    job = loom.connect(cluster.url, cluster.token)
    job.run(wait_for, str(path), detach=True, name="waiter")
    with pytest.raises(loom.WaitTimeout):
        job.runs()["waiter"].result(timeout=0.01)
    job.detach()

    with attached(cluster, job.session) as later:
        run = later.runs()["waiter"]
        assert run.status == "running"
        assert run.started is not None
        until_it_prints(run, "waiting")
        path.touch()
        assert "".join(run.follow()) == "waiting\nthere\n"
        assert run.result(IN_TIME) == str(path)
        assert run.status == "done"
        assert list(later.events(timeout=0.01)) == []


def test_a_name_is_taken_while_its_run_is_going(job: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"
    first = job.run(wait_for, str(path), detach=True, name="waiter")
    with pytest.raises(loom.RunNameTaken, match=r"run 'waiter' is still going \(id \d+\)"):
        job.run(print, name="waiter")

    job._runs = KnownRuns(job._calls)  # as another program, that has not heard of it
    job._connection.on(Kind.RUN_STATE, job._runs.take)
    with pytest.raises(loom.RunNameTaken, match="wait for it, cancel it, or take another name"):
        job.run(print, detach=True, name="waiter").result(IN_TIME)
    going = job.runs()["waiter"]
    assert going.id == first.id

    path.touch()
    going.result(IN_TIME)
    second = job.run(lambda: 2, detach=True, name="waiter")
    assert second.result(IN_TIME) == 2
    assert job.runs()["waiter"] is second


def test_the_oldest_runs_are_forgotten(job: loom.Job) -> None:
    first = job.run(lambda: 0, detach=True)
    first.future.get(IN_TIME)
    first._answer = None
    rest = [job.run(lambda number=number: number, detach=True, name=f"run {number}") for number in range(256)]
    assert [run.result(IN_TIME) for run in rest] == list(range(256))

    assert list(job.runs()) == [f"run {number}" for number in range(256)]
    with pytest.raises(loom.NoSuchRun, match="the last 256 others"):
        first.result(IN_TIME)
    with pytest.raises(loom.NoSuchRun):
        first.output()
    with pytest.raises(loom.NoSuchRun):
        first.cancel()


# -- cancelling ---------------------------------------------------------------------------------------------


def test_a_coroutine_is_cancelled_as_asyncio_does(job: loom.Job) -> None:
    run = job.run(wait_for_ever, detach=True)
    until_it_prints(run, "begun")

    assert run.cancel()

    with pytest.raises(loom.OperationCancelled, match=r"run 'wait_for_ever-\d+' was cancelled"):
        run.result(IN_TIME)
    assert run.status == "cancelled"
    assert run.output() == "begun\ncleaned up\n"
    assert not run.cancel()


def test_a_function_is_cancelled_where_it_runs_python_code(job: loom.Job) -> None:
    run = job.run(go_on_for_ever, detach=True)
    until_it_prints(run, "begun")

    assert run.cancel()

    assert isinstance(run.exception(IN_TIME), loom.OperationCancelled)
    assert run.status == "cancelled"


def test_runs_are_cancelled_at_any_moment(job: loom.Job) -> None:
    def count(steps: int) -> int:
        for _ in range(steps):
            pass
        return steps

    runs = []
    for number in range(100):
        run = job.run(count, 10 ** (2 + number % 5), detach=True)
        run.cancel()
        runs.append(run)

    for run in runs:
        error = run.exception(IN_TIME)
        assert error is None or isinstance(error, loom.OperationCancelled)
        assert run.status == ("done" if error is None else "cancelled")
    assert "cancelled" in {run.status for run in runs}
    assert job.run(count, 1) == 1


def test_a_function_that_refuses_to_be_cancelled_ends_as_it_likes(job: loom.Job) -> None:
    def stubborn() -> str:
        try:
            print("begun")
            while True:
                time.sleep(0.01)
        except BaseException as error:  # noqa: BLE001
            return type(error).__name__

    run = job.run(stubborn, detach=True)
    until_it_prints(run, "begun")
    run.cancel()

    assert run.result(IN_TIME) == "Interruption"
    assert run.status == "done"


# -- waits that end early -----------------------------------------------------------------------------------


def test_an_interrupt_ends_the_wait_and_not_the_run(job: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"

    def interrupt() -> None:
        until_it_prints(next(iter(job.runs().values())), "waiting")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def run_and_interrupt() -> None:
        deadline = time.monotonic() + IN_TIME
        while not job.runs():
            assert time.monotonic() < deadline
        interrupt()

    thread = threading.Thread(target=run_and_interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match=r"job\.runs\(\)\['waiter'\] finds it"):
        job.run(wait_for, str(path), name="waiter")
    thread.join(IN_TIME)

    run = job.runs()["waiter"]
    assert run.status == "running"
    path.touch()
    assert run.result(IN_TIME) == str(path)


def test_a_session_ends_though_a_function_runs(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        run = job.run(go_on_for_ever, detach=True)
        until_it_prints(run, "begun")
        waiting = run.future

    with pytest.raises(loom.SessionClosed):
        waiting.get(IN_TIME)
    with pytest.raises(loom.LoomError):
        job.run(print)


# -- what the driver keeps ----------------------------------------------------------------------------------


def finished_run(ident: int, size: int) -> Run:
    run = Run(ident, f"run {ident}", True)
    run.finished = float(ident)
    run.answer = Message(Kind.RESULT, ident, [0.0], [range(size)])  # type: ignore[list-item]
    return run


def test_results_are_kept_up_to_a_size_but_the_newest_in_any_case() -> None:
    runs = Runs.__new__(Runs)
    runs._runs = {ident: finished_run(ident, 100 << 20) for ident in range(1, 6)}
    runs._runs[9] = Run(9, "going", True)
    runs._forget_oldest()
    assert list(runs._runs) == [4, 5, 9]

    runs._runs[6] = finished_run(6, 1 << 30)
    runs._forget_oldest()
    assert list(runs._runs) == [9, 6]


# -- processes that runs start ------------------------------------------------------------------------------


def start_and_wait(path: str, detached: bool) -> int:
    """Start a process that starts another, and wait for it."""
    script = f"sleep 1000 & echo $$ $! > {path}.new; mv {path}.new {path}; wait"
    return subprocess.run(["sh", "-c", script], start_new_session=detached, check=False).returncode


async def start_and_wait_async(path: str, detached: bool) -> int | None:
    return await asyncio.to_thread(start_and_wait, path, detached)


def started(path: Path) -> list[psutil.Process]:
    await_true(path.exists)
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


@pytest.mark.parametrize("function", [start_and_wait, start_and_wait_async])
def test_the_processes_of_a_run_end_when_it_is_cancelled(job: loom.Job, tmp_path: Path, function: Any) -> None:
    other = job.run(start_and_wait, str(tmp_path / "other"), False, detach=True, name="other")
    run = job.run(function, str(tmp_path / "pids"), True, detach=True)
    processes, others = started(tmp_path / "pids"), started(tmp_path / "other")
    assert run.cancel()
    assert psutil.wait_procs(processes, IN_TIME)[1] == []
    with pytest.raises(loom.OperationCancelled):
        run.result(IN_TIME)
    assert all(process.is_running() for process in others)
    assert other.status == "running"


@pytest.mark.parametrize("detached", [False, True])
def test_the_processes_of_a_run_end_with_the_session(cluster: LocalCluster, tmp_path: Path, detached: bool) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        job.run(start_and_wait, str(tmp_path / "pids"), detached, detach=True)
        processes = started(tmp_path / "pids")
    assert psutil.wait_procs(processes, IN_TIME)[1] == []


def test_the_processes_of_a_run_end_with_a_driver_that_is_killed(cluster: LocalCluster, tmp_path: Path) -> None:
    job = loom.connect(cluster.url, cluster.token)
    job.run(start_and_wait, str(tmp_path / "pids"), False, detach=True)
    processes = started(tmp_path / "pids")
    os.kill(driver_pid(cluster, job), signal.SIGKILL)
    assert psutil.wait_procs(processes, IN_TIME)[1] == []
    job.close()


# -- code in the cluster that opens sessions ----------------------------------------------------------------------


def add_apart(url: str, token: str | None) -> tuple[str, int]:
    with loom.connect(url, token) as own:
        counters = own.hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
        return own.session, counters.add.call_one(2).get(IN_TIME)


class Opens(loom.Actor):
    @loom.endpoint
    def add_apart(self, url: str, token: str | None) -> tuple[str, int]:
        return add_apart(url, token)


@pytest.mark.parametrize("where", ["a run", "an actor"])
def test_code_in_the_cluster_opens_a_session_with_the_token_that_it_is_given_and_none_without(
    cluster: LocalCluster, where: str
) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        if where == "a run":
            opened = job.run(add_apart, cluster.url, cluster.token)
            with pytest.raises(loom.AuthenticationError, match="needs a token: pass token="):
                job.run(add_apart, cluster.url, None)
        else:
            opens = job.hosts.slice(hosts=0).spawn_procs().spawn("opens", Opens)
            opened = opens.add_apart.call_one(cluster.url, cluster.token).get(IN_TIME)
            with pytest.raises(loom.ActorError, match="needs a token: pass token="):
                opens.add_apart.call_one(cluster.url, None).get(IN_TIME)
    assert opened[0] != job.session
    assert opened[1] == 2
