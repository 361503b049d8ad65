"""Processes with a threadlet: how their ends are told, and what their forks do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loom.threadlet import Deferred, Threadlet
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, Loop, eventually

Make = Callable[..., Threadlet]


@contextmanager
def program(weaver: FakeWeaver, folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that knows the weaver."""
    path = folder / "program.py"
    path.write_text(
        "import os, sys, threading, time\nfrom loom.threadlet import Threadlet\n" + textwrap.dedent(text)
    )
    environment = {**os.environ, "LOOM_WEAVER": weaver.address, "LOOM_REPLICA": "train_0"}
    process = subprocess.Popen(
        [sys.executable, str(path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(BOUND)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def last_words(connection: Connection) -> tuple[list[Any], list[Any] | None]:
    """The rows that were reported, and the goodbye, or None if there is none."""
    rows: list[Any] = []
    while True:
        try:
            frame = connection.receive()
        except ConnectionResetError:  # it was killed before it read what it was sent
            frame = None
        if frame is None:
            return rows, None
        if frame[0] == "status":
            rows += frame[1]
            connection.send("stored", rows[-1][0])
        if frame[0] == "bye":
            connection.close()
            return rows, frame[1:]


ENDS = {
    "its end": ("", ["it came to its end", "finished"]),
    "an exception": ("raise ValueError('no data')", ["ValueError: no data", "failed"]),
    "sys.exit()": ("sys.exit()", ["it came to its end", "finished"]),
    "an exit code in the block": ("with t:\n    sys.exit(3)", ["exit code 3", "failed"]),
    "an exception that was caught": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass",
        ["it came to its end", "finished"],
    ),
    "an interrupt": ("raise KeyboardInterrupt", ["KeyboardInterrupt", "failed"]),
    "being killed": ("os.kill(os.getpid(), 9)", None),
    "being terminated": ("os.kill(os.getpid(), 15)", None),
    "a fork by multiprocessing": (
        "import multiprocessing as mp\n"
        "def run():\n"
        "    Threadlet('child').publish_status(step=1)\n"
        "t.close()\n"
        "child = mp.get_context('fork').Process(target=run)\n"
        "child.start()\n"
        "child.join()",
        ["it came to its end", "finished"],
    ),
    "a fork by multiprocessing that fails": (
        "import multiprocessing as mp\n"
        "def run():\n"
        "    Threadlet('child').publish_status(step=1)\n"
        "    raise ValueError('no data')\n"
        "t.close()\n"
        "child = mp.get_context('fork').Process(target=run)\n"
        "child.start()\n"
        "child.join()",
        ["ValueError: no data", "failed"],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_process_is_told(weaver: FakeWeaver, tmp_path: Path, name: str) -> None:
    ending, expected = ENDS[name]
    text = f"t = Threadlet()\nt.publish_status(step=1)\n{ending}\n"
    if "killed" in name or "terminated" in name:
        text = text.replace(ending, f"while not t.connected:\n    time.sleep(0.01)\n{ending}")
    with program(weaver, tmp_path, text) as process:
        connection, hello = weaver.welcome()
        rows, goodbye = last_words(connection)
        if "fork" in name:
            assert (hello["replica"], goodbye) == ("train_0", ["it came to its end", "finished"])
            connection, hello = weaver.welcome()
            assert hello["replica"] == "child"
            rows, goodbye = last_words(connection)
        process.wait(BOUND)

    assert goodbye == expected
    if expected is not None:
        assert [row[2] for row in rows] == [1]


def test_a_process_that_is_stuck_can_be_looked_into(weaver: FakeWeaver, tmp_path: Path) -> None:
    stuck = """
        def stuck_here():
            threading.Event().wait()
        t = Threadlet()
        with t.step(7):
            stuck_here()
    """
    with program(weaver, tmp_path, stuck):
        connection, _ = weaver.welcome()
        while connection.expect("beat")[2:] != [7, "step"]:
            pass
        connection.send("stack", "s")
        assert "in stuck_here" in connection.expect("stack")[2]


def test_a_fork_does_not_keep_its_parents_connection(weaver: FakeWeaver, tmp_path: Path) -> None:
    forking = """
        t = Threadlet()
        while not t.connected:
            time.sleep(0.01)
        child = os.fork()
        if child == 0:
            threading.Event().wait(60)
            os._exit(0)
        print(child, flush=True)
        threading.Event().wait(60)
    """
    with program(weaver, tmp_path, forking) as process:
        connection, _ = weaver.welcome()
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            process.kill()
            assert last_words(connection)[1] is None
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def in_fork(work: Callable[[], Any]) -> Any:
    """What a function returns in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(work()).encode())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writer, json.dumps(f"{type(error).__name__}: {error}").encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return json.loads(told)


def test_a_fork_does_not_use_its_parents_threadlet(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet()
    connection, _ = weaver.welcome()
    eventually(lambda: made.connected)
    weaver.command(connection, "pause")
    eventually(lambda: made._pending, "the command")
    made.publish_status(step=1)

    def use() -> list[Any]:
        made.publish_status(step=2, metrics={"loss": 1})
        with made.step(3):
            pass
        made.close()
        return [made.check_and_apply_updates(), made.paused, made.connected, len(made._given)]

    assert in_fork(use) == [False, False, False, 0]

    made.publish_status(step=4)
    assert [row[2] for row in connection.rows(2)] == [1, 4]
    assert len(made._pending) == 1
    assert made.connected


def test_a_fork_of_a_process_that_has_no_connection_leaves_it_its_own(weaver: FakeWeaver, threadlet: Make) -> None:
    weaver.stop()
    made = threadlet()

    assert in_fork(lambda: made.connected) is False

    weaver.start()
    weaver.welcome()
    eventually(lambda: made.connected)


def test_a_fork_decides_nothing_about_its_parents_updates(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet(config={"lr": 0.1})
    later = Deferred()
    made.handler("lr")(lambda value: later)
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "update_config", lr=0.2)
    eventually(lambda: made._pending, "the command")
    made.check_and_apply_updates()

    def decide() -> Any:
        later.applied(5)
        return made._config

    assert in_fork(decide) == {"lr": 0.1}

    later.applied(6)
    assert connection.ack(ident)[0] == 6


def test_a_fork_within_a_handler_is_not_paused_and_acknowledges_nothing(
    weaver: FakeWeaver, threadlet: Make
) -> None:
    made = threadlet()
    reader, writer = os.pipe()
    children: list[int] = []
    made.handler("n")(lambda value: children.append(os.fork()))

    def body(number: int) -> None:
        try:
            made.wait_while_paused()
            if children == [0]:
                os.write(writer, json.dumps([made.paused, made.connected]).encode())
        finally:
            if children == [0]:
                os._exit(0)

    connection, _ = weaver.welcome()
    loop = Loop(body)
    pause = weaver.command(connection, "pause")
    eventually(lambda: made._pending, "the command")
    loop.go()
    connection.ack(pause)
    update = weaver.command(connection, "update_config", n=1)

    assert connection.ack(update)[1]["ok"]
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        assert json.load(answer) == [False, False]
    os.waitpid(children[0], 0)
    connection.send("stack", "behind")
    connection.expect("stack")
    assert not any(frame[0] == "ack" for frame in connection.skipped)
    assert made.paused
    weaver.command(connection, "resume")
    assert loop.done.get(timeout=BOUND) == 0
    loop.end()


def test_a_fault_that_ends_in_a_fork_goes_on_in_its_parent(weaver: FakeWeaver, threadlet: Make) -> None:
    pytest.importorskip("torch")
    made = threadlet(injectable=True)
    connection, _ = weaver.welcome()
    ident = weaver.command(connection, "inject", fault="nan_loss", params={"steps": 1})
    eventually(lambda: made._pending, "the command")
    made.check_and_apply_updates()
    assert connection.ack(ident)[1]["ok"]

    def make_steps() -> int:
        for _ in range(2):
            made.check_and_apply_updates()
        return len(made._each_step)

    assert in_fork(make_steps) == 0

    assert len(made._each_step) == 1
    assert make_steps() == 0
    assert connection.expect("fault")[2]["pid"] == os.getpid()
    assert not any(frame[0] == "fault" for frame in connection.skipped)


def test_a_process_that_a_fault_stopped_goes_on_and_tells_of_it(
    weaver: FakeWeaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_CHAOS_DIR", str(tmp_path / "agents"))
    waiting = """
        t = Threadlet(injectable=True)
        sys.stdin.readline()
    """
    with program(weaver, tmp_path, waiting) as process:
        connection, _ = weaver.welcome()
        ident = weaver.command(connection, "inject", fault="sigstop", duration=0.05)

        assert connection.ack(ident)[1]["evidence"] == {"pid": process.pid}
        _, of, evidence = connection.expect("fault")
        process.communicate("", BOUND)

    assert of == ident
    assert evidence["was"] == {"pid": process.pid, "state": "T"}
    assert process.returncode == 0


def test_a_fork_may_have_a_threadlet_of_its_own(weaver: FakeWeaver, threadlet: Make) -> None:
    threadlet()
    weaver.welcome()

    def use() -> str:
        with Threadlet("child", weaver=weaver.address) as mine:
            mine.publish_status(step=2)
            return mine.instance

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.write(writer, use().encode())
        os._exit(0)
    os.close(writer)
    connection, hello = weaver.welcome()
    rows, goodbye = last_words(connection)
    with os.fdopen(reader) as answer:
        assert answer.read() == hello["instance"]
    os.waitpid(child, 0)

    assert (hello["replica"], [row[2] for row in rows], goodbye) == (
        "child",
        [2],
        ["it came to its end", "finished"],
    )


def test_importing_brings_neither_torch_nor_monarch_nor_psutil() -> None:
    text = (
        "import sys, loom.threadlet\n"
        "heavy = ('torch', 'monarch', 'numpy', 'psutil', 'pynvml', 'asyncio', 'loom_gateway', 'loom_proxy')\n"
        "print(sorted(set(sys.modules).intersection(heavy)))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=BOUND, check=True)

    assert done.stdout.strip() == "[]"


DAEMON = """
import os, time
from loom.threadlet import Threadlet

t = Threadlet("daemon_0", devices=())
while not t.connected:
    time.sleep(0.01)
os.closerange(3, 256)
t.publish_status(1)
t.close()
print("end")
"""


def test_a_program_that_closes_all_files_goes_on(weaver: FakeWeaver) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON],
        env={**os.environ, "LOOM_WEAVER": weaver.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    weaver.welcome()

    out, err = process.communicate(timeout=BOUND)

    assert (out, process.returncode) == ("end\n", 0)
    assert "Exception in thread" not in err
