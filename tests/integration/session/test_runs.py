"""`job.run`: functions in the driver, their results, what they print, and how they are cancelled."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import tracing
from loom_proxy.local import LocalCluster
from tests.integration.session.run_functions import (
    IN_TIME,
    go_on_for_ever,
    until_it_prints,
    wait_for,
    wait_for_ever,
)
from tests.support.actors import Counter


class Odd(Exception):
    """What only this program knows."""

    def __init__(self, number: int, text: str = "odd") -> None:
        super().__init__(number, text)
        self.number = number


class Unbuildable(Exception):
    """Cannot be unpickled: its arguments do not fit its constructor."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


# -- results and failures -----------------------------------------------------------------------------------


def test_a_function_and_a_coroutine_function_give_their_result(job: loom.Job) -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    assert job.run(lambda a, b=0: a + b, 2, b=3) == 5
    assert job.run(double, 4) == 8
    assert job.runs() == {}


def test_meshes_are_the_real_ones(tidied: loom.Job) -> None:
    counters = tidied.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)

    def total(mesh: Any) -> int:
        return sum(value for _, value in mesh.add.call(1).get().items())

    assert tidied.run(total, counters, detach=True).result(IN_TIME) == 22


@pytest.mark.parametrize("detach", [False, True])
def test_what_a_function_raises_is_raised_as_its_own_class(tidied: loom.Job, detach: bool) -> None:
    def fail() -> None:
        raise Odd(7)

    with pytest.raises(Odd) as caught:
        tidied.run(fail, detach=True).result(IN_TIME) if detach else tidied.run(fail)

    assert caught.value.number == 7
    assert "in fail" in str(caught.value.__cause__)
    last = str(caught.value.__cause__).rstrip().splitlines()[-1]
    assert last == f"{Odd.__module__}.Odd: (7, 'odd')"


def test_an_exception_whose_constructor_takes_more_than_its_message_is_raised(tidied: loom.Job) -> None:
    def fail() -> None:
        raise Unbuildable(1, 2)

    with pytest.raises(Unbuildable, match="1 and 2") as caught:
        tidied.run(fail)

    assert "in fail" in str(caught.value.__cause__)


def test_what_an_actor_raises_in_a_run_is_an_actor_error(tidied: loom.Job) -> None:
    counters = tidied.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)

    def call(mesh: Any) -> None:
        mesh.add.call("not a number").get()

    with pytest.raises(loom.ActorError) as caught:
        tidied.run(call, counters)

    assert isinstance(caught.value.exception, TypeError)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_what_ends_programs_ends_only_the_run(tidied: loom.Job, error: BaseException) -> None:
    def leave() -> None:
        raise error

    async def leave_on_a_loop() -> None:
        raise error

    for fn in (leave, leave_on_a_loop):
        with pytest.raises(loom.OperationFailed, match=type(error).__name__):
            tidied.run(fn)
    assert tidied.run(lambda: "alive") == "alive"


def test_a_result_that_cannot_be_pickled_is_a_clear_error(tidied: loom.Job) -> None:
    def locked() -> Any:
        return {"state": threading.Lock()}

    with pytest.raises(loom.UnpicklableError, match=r"the result of run 'locked-\d+'\['state'\] cannot be pickled"):
        tidied.run(locked)


