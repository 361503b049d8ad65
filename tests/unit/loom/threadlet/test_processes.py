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

from loom.threadlet import Threadlet
from tests.unit.loom.threadlet.fake_weaver import BOUND, Connection, FakeWeaver, eventually

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
    "an interrupt": ("raise KeyboardInterrupt", ["KeyboardInterrupt: ", "failed"]),
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
