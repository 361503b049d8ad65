"""`loom.process.child` and its parent pipe: a process that says when it is ready, and ends with its parent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path

import psutil
import pytest

from loom.errors import LoomError, PortInUse
from loom.process.child import Child, announcement, python
from tests.support.paths import ROOT

BOUND = 30.0

UNTIL_STDIN_CLOSES = """
import sys
from loom.process.listen import announce
print("starting", file=sys.stderr)
announce(url="ws://127.0.0.1:1")
print("running")
sys.stdin.read()
"""

IGNORES_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from loom.process.listen import announce
announce()
while True:
    signal.pause()
"""

PARENT = f"""
import os, sys
from loom.process.child import Child
child = Child("the child", [sys.executable, "-c", {UNTIL_STDIN_CLOSES!r}])
child.ready.result({BOUND})
print(child.pid, flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
copy = os.fork()
if copy == 0:
    import time
    time.sleep({BOUND})
print(copy, flush=True)
os._exit(0)
"""


def child_of(code: str, **options: object) -> Child:
    return Child("the child", [sys.executable, "-c", code], **options)  # type: ignore[arg-type]


def test_a_child_says_when_it_is_ready_and_ends_when_its_parent_pipe_is_cut() -> None:
    heard: list[str] = []
    child = child_of(UNTIL_STDIN_CLOSES, on_line=heard.append)

    assert child.ready.result(BOUND)["url"] == "ws://127.0.0.1:1"
    child.cut()
    assert child.ended.result(BOUND) == 0
    assert sorted(heard) == ["running", "starting"]
    assert sorted(child.output.splitlines()) == ["running", "starting"]


def test_a_child_without_a_parent_pipe_has_no_input() -> None:
    child = child_of(UNTIL_STDIN_CLOSES, parent_pipe=False)

    assert child.ended.result(BOUND) == 0
    child.cut()  # there is nothing to cut


def test_a_childs_errors_may_go_to_a_file(tmp_path: os.PathLike[str]) -> None:
    with open(os.path.join(tmp_path, "errors"), "w+b") as errors:
        child = child_of(UNTIL_STDIN_CLOSES, errors=errors.fileno(), parent_pipe=False)
        child.ended.result(BOUND)
        errors.seek(0)
        assert errors.read() == b"starting\n"
    assert child.output == "running"


def test_what_says_that_it_is_ready_is_for_the_caller_to_know() -> None:
    child = child_of("print('Forwarding from here')", understand=lambda line: {"line": line})

    assert child.ready.result(BOUND) == {"line": "Forwarding from here"}


def test_the_error_that_a_child_reports_is_the_callers() -> None:
    child = child_of("import sys; print('error: port 1 is in use', file=sys.stderr); sys.exit(3)")

    with pytest.raises(PortInUse, match="the child: port 1 is in use"):
        child.ready.result(BOUND)


@pytest.mark.parametrize(
    ("end", "how"), [("sys.exit(7)", "with exit code 7"), ("os.kill(os.getpid(), 9)", "by signal 9")]
)
def test_an_early_end_is_an_error_with_the_last_output(end: str, how: str) -> None:
    child = child_of(f"import os, sys; print('what it did', flush=True); {end}")

    with pytest.raises(
        LoomError, match=f"the child ended {how} before it was ready; its last output:\nwhat it did"
    ):
        child.ready.result(BOUND)


def test_a_child_that_does_not_end_is_killed() -> None:
    child = child_of(IGNORES_SIGTERM)
    child.ready.result(BOUND)

    child.ask_to_end()
    with pytest.raises(NotInTime):
        child.ended.result(0.2)
    child.end(grace=0.1)

    assert child.ended.result(0) == -signal.SIGKILL


def test_a_signal_ends_a_child() -> None:
    child = child_of(UNTIL_STDIN_CLOSES)
    child.ready.result(BOUND)

    child.signal(signal.SIGKILL)

    assert child.ended.result(BOUND) == -signal.SIGKILL
    child.signal(signal.SIGKILL)  # it has ended: that is no error


@pytest.mark.parametrize("how", ["killed", "forked"])
def test_a_child_ends_with_its_parent_also_if_a_copy_of_that_lives_on(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, how], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        copy = psutil.Process(int(parent.stdout.readline())) if how == "forked" else None
        parent.wait(BOUND)
        assert psutil.wait_procs([child], BOUND)[1] == []
        if copy is not None:
            assert copy.is_running()
            copy.kill()


@pytest.mark.parametrize("line", ["listening", "{", '{"event": "other"}', "[]", "{}"])
def test_other_lines_announce_nothing(line: str) -> None:
    assert announcement(line) is None


SHOWS = """
import json, sys
print(json.dumps([sys.path, sys.argv, __name__, __spec__.name, __file__]))
"""


@pytest.mark.parametrize("safe", [False, True])
def test_a_module_is_run_as_by_python_m_but_without_the_current_folder(tmp_path: Path, safe: bool) -> None:
    (tmp_path / "runpy.py").write_text("raise SystemError")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "shows.py").write_text(SHOWS)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "there")} | ({"PYTHONSAFEPATH": "1"} if safe else {})

    done = subprocess.run(
        python("shows", "--port", "0"), cwd=tmp_path, env=environment, capture_output=True, check=True
    )

    path, arguments, *named = json.loads(done.stdout)
    file = str(tmp_path / "there" / "shows.py")
    assert path[0] == str(tmp_path / "there")
    assert not [folder for folder in path if folder in ("", str(tmp_path)) or "process" in folder]
    assert arguments == [file, "--port", "0"]
    assert named == ["__main__", "shows", file]


def test_nothing_starts_a_module_in_another_way() -> None:
    sources = [path for part in ("loom", "proxy", "gateway") for path in (ROOT / part).rglob("*.py")]
    launched = re.compile(r"""\[sys\.executable,\s*(?!\s*"-I")""")
    others = [path.name for path in sources if launched.search(path.read_text())]
    modules = [path.name for path in sources if re.search(r"""(?<!"-I")[\[,]\s*["']-m["'],""", path.read_text())]

    assert len(sources) > 400
    assert (others, modules) == (["child.py"], [])