def test_an_exception_that_holds_a_lock_is_raised_without_it(tidied: loom.Job) -> None:
    def fail() -> None:
        error = ValueError("with a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(ValueError, match="with a lock") as caught:
        tidied.run(fail)

    assert type(caught.value) is ValueError
    assert "left out" in repr(caught.value.lock)  # type: ignore[attr-defined]


def test_an_argument_that_cannot_be_unpickled_there_fails_the_run(tidied: loom.Job) -> None:
    class Broken:
        def __reduce__(self) -> Any:
            return (int, ("not a number",))

    with pytest.raises(loom.UnpicklableError, match="an argument of run"):
        tidied.run(print, Broken())

    run = tidied.run(print, Broken(), detach=True)
    assert isinstance(run.exception(IN_TIME), loom.UnpicklableError)
    assert run.status == "failed"


def test_what_is_no_function_is_refused_before_anything_is_sent(tidied: loom.Job) -> None:
    with pytest.raises(TypeError, match="5 is not a function"):
        tidied.run(5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the name of a run"):
        tidied.run(print, name="")
    with pytest.raises(loom.UnpicklableError):
        tidied.run(print, threading.Lock())


# -- output -------------------------------------------------------------------------------------------------


def test_what_it_prints_is_printed_here(tidied: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        sys.stdout.buffer.write(b"as bytes\n")

    tidied.run(speak)

    captured = capsys.readouterr()
    assert captured.out == "to stdout\nas bytes\n"
    assert captured.err == "to stderr\n"


def test_threads_tasks_and_logging_belong_to_the_run(tidied: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
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

    tidied.run(speak)

    captured = capsys.readouterr()
    assert captured.out.split() == ["task", "to_thread", "executor", "thread", "pool"]
    assert "logged" in captured.err


def test_the_name_of_a_run_that_raised_is_free_though_its_error_is_kept(tidied: loom.Job) -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal") as raised:
            tidied.run(int, "x", name="same")
        errors.append(raised.value)

    assert tidied.run(len, "abc", name="same") == 3
    assert len(errors) == 2


def test_two_runs_do_not_mix_their_output(tidied: loom.Job) -> None:
    def speak(word: str) -> None:
        for _ in range(200):
            print(word)
            time.sleep(0)

    runs = {word: tidied.run(speak, word, detach=True) for word in ("left", "right")}

    for word, run in runs.items():
        run.result(IN_TIME)
        assert run.output() == f"{word}\n" * 200


def test_the_lines_of_events_belong_to_the_run_that_has_them(tidied: loom.Job) -> None:
    def speak(step: int) -> None:
        for _ in range(200):
            tracing.event("step.begin", step=step)
            time.sleep(0)

    tidied.run(tracing.configure, lines=True)
    try:
        runs = {step: tidied.run(speak, step, name=f"step {step}", detach=True) for step in (1, 2)}
        for step, run in runs.items():
            run.result(IN_TIME)
            assert run.output() == f"Step {step} begins\n" * 200
    finally:
        tidied.run(tracing.configure, lines=False)


def test_output_comes_while_the_function_runs(tidied: loom.Job, tmp_path: Path) -> None:
    path = tmp_path / "go"
    run = tidied.run(wait_for, str(path), detach=True)
    follow = run.follow()

    assert next(follow).startswith("waiting")
    assert run.output().startswith("waiting")
    path.touch()

    assert "there\n" in "".join(follow)
    assert run.output() == "waiting\nthere\n"
    assert "".join(run.follow()) == "waiting\nthere\n"


def test_output_can_be_followed_on_an_event_loop(tidied: loom.Job) -> None:
    def speak() -> None:
        for number in range(50):
            print(number)

    async def follow() -> str:
        run = tidied.run(speak, detach=True)
        text = "".join([piece async for piece in run.follow()])
        await run
        return text

    assert asyncio.run(follow()) == "".join(f"{number}\n" for number in range(50))


def test_output_is_bounded_and_says_what_is_missing(tidied: loom.Job) -> None:
    def speak() -> None:
        for number in range(30_000):
            print(f"{number:099}")

    run = tidied.run(speak, detach=True)
    run.result(IN_TIME)

    first, _, rest = run.output().partition("\n")
    assert first == f"… {3_000_000 - 2**20} characters of output dropped …"
    assert len(rest) == 2**20
    assert rest.endswith(f"{29_999:099}\n")


# -- cancelling ---------------------------------------------------------------------------------------------


def test_a_coroutine_is_cancelled_as_asyncio_does(tidied: loom.Job) -> None:
    run = tidied.run(wait_for_ever, detach=True)
    until_it_prints(run, "begun")

    assert run.cancel()

    with pytest.raises(loom.OperationCancelled, match=r"run 'wait_for_ever-\d+' was cancelled"):
        run.result(IN_TIME)
    assert run.status == "cancelled"
    assert run.output() == "begun\ncleaned up\n"
    assert not run.cancel()


def test_a_function_is_cancelled_where_it_runs_python_code(tidied: loom.Job) -> None:
    run = tidied.run(go_on_for_ever, detach=True)
    until_it_prints(run, "begun")

    assert run.cancel()

    assert isinstance(run.exception(IN_TIME), loom.OperationCancelled)
    assert run.status == "cancelled"


def test_runs_are_cancelled_at_any_moment(tidied: loom.Job) -> None:
    def count(steps: int) -> int:
        for _ in range(steps):
            pass
        return steps

    runs = []
    for number in range(100):
        run = tidied.run(count, 10 ** (2 + number % 5), detach=True)
        run.cancel()
        runs.append(run)

    for run in runs:
        error = run.exception(IN_TIME)
        assert error is None or isinstance(error, loom.OperationCancelled)
        assert run.status == ("done" if error is None else "cancelled")
    assert "cancelled" in {run.status for run in runs}
    assert tidied.run(count, 1) == 1


def test_a_function_that_refuses_to_be_cancelled_ends_as_it_likes(tidied: loom.Job) -> None:
    def stubborn() -> str:
        try:
            print("begun")
            while True:
                time.sleep(0.01)
        except BaseException as error:  # noqa: BLE001
            return type(error).__name__

    run = tidied.run(stubborn, detach=True)
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
