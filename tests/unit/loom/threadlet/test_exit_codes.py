"""Programs that Loom did not start, and a real weaver's process: how their ends are shown."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.loom.threadlet.fake_weaver import BOUND, FakeWeaver, eventually
from tests.unit.loom.weaver.raw_threadlet import WeaverProcess, running_weaver

NUMBERS = itertools.count()

BEGIN = """
    import atexit, os, signal, socket, sys, threading, time
    from loom.threadlet import Threadlet
    if os.environ["ELSEWHERE"]:  # as a process of another host, at which the weaver cannot look
        connect = socket.create_connection
        socket.create_connection = lambda *args: connect(*args, source_address=("127.0.0.2", 0))
    t = Threadlet(devices=[])
    t.publish_status(step=7{max_step})
    while not t.connected:
        time.sleep(0.01)
"""

FORK = """
    pid = os.fork()
    if not pid:
        sys.exit(5)
    os.waitpid(pid, 0)
"""

SAID = {
    "its end": ("", "completed", "it came to its end"),
    "sys.exit()": ("sys.exit()", "completed", "it came to its end"),
    "sys.exit(0)": ("sys.exit(0)", "completed", "it came to its end"),
    "sys.exit(256), which is 0": ("sys.exit(256)", "completed", "it came to its end"),
    "sys.exit(3)": ("sys.exit(3)", "crashed", "exit code 3"),
    "sys.exit(-1)": ("sys.exit(-1)", "crashed", "exit code 255"),
    "sys.exit of a text": ("sys.exit('no data')", "crashed", "exit code 1"),
    "raise SystemExit": ("raise SystemExit(4)", "crashed", "exit code 4"),
    "an exit code in a function": ("def main():\n        sys.exit(3)\n    main()", "crashed", "exit code 3"),
    "an exit in a step": ("with t.step(8):\n        sys.exit(3)", "crashed", "exit code 3"),
    "an exit in the block": ("with t:\n        sys.exit(3)", "crashed", "exit code 3"),
    "an exit with a text in the block": ("with t:\n        sys.exit('no')", "crashed", "exit code 1: no"),
    "an exception": ("raise ValueError('no data')", "crashed", "ValueError: no data"),
    "an interrupt": ("os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)", "crashed", "KeyboardInterrupt"),
    "an exit of a thread": (
        "one = threading.Thread(target=sys.exit, args=(3,))\n    one.start()\n    one.join()",
        "completed",
        "it came to its end",
    ),
    "a daemon that goes on": (
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "completed",
        "it came to its end",
    ),
    "an exit while a daemon goes on": (
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n    sys.exit(3)",
        "crashed",
        "exit code 3",
    ),
    "an exit code of a fork": (FORK.strip(), "completed", "it came to its end"),
    "an exit after a fork": (FORK.strip() + "\n    sys.exit(3)", "crashed", "exit code 3"),
    "an exit of a fork at the end": (
        "atexit.unregister(sys.modules['loom.threadlet.threadlet']._close_all)\n"
        "    atexit.register(lambda: os.fork() or os._exit(5))\n"
        "    atexit.register(sys.modules['loom.threadlet.threadlet']._close_all)\n    sys.exit(3)",
        "crashed",
        "exit code 3",
    ),
}
"""What a program does, how its end is told, and why."""

NOT_SAID = {
    "os._exit(3)": ("os._exit(3)", "crashed", "exit code 3"),
    "os._exit(0)": ("os._exit(0)", "ended early", "its program ended at step 7"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "crashed", "killed by SIGKILL"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "crashed", "killed by SIGSEGV"),
    "abort": ("os.abort()", "crashed", "killed by SIGABRT"),
    "an os._exit at the end": (
        "atexit.unregister(sys.modules['loom.threadlet.threadlet']._close_all)\n"
        "    atexit.register(os._exit, 6)\n"
        "    atexit.register(sys.modules['loom.threadlet.threadlet']._close_all)\n    sys.exit(3)",
        "crashed",
        "exit code 6",
    ),
}
"""The same for ends of which the process itself says nothing: the weaver looks, on its own host."""

QUICK = ("sys.exit(3)", "its end", "SIGKILL", "os._exit(3)")


@pytest.fixture(scope="module")
def weaver() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


def end(
    weaver: WeaverProcess, folder: Path, ending: str, elsewhere: bool, max_step: int | None = None
) -> dict[str, Any]:
    """The replica of a program that has ended."""
    name = f"train_{next(NUMBERS)}"
    path = folder / "program.py"
    text = BEGIN.format(max_step=f", max_step={max_step}" if max_step else "") + f"\n    {ending}\n"
    path.write_text(textwrap.dedent(text))
    environment = {
        **os.environ,
        "LOOM_WEAVER": weaver.address,
        "LOOM_REPLICA": name,
        "ELSEWHERE": "1" if elsewhere else "",
    }
    command = [sys.executable, str(path)]
    subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, timeout=BOUND, check=False)
    gateway = weaver.gateway()

    def ended() -> dict[str, Any] | None:
        replica: dict[str, Any] = gateway.ask("replica", id=name)
        return replica if replica["ending"] else None

    found: dict[str, Any] = eventually(ended)
    events = gateway.ask("events", replica=name)
    kinds = [event["kind"] for event in events if event["kind"] in ("failed", "finished")]
    assert kinds == [found["state"]]
    return found


def cases(table: dict[str, tuple[str, str, str]]) -> list[Any]:
    return [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in table]


@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
@pytest.mark.parametrize("name", cases(SAID))
def test_an_exit_code_is_told_by_the_process_itself(
    weaver: WeaverProcess, tmp_path: Path, name: str, elsewhere: bool
) -> None:
    ending, how, why = SAID[name]

    found = end(weaver, tmp_path, ending, elsewhere)

    assert (found["ending"], found["end_reason"]) == (how, why)
    assert found["state"] == ("failed" if how == "crashed" else "finished")
    assert found["died_of"] == (why if how == "crashed" else None)


@pytest.mark.parametrize("name", cases(NOT_SAID))
def test_the_weaver_looks_at_the_end_of_a_process_of_its_host(
    weaver: WeaverProcess, tmp_path: Path, name: str
) -> None:
    ending, how, why = NOT_SAID[name]

    found = end(weaver, tmp_path, ending, elsewhere=False)

    if how == "crashed" and found["exit"]["code"] is found["exit"]["signal"] is None:
        pytest.skip("Linux tells how another's child ended from 6.15 on")
    assert (found["ending"], found["end_reason"]) == (how, why)
    assert found["state"] == ("failed" if how == "crashed" else "finished")


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in NOT_SAID if "at the end" not in one])
def test_a_process_of_another_host_that_says_nothing_is_lost(
    weaver: WeaverProcess, tmp_path: Path, name: str
) -> None:
    found = end(weaver, tmp_path, NOT_SAID[name][0], elsewhere=True)

    assert (found["state"], found["ending"]) == ("failed", "lost")
    assert found["end_reason"].startswith("not connected for 3.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_step", "how", "why"),
    [
        (None, "unknown", "its program ended at step 7, without saying how"),
        (100, "ended early", "its program ended at step 7 of 100, without saying how"),
        (8, "completed", "it made its last step, and ended without saying how"),
    ],
)
@pytest.mark.parametrize("name", ["an os._exit at the end", "SIGPIPE is not ignored"])
def test_what_is_not_known_is_not_told(
    weaver: WeaverProcess, tmp_path: Path, name: str, max_step: int | None, how: str, why: str
) -> None:
    endings = {name: one[0] for name, one in NOT_SAID.items()}
    endings["SIGPIPE is not ignored"] = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n    sys.exit(3)"

    found = end(weaver, tmp_path, endings[name], elsewhere=True, max_step=max_step)

    assert (found["state"], found["ending"], found["end_reason"]) == ("finished", how, why)


@pytest.mark.slow
def test_another_program_in_the_place_of_a_replica_is_not_the_replica(
    weaver: WeaverProcess, tmp_path: Path
) -> None:
    found = end(weaver, tmp_path, f"os.execv({'/bin/sleep'!r}, ['sleep', '5'])", elsewhere=False)

    assert (found["state"], found["ending"]) == ("failed", "lost")


def test_an_older_weaver_gets_the_goodbye_that_it_knows(tmp_path: Path) -> None:
    fake = FakeWeaver()
    path = tmp_path / "program.py"
    path.write_text(
        "import sys\nfrom loom.threadlet import Threadlet\nt = Threadlet('a', devices=[])\nsys.exit(3)\n"
    )
    environment = {**os.environ, "LOOM_WEAVER": fake.address}
    with subprocess.Popen([sys.executable, str(path)], env=environment):
        connection, _ = fake.welcome(endings=True)
        assert connection.expect("bye")[1:] == ["it came to its end", "finished"]
        connection.close()
    fake.stop()
