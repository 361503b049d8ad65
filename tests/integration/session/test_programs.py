"""A function of `job.run` is a program: its arguments, input, streams, signals, forks and processes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import io
import itertools
import logging
import multiprocessing
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import loom
from loom_proxy.local import LocalCluster
from loom_proxy.notebook.cells import CellView, start
from tests.integration.calls.test_failures import driver_pid
from tests.integration.session.run_functions import IN_TIME, go_on_for_ever, until_it_prints
from tests.support.actors import Counter
from tests.support.gateways import await_true

FOREVER = 1000.0


# -- signals and children ------------------------------------------------------------------------------------


def _sleep() -> None:
    time.sleep(FOREVER)


def forked(number: int) -> int | None:
    pid = os.fork()
    if pid == 0:
        _sleep()
        os._exit(0)
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked_with_a_terminal(number: int) -> int | None:
    pid, terminal = pty.fork()
    if pid == 0:
        _sleep()
        os._exit(0)
    os.kill(pid, number)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return code


def multiprocess(method: str, number: int) -> int | None:
    process: Any = multiprocessing.get_context(method).Process(target=_sleep)  # type: ignore[attr-defined]
    process.start()
    os.kill(process.pid, number)
    process.join()
    code: int | None = process.exitcode
    return code


def fork_process(number: int) -> int | None:
    return multiprocess("fork", number)


def fork_in_a_coroutine(number: int) -> int | None:
    async def run() -> int | None:
        code = fork_process(number)
        await asyncio.to_thread(time.sleep, 0)  # which wakes the loop
        return code

    return asyncio.run(run())


def fork_in_a_thread(number: int) -> int | None:
    codes: list[int | None] = []
    thread = threading.Thread(target=lambda: codes.append(forked(number)))
    thread.start()
    thread.join()
    return codes[0]


def opened(number: int, **options: Any) -> int:
    process = subprocess.Popen(["sleep", str(FOREVER)], **options)
    process.send_signal(number)
    return process.wait()


def opened_with_a_function(number: int) -> int:
    return opened(number, preexec_fn=lambda: None)


def spawned(number: int) -> int:
    pid = os.posix_spawnp("sleep", ["sleep", str(FOREVER)], dict(os.environ))
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forked_and_executed(number: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", str(FOREVER)])
    os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


STARTS: list[Callable[[int], int | None]] = [
    forked,
    forked_with_a_terminal,
    fork_process,
    fork_in_a_coroutine,
    fork_in_a_thread,
    opened,
    opened_with_a_function,
    spawned,
    forked_and_executed,
]

_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH}
_STOPPING = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_IGNORED_HERE = {one for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN}  # as under nohup
_NOT_ENDING = _HARMLESS | _STOPPING | _IGNORED_BY_PYTHON | _IGNORED_HERE
ENDING = sorted(number for number in signal.Signals if number not in _NOT_ENDING)


def end_all(numbers: list[int], start: Callable[[int], int | None]) -> dict[int, int | None]:
    return {number: start(number) for number in numbers}


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_every_signal_ends_a_child_of_every_kind_and_nothing_of_the_session(
    tidied: loom.Job, start: Callable[[int], int | None]
) -> None:
    """A child is killed by the signal, except that SIGINT may end Python code by a KeyboardInterrupt."""
    codes = tidied.run(end_all, [int(number) for number in ENDING], start)
    ends = {number: {-number} if number != signal.SIGINT else {-number, 0, 1} for number in codes}
    assert {number: code for number, code in codes.items() if code not in ends[number]} == {}
    assert tidied.run(len, "abc") == 3


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(method, marks=pytest.mark.slow) for method in ("spawn", "forkserver"))]
)
def test_a_pool_that_is_terminated_leaves_the_session_alone(tidied: loom.Job, method: str) -> None:
    counters = tidied.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)

    def use_pools(method: str) -> list[list[int]]:
        results = []
        for _ in range(3 if method == "fork" else 1):
            with multiprocessing.get_context(method).Pool(2) as pool:
                results.append(pool.map(abs, [-1, -2]))
        return results

    assert tidied.run(use_pools, method)[0] == [1, 2]
    assert sorted(counters.add.call(1).get(IN_TIME).values()) == [11, 11]


def test_a_child_ends_as_a_program_does_and_does_not_answer_for_the_run(
    tidied: loom.Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends() -> list[int]:
        def leave(how: Callable[[], object]) -> int:
            pid = os.fork()
            if pid == 0:
                how()
                raise _InTheChild
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        def fail() -> None:
            raise ValueError("in the child")

        return [leave(lambda: sys.exit(3)), leave(lambda: sys.exit("why")), leave(sys.exit), leave(fail)]

    assert tidied.run(ends) == [3, 1, 0, 1]
    assert "why\n" in (err := capsys.readouterr().err)
    assert "ValueError: in the child" in err

    def return_twice() -> str:
        pid = os.fork()
        return "the child" if pid == 0 else f"the parent of {os.waitpid(pid, 0)[1]}"

    assert tidied.run(return_twice) == "the parent of 0"

    async def return_twice_from_a_loop() -> str:
        pid = os.fork()
        if pid == 0:
            return "the child"
        code = (await asyncio.to_thread(os.waitpid, pid, 0))[1]
        return f"the parent of {code}"

    assert tidied.run(return_twice_from_a_loop) == "the parent of 0"
    assert tidied.run(len, "abc") == 3


class _InTheChild(Exception):
    """Not raised: what precedes it ends the child."""


def test_a_child_is_no_driver_and_has_its_own_clean_end(tidied: loom.Job) -> None:
    def look() -> tuple[bool, Any, Any, int]:
        source, end = os.pipe()
        pid = os.fork()
        if pid == 0:
            import loom.driver_api

            here = loom.driver_api.in_driver(), signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
            with open(end, "w") as file:
                file.write(repr([here[0], here[1] is signal.SIG_DFL, here[2] is signal.default_int_handler]))
            os._exit(0)
        os.close(end)
        with open(source) as file:
            text = file.read()
        os.waitpid(pid, 0)
        return text  # type: ignore[return-value]

    assert tidied.run(look) == "[False, True, True]"


def test_a_child_that_outlives_its_driver_does_not_keep_the_sessions_processes(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def leave_a_daemon(path: str) -> None:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                Path(f"{path}.new").write_text(str(os.getpid()))
                os.rename(f"{path}.new", path)
                time.sleep(FOREVER)
            os._exit(0)
        os.wait()

    job = loom.connect(cluster.url, cluster.token)
    counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter, 10)
    actors = [psutil.Process(pid) for pid in counters.pid.call().get(IN_TIME).values()]
    job.run(leave_a_daemon, str(tmp_path / "daemon"))
    await_true((tmp_path / "daemon").exists)
    daemon = psutil.Process(int((tmp_path / "daemon").read_text()))
    os.kill(driver_pid(cluster, job), signal.SIGKILL)
    try:
        assert psutil.wait_procs(actors, IN_TIME)[1] == []
        assert daemon.is_running()
    finally:
        daemon.kill()
    job.close()


def test_no_other_program_takes_the_drivers_place(tidied: loom.Job) -> None:
    def execute(by: str) -> None:
        calls: dict[str, Callable[[], object]] = {
            "execv": lambda: os.execv("/bin/true", ["true"]),
            "execvp": lambda: os.execvp("true", ["true"]),
            "execle": lambda: os.execle("/bin/true", "true", {}),
        }
        calls[by]()

    for by in ("execv", "execvp", "execle"):
        with pytest.raises(PermissionError, match=r"start it with subprocess\.run"):
            tidied.run(execute, by)
    assert tidied.run(subprocess.call, ["true"]) == 0


# -- what processes print ------------------------------------------------------------------------------------


def print_from_a_fork() -> None:
    pid = os.fork()
    if pid == 0:
        print("printed")
        print("complained", file=sys.stderr)
        os._exit(0)
    os.waitpid(pid, 0)


def print_from_a_process(method: str) -> None:
    process: Any = multiprocessing.get_context(method).Process(target=os.system, args=(_SCRIPT,))  # type: ignore[attr-defined]
    process.start()
    process.join()
    assert process.exitcode == 0


_SCRIPT = "echo printed; echo complained >&2"

PRINTS: dict[str, Callable[[], object]] = {
    "os.fork": print_from_a_fork,
    "multiprocessing, fork": lambda: print_from_a_process("fork"),
    "multiprocessing, spawn": lambda: print_from_a_process("spawn"),
    "subprocess": lambda: subprocess.run(["sh", "-c", _SCRIPT], check=True),
    "subprocess, to the streams": lambda: subprocess.run(
        ["sh", "-c", _SCRIPT], stdout=sys.stdout, stderr=sys.stderr, check=True
    ),
    "os.system": lambda: os.system(_SCRIPT),
    "os.posix_spawn": lambda: os.waitpid(os.posix_spawn("/bin/sh", ["sh", "-c", _SCRIPT], {}), 0),
    "os.spawnv": lambda: os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", _SCRIPT]),
    "the descriptors": lambda: (
        os.write(sys.stdout.fileno(), b"printed\n"),
        os.write(sys.stderr.fileno(), b"complained\n"),
    ),
}


@pytest.mark.parametrize("how", PRINTS)
def test_what_a_process_prints_is_output_of_its_run(
    tidied: loom.Job, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    tidied.run(PRINTS[how])
    captured = capsys.readouterr()
    assert captured.out == "printed\n"
    assert "complained\n" in captured.err


def test_the_processes_of_two_runs_do_not_mix_their_output(tidied: loom.Job) -> None:
    def speak(word: str) -> None:
        for _ in range(10):
            subprocess.run(["echo", word], check=True)
            print(word)

    runs = {word: tidied.run(speak, word, detach=True) for word in ("left", "right")}
    for word, run in runs.items():
        run.result(IN_TIME)
        assert run.output() == f"{word}\n" * 20


@pytest.mark.slow
def test_a_process_that_prints_without_end_does_not_hold_up_the_session(tidied: loom.Job) -> None:
    def print_on() -> None:
        subprocess.run(["yes"], check=False)

    run = tidied.run(print_on, detach=True)
    until_it_prints(run, "y\n")
    began = time.monotonic()
    assert tidied.run(len, "abc") == 3
    assert time.monotonic() - began < IN_TIME / 2
    run.cancel()
    run.exception(IN_TIME)


# -- arguments, input, streams ---------------------------------------------------------------------------------


def test_the_arguments_and_the_input_are_those_of_a_program_without_any(tidied: loom.Job) -> None:
    def look() -> tuple[list[str], Any, str, bytes, bytes, str]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--port", type=int)
        with pytest_raises(EOFError):
            input("> ")
        shell = subprocess.run(["cat"], capture_output=True, check=True).stdout
        return sys.argv, parser.parse_known_args()[0].port, sys.stdin.read(), os.read(0, 10), shell, open(0).read()

    assert tidied.run(look) == ([""], None, "", b"", b"", "")


@contextlib.contextmanager
def pytest_raises(kind: type[BaseException]) -> Any:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def test_the_streams_are_text_streams(tidied: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    def use() -> list[Any]:
        seen: list[Any] = []
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
            stream.writelines(["one\n", "two\n"])
            for byte in "é\n".encode():
                stream.buffer.write(bytes([byte]))
            stream.buffer.flush()
            seen.append((isinstance(stream, io.TextIOBase), isinstance(stream, io.TextIOWrapper)))
            seen.append((stream.isatty(), stream.encoding, stream.mode, stream.name, stream.closed))
            seen.append((stream.writable(), stream.readable(), stream.fileno() > 2, stream.buffer.writable()))
        print("no line end", end="", flush=True)
        print("\ud800 alone")
        with contextlib.redirect_stdout(io.StringIO()) as taken:
            print("taken")
        warnings.warn("look out", stacklevel=1)
        return [*seen, taken.getvalue()]

    kinds, about, may = (True, True), (False, "utf-8", "w"), (True, False, True, True)
    assert tidied.run(use) == [
        *(kinds, (*about, "<stdout>", False), may),
        *(kinds, (*about, "<stderr>", False), may),
        "taken\n",
    ]
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\né\nno line end? alone\n"
    assert captured.err.startswith("one\ntwo\né\n")
    assert "UserWarning: look out" in captured.err


def test_a_trace_of_all_threads_is_output_of_the_run(tidied: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    tidied.run(faulthandler.dump_traceback)
    assert "most recent call first" in capsys.readouterr().err


def test_logging_is_configured_by_each_run(tidied: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    def log(**options: Any) -> None:
        logging.basicConfig(**options)
        logging.getLogger("farm").info("fed")
        logging.getLogger("farm").debug("counted")

    assert tidied.run(lambda: (logging.root.handlers, logging.root.level)) == ([], logging.WARNING)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"level": logging.INFO}, "INFO:farm:fed\n"),
        ({"level": logging.DEBUG, "format": "%(message)s"}, "fed\ncounted\n"),
        ({}, ""),
    ]
    for options, line in cases:
        tidied.run(log, **options)
        assert capsys.readouterr().err == line


# -- time limits ---------------------------------------------------------------------------------------------


class TooSlow(Exception):
    pass


def _limited(seconds: float, work: Callable[[], object]) -> str:
    """What reward functions do."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        work()
    except TooSlow:
        return "too slow"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return "in time"


