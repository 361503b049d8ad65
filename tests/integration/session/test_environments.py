"""Programs in odd environments: each opens a session, calls an actor, and runs a function that prints."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import loom
from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from tests.support.actors import Counter

PROGRAM = """
import os, sys
import loom

class Counter(loom.Actor):
    @loom.endpoint
    def add(self, k):
        print("printed by an actor: \\N{SNOWMAN}")
        return k + 1

def speak():
    print("spoken in the cluster: \\N{SNOWMAN}")
    return 3

def main():
    url, token, result = os.environ["TEST_URL"], os.environ["TEST_TOKEN"], os.environ["TEST_RESULT"]
    with loom.connect(url, token) as job:
        counters = job.hosts.slice(hosts=0).spawn_procs().spawn("counters", Counter)
        outcome = job.run(speak) + counters.add.call_one(1).get(60)
    with open(result, "w") as file:
        file.write(str(outcome))
"""

_ODD = """class Odd:
    def write(self, text):
        raise ValueError("no")
    def flush(self):
        pass
sys.stdout = sys.stderr = Odd()
main()
"""

_FORKED = """pid = os.fork()
if pid == 0:
    main()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""

_PROCESS = """import multiprocessing
process = multiprocessing.get_context("fork").Process(target=main)
process.start()
process.join()
assert process.exitcode == 0
"""

_LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nmain()\n"
_BLOCKED = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nmain()\n"

START = {
    "": "main()\n",
    "in a thread": "import threading\nthread = threading.Thread(target=main)\nthread.start()\nthread.join()\n",
    "in an event loop": "import asyncio\nasync def on_loop():\n    main()\nasyncio.run(on_loop())\n",
    "traced": "def trace(*_):\n    return trace\nsys.settrace(trace)\nmain()\n",
    "profiled": "import cProfile\ncProfile.run('main()', os.devnull)\n",
    "with odd streams": _ODD,
    "without streams": "sys.stdin = sys.stdout = sys.stderr = None\nmain()\n",
    "with its folder removed": "os.mkdir('gone')\nos.chdir('gone')\nos.rmdir('../gone')\nmain()\n",
    "with few descriptors": _LIMIT,
    "with small stacks": "import threading\nthreading.stack_size(256 << 10)\nmain()\n",
    "with a low limit of recursion": "sys.setrecursionlimit(200)\nmain()\n",
    "with SIGINT ignored": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nmain()\n",
    "with SIGCHLD ignored": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nmain()\n",
    "with signals blocked": _BLOCKED,
    "with a closed stdout": "sys.stdout.close()\nmain()\n",
    "with the garbage collector off": "import gc\ngc.disable()\nmain()\n",
    "with a default timeout of sockets": "import socket\nsocket.setdefaulttimeout(5)\nmain()\n",
    "with another locale": "import locale\nlocale.setlocale(locale.LC_ALL, 'C')\nmain()\n",
    "with logging of everything": "import logging\nlogging.basicConfig(level=0)\nmain()\n",
    "in a forked child": _FORKED,
    "in a child of multiprocessing": _PROCESS,
}


@dataclass(frozen=True)
class Place:
    """What is special about the process of a program."""

    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables; None: there is none. ``{}`` stands for a folder of the test's own."""
    options: Sequence[str] = ()
    """Options of the interpreter."""
    start: str = ""
    """The last lines of the program, by the name in `START`."""
    how: str = "file"
    prepare: Callable[[Path], object] = lambda folder: None
    shell: str = 'exec "$@"'
    """A line that starts the command."""


def _read_only(folder: Path) -> None:
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)


def _junk(folder: Path) -> None:
    (folder / "uvicorn").mkdir()  # a namespace package, which hides nothing
    (folder / "broken.py").write_text("this is no Python")


def _long(folder: Path) -> None:
    (folder / ("long" * 50)).mkdir()