def _spin() -> None:
    for _ in itertools.count():
        pass


WORKS: dict[str, Callable[[], object]] = {
    "a loop": _spin,
    "a sleep": lambda: time.sleep(FOREVER),
    "a lock": lambda: [lock := threading.Lock(), lock.acquire(), lock.acquire()],
    "a process": lambda: subprocess.run(["sleep", "1000"], check=False),
    "a coroutine": lambda: asyncio.run(asyncio.sleep(FOREVER)),
}


@pytest.mark.parametrize("work", WORKS)
def test_a_time_limit_by_sigalrm_ends_what_is_too_slow(tidied: loom.Job, work: str) -> None:
    assert tidied.run(_limited, 0.05, WORKS[work]) == "too slow"
    assert tidied.run(_limited, FOREVER, lambda: None) == "in time"


def test_what_a_run_sets_of_signals_ends_with_it(tidied: loom.Job) -> None:
    def set_and_leave() -> None:
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.001)

    def look() -> tuple[bool, bool, set[int], tuple[float, float]]:
        return (
            signal.getsignal(signal.SIGALRM) is signal.SIG_DFL,
            callable(signal.getsignal(signal.SIGTERM)),
            set(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            signal.getitimer(signal.ITIMER_REAL),
        )

    for _ in range(10):
        tidied.run(set_and_leave)
        assert tidied.run(look) == (True, True, set(), (0.0, 0.0))


def test_settings_under_which_the_driver_might_fail_end_with_the_run(tidied: loom.Job) -> None:
    def look() -> tuple[int, int, float | None, bool]:
        os.umask(umask := os.umask(0))
        return sys.getrecursionlimit(), umask, socket.getdefaulttimeout(), gc.isenabled()

    def change() -> None:
        sys.setrecursionlimit(120)
        os.umask(0o777)
        socket.setdefaulttimeout(0.001)
        gc.disable()

    before = tidied.run(look)
    tidied.run(change)
    assert tidied.run(look) == before
    counters = tidied.hosts.spawn_procs().spawn("counters", Counter, 1)
    assert sorted(counters.add.call(1).get(IN_TIME).values()) == [2, 2]


def test_a_run_handles_the_signals_that_it_sends_itself(tidied: loom.Job) -> None:
    def handle(number: int) -> list[int]:
        seen: list[int] = []
        signal.signal(number, lambda number, frame: seen.append(number))
        os.kill(os.getpid(), number)
        signal.raise_signal(number)
        return seen

    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        assert tidied.run(handle, int(number)) == [number, number]
    with pytest.raises(loom.OperationFailed, match="KeyboardInterrupt"):
        tidied.run(signal.raise_signal, int(signal.SIGINT))
    assert tidied.run(len, "abc") == 3


def test_the_second_of_two_runs_is_told_why_it_has_no_signals(tidied: loom.Job) -> None:
    first = tidied.run(go_on_for_ever, detach=True)
    until_it_prints(first, "begun")
    with pytest.raises(ValueError, match="of a session's runs one at a time has the main thread"):
        tidied.run(_limited, 0.05, _spin)
    first.cancel()
    first.exception(IN_TIME)
    assert tidied.run(_limited, 0.05, _spin) == "too slow"


class Limits(loom.Actor):
    @loom.endpoint
    def limit(self) -> str:
        return _limited(0.05, _spin)


def test_an_actor_is_told_what_to_do_instead_of_signals(tidied: loom.Job) -> None:
    limits = tidied.hosts.slice(hosts=0).spawn_procs().spawn("limits", Limits)
    with pytest.raises(loom.ActorError, match=r"an endpoint does not run in its process's main thread.*job\.run"):
        limits.limit.call_one().get(IN_TIME)


def test_a_session_ends_though_its_run_has_taken_the_signals(cluster: LocalCluster) -> None:
    def refuse() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, lambda number, frame: None)
        print("begun")
        time.sleep(FOREVER)

    with loom.connect(cluster.url, cluster.token) as job:
        until_it_prints(job.run(refuse, detach=True), "begun")
        driver = psutil.Process(driver_pid(cluster, job))
    assert psutil.wait_procs([driver], IN_TIME)[1] == []


def test_a_cell_is_a_program_too(tidied: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
import os, signal, subprocess, sys, time, multiprocessing
assert sys.argv == [""]
try:
    input()
except EOFError:
    print("no input")
sys.stdout.reconfigure(line_buffering=True)
subprocess.run(["echo", "from a process"])
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1]))
def stop(number, frame):
    raise TimeoutError
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.05)
try:
    time.sleep(1000)
except TimeoutError:
    print("in time")
"""
    CellView(start(tidied, source), lambda record: None, interrupting=True).follow(IN_TIME)
    assert capsys.readouterr().out.split("\n") == ["no input", "from a process", "[1]", "in time", ""]