PLACES: dict[str, Place] = {
    "as usual": Place(),
    "no HOME": Place({"HOME": None}),
    "a HOME that is not there": Place({"HOME": "/nowhere"}),
    "a HOME that is read-only": Place({"HOME": "{}", "XDG_CONFIG_HOME": None}, prepare=_read_only),
    "no USER": Place({"USER": None, "LOGNAME": None}),
    "nothing but PATH": Place({name: None for name in os.environ if name != "PATH"}),
    "an empty PATH": Place({"PATH": ""}),
    "no PATH": Place({"PATH": None}),
    "the locale C": Place({"LC_ALL": "C", "LANG": "C"}),
    "the locale C without UTF-8": Place(
        {"LC_ALL": "C", "LANG": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    ),
    "streams in ASCII": Place({"PYTHONIOENCODING": "ascii:strict"}),
    "streams in Latin-1": Place({"PYTHONIOENCODING": "latin-1"}),
    "a locale that is not there": Place({"LC_ALL": "xx_XX.UTF-9"}),
    "a TMPDIR that is not there": Place({"TMPDIR": "/nowhere"}),
    "a TMPDIR that is read-only": Place({"TMPDIR": "{}"}, prepare=_read_only),
    "a long TMPDIR": Place({"TMPDIR": "{}/" + "long" * 50}, prepare=_long),
    "XDG folders that are not there": Place({"XDG_CONFIG_HOME": "/nowhere", "XDG_RUNTIME_DIR": "/nowhere"}),
    "relative XDG folders": Place({"XDG_CONFIG_HOME": "relative", "XDG_CACHE_HOME": "."}),
    "empty XDG folders": Place({"XDG_CONFIG_HOME": "", "XDG_STATE_HOME": ""}),
    "proxies": Place(
        {
            **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
            **dict.fromkeys(("all_proxy", "ALL_PROXY", "ws_proxy"), "socks5://127.0.0.1:9"),
        }
    ),
    "an odd time zone": Place({"TZ": "Mars/Olympus"}),
    "a dumb terminal": Place({"TERM": "dumb", "COLUMNS": "1", "LINES": "0"}),
    "a width that is no number": Place({"COLUMNS": "wide", "TERM": ""}),
    "forced colours": Place({"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}),
    "progress": Place({"LOOM_PROGRESS": "1"}),
    "a variable that is no text": Place({"ODD": "\udcff\udcfe"}),
    "optimised": Place(options=["-O"]),
    "optimised further": Place(options=["-OO"]),
    "isolated": Place(options=["-I"]),
    "a safe path": Place({"PYTHONSAFEPATH": "1"}),
    "no bytecode": Place({"PYTHONDONTWRITEBYTECODE": "1"}),
    "warnings are errors": Place({"PYTHONWARNINGS": "error"}),
    "the development mode": Place(options=["-X", "dev"]),
    "unbuffered": Place(options=["-u"]),
    "tracemalloc": Place(options=["-X", "tracemalloc"]),
    "fixed hashes": Place({"PYTHONHASHSEED": "0"}),
    "debug of asyncio": Place({"PYTHONASYNCIODEBUG": "1"}),
    "the allocator of malloc": Place({"PYTHONMALLOC": "malloc_debug"}),
    "python -c": Place(how="-c"),
    "python from standard input": Place(how="stdin"),
    "python -m": Place(how="-m"),
    "a zip file": Place(how="zip"),
    "a name that is no module's": Place(how="odd name"),
    "closed input": Place(shell='exec "$@" <&-'),
    "closed output": Place(shell='exec "$@" >&-'),
    "closed errors": Place(shell='exec "$@" 2>&-'),
    "nothing open": Place(shell='exec "$@" <&- >&- 2>&-'),
    "an output without a reader": Place(shell='{ "$@"; echo $? >"$TEST_RESULT.code"; } | true'),
    "a full output": Place(shell='exec "$@" >/dev/full 2>/dev/full'),
    "in the background": Place(shell='nohup "$@" & wait $!'),
    "a umask of 077": Place(shell='umask 077; exec "$@"'),
    "a umask of 777": Place(shell='umask 777; exec "$@"'),
    "a umask of 000": Place(shell='umask 000; exec "$@"'),
    "in a session of its own": Place(shell='setsid --wait "$@"'),
    "256 files": Place(shell='ulimit -n 256; exec "$@"'),
    "modules of no use on PYTHONPATH": Place({"PYTHONPATH": "/nowhere:{}:"}, prepare=_junk),
    "a working folder that is read-only": Place(shell='chmod 500 .; exec "$@"'),
    "a working folder that is gone": Place(shell='rmdir "$PWD"; exec "$@"'),
    "few files": Place(shell='ulimit -n 40; exec "$@"'),
    "no core, a small stack": Place(shell='ulimit -c 0; ulimit -s 1024; exec "$@"'),
    "a low priority": Place(shell='exec nice -n 19 "$@"'),
    **{start: Place(start=start) for start in START if start},
}

QUICK = {"as usual", "nothing open", "nothing but PATH", "without streams"}


def _command(place: Place, program: str, folder: Path) -> tuple[list[str], str | None]:
    text = (
        program
        + "\nif __name__ == '__main__':\n"
        + "".join(f"    {line}\n" for line in START[place.start].splitlines())
    )
    python = [sys.executable, *place.options]
    if place.how == "-c":
        return [*python, "-c", text], None
    if place.how == "stdin":
        return [*python, "-"], text
    name = "my program-2.txt" if place.how == "odd name" else "program.py"
    (folder / name).write_text(text)
    if place.how == "-m":
        return [*python, "-m", "program"], None
    if place.how == "zip":
        with zipfile.ZipFile(folder / "program.zip", "w") as packed:
            packed.writestr("__main__.py", text)
        return [*python, "program.zip"], None
    return [*python, name], None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLACES]
)
def test_a_program_has_its_result_in_every_environment(cluster: LocalCluster, tmp_path: Path, name: str) -> None:
    variables = {"TEST_URL": cluster.url, "TEST_TOKEN": cluster.token}
    _run_in(PLACES[name], PROGRAM, variables, tmp_path)


STARTS_CLUSTERS = (
    *("as usual", "no HOME", "no USER", "nothing but PATH", "an empty PATH", "the locale C without UTF-8"),
    *(
        "streams in ASCII",
        "a TMPDIR that is not there",
        "a long TMPDIR",
        "XDG folders that are not there",
        "proxies",
    ),
    *("optimised", "isolated", "a safe path", "warnings are errors", "nothing open", "a umask of 077"),
    *("with its folder removed",),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS_CLUSTERS)
def test_a_local_cluster_starts_and_its_actors_print_in_every_environment(tmp_path: Path, name: str) -> None:
    program = PROGRAM.replace("loom.connect(url, token)", "loom.local(hosts=1)")
    _run_in(PLACES[name], program, {"TEST_URL": "", "TEST_TOKEN": ""}, tmp_path)


STARTS_SERVERS = (
    *("as usual", "no HOME", "no USER", "nothing but PATH", "the locale C without UTF-8", "streams in ASCII"),
    *("a long TMPDIR", "a TMPDIR that is read-only", "XDG folders that are not there", "proxies"),
    *("an odd time zone", "optimised further", "no bytecode", "warnings are errors", "nothing open"),
    *("in the background", "in a session of its own", "a umask of 077", "a umask of 000"),
    *("256 files", "modules of no use on PYTHONPATH", "a working folder that is read-only"),
    "a working folder that is gone",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS_SERVERS)
def test_loom_up_serves_a_session_in_every_environment(tmp_path: Path, name: str) -> None:
    place = PLACES[name]
    folder, special = tmp_path / "folder", tmp_path / "special"
    folder.mkdir()
    special.mkdir()
    place.prepare(special)
    (port,), token = free_ports(1), "t" * 32
    up = "import sys; from loom.cli import main; sys.exit(main())"
    command = [sys.executable, *place.options, "-c", up, "up", "--port", str(port), "--token", token]
    with open(tmp_path / "printed", "w") as printed:
        started = subprocess.Popen(
            ["/bin/sh", "-c", place.shell, "sh", *command],
            cwd=folder,
            env=_variables(place, special),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"ws://127.0.0.1:{port}"
        with _connected(url, token, started, tmp_path / "printed") as job:
            counters = job.hosts.spawn_procs().spawn("counters", Counter, 1)
            assert (job.run(len, "abc"), counters.add.call_one(1).get(60)) == (3, 2)
            assert job.run(_in_a_program) == "5\n"
        for one in [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                if "up" in one.cmdline():
                    one.send_signal(signal.SIGTERM)
        started.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def _in_a_program() -> str:
    return subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True, check=True).stdout


def _connected(url: str, token: str, started: subprocess.Popen[bytes], printed: Path) -> loom.Job:
    until = time.monotonic() + 90.0
    while True:
        try:
            return loom.connect(url, token)
        except loom.LoomError:
            text = printed.read_text(errors="replace")
            assert started.poll() is None, text
            assert time.monotonic() < until, text
            time.sleep(0.2)


def _variables(place: Place, special: Path) -> dict[str, str]:
    """Return the environment of a program in a place."""
    variables = dict(os.environ)
    for variable, value in place.variables.items():
        variables.pop(variable, None)
        if value is not None:
            variables[variable] = value.replace("{}", str(special))
    return variables


def _run_in(place: Place, program: str, given_variables: Mapping[str, str], tmp_path: Path) -> None:
    """Run a program, and check the result that it writes."""
    folder, special = tmp_path / "folder", tmp_path / "special"
    folder.mkdir()
    special.mkdir()
    place.prepare(special)
    variables = {**_variables(place, special), **given_variables, "TEST_RESULT": str(tmp_path / "result")}
    command, given = _command(place, program, folder)
    with open(tmp_path / "printed", "w") as printed:
        done = subprocess.run(
            ["/bin/sh", "-c", place.shell, "sh", *command],
            cwd=folder,
            env=variables,
            input=given or "",
            stdout=printed,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
    result = tmp_path / "result"
    seen = (done.returncode, (tmp_path / "printed").read_text(errors="replace"))
    assert result.exists(), seen
    result.chmod(0o600)  # whatever the umask was
    assert (result.read_text(), done.returncode) == ("5", 0), seen
