"""``%%cluster`` and ``%cluster`` in a real Jupyter kernel; `tests/integration/session/test_cells.py` has none."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster
from tests.support.kernels import Kernel, Output, Pipe, waits

SETUP = """
%load_ext loom
import loom
class Counter(loom.Actor):
    def __init__(self):
        self.n = 0
    @loom.endpoint
    def add(self, k):
        self.n += k
        return self.n
job = loom.connect()
counters = job.hosts.spawn_procs(name="procs").spawn("counters", Counter)
"""

WAIT = """
import os
print("waiting")
with open({path!r}, "rb", 0) as gate:
    gate.read(1)
"""


@pytest.fixture(scope="module")
def environment(cluster: LocalCluster) -> dict[str, str]:
    return {"LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token}


@pytest.fixture(scope="module")
def kernel(environment: dict[str, str]) -> Iterator[Kernel]:
    """A kernel with a session, which every test leaves usable."""
    kernel = Kernel(environment)
    try:
        assert "no job is open in this notebook" in kernel.run("%load_ext loom\n%cluster --attach").traceback
        kernel.check(SETUP)
        yield kernel
        kernel.check("job.close()")
    finally:
        kernel.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Pipe:
    return Pipe(tmp_path / "pipe")


def plain(output: Output) -> list[str]:
    return [shown["text/plain"] for shown in output.shown]


def test_a_cell_runs_next_to_the_meshes_and_its_names_live_on(kernel: Kernel) -> None:
    kernel.check("counters.add.call(40).get()")
    output = kernel.check(
        "%%cluster\nfor _ in range(2):\n    total = counters.add.call(1).get()\nsorted(total.values())"
    )
    assert plain(output) == ["[42, 42]"]
    assert kernel.check("%%cluster --job job\nprint(total.extent, job.session)").stdout.startswith(
        "{hosts: 2} session"
    )
    assert kernel.run("total").error == "NameError"  # it is there, not here


def test_prints_come_while_the_cell_runs_and_displays_are_rich(kernel: Kernel, pipe: Pipe) -> None:
    source = f"""%%cluster
import sys
class Rich:
    def _repr_html_(self): return "<b>rich</b>"
    def __repr__(self): return "plain"
display(Rich())
print("to the errors", file=sys.stderr)
{WAIT.format(path=pipe.path)}
Rich()"""

    def let_go_on(output: Output) -> bool:
        if waits(output) and len(output.shown) == 1:
            pipe.open()
        return False

    output = kernel.run(source, until=let_go_on)
    assert output.error == ""
    assert output.shown == [{"text/html": "<b>rich</b>", "text/plain": "plain"}] * 2
    assert (output.stdout, output.stderr) == ("waiting\n", "to the errors\n")


def test_what_a_cell_raises_is_shown_with_its_lines(kernel: Kernel) -> None:
    output = kernel.run("%%cluster\nkept = 1\n1 / (kept - 1)")
    assert output.error == "ZeroDivisionError"
    text = re.sub(r"cell \d+", "cell", output.traceback)
    assert "<%%cluster cell>, line 2\n      1    kept = 1\n----> 2    1 / (kept - 1)" in text
    assert "loom_proxy" not in text
    assert plain(kernel.check("%%cluster\nkept")) == ["1"]
    assert kernel.run("%%cluster\nx = = 1").error == "SyntaxError"


def test_await_works_at_top_level(kernel: Kernel) -> None:
    source = (
        "%%cluster\nawait counters.slice(hosts=0).add.call_one(0) - await counters.slice(hosts=1).add.call_one(0)"
    )
    assert plain(kernel.check(source)) == ["0"]


@pytest.mark.parametrize(
    "code",
    [
        "print('waiting')\nwhile True:\n    pass",
        "import asyncio\nprint('waiting')\nawait asyncio.sleep(3600)",
    ],
    ids=["def", "await"],
)
def test_an_interrupt_ends_the_cell_in_the_cluster(kernel: Kernel, code: str) -> None:
    output = kernel.run(f"%%cluster\n{code}", until=waits)
    assert output.error == "KeyboardInterrupt"
    assert "the cell was interrupted in the cluster" in output.traceback
    assert f"----> {len(code.splitlines())}" in output.traceback or "----> 2" in output.traceback
    assert plain(kernel.check("%%cluster\n5")) == ["5"]


def test_a_cell_that_is_not_waited_for_can_be_followed_and_interrupted(kernel: Kernel, pipe: Pipe) -> None:
    cell = f"%%cluster --timeout 0.5\n{WAIT.format(path=pipe.path)}\nprint('there')"
    late = kernel.run(cell)
    assert late.error == "WaitTimeout"
    assert late.traceback == (
        "WaitTimeout: the cell is still running after 0.5 s: `%cluster --attach` follows it, "
        "`%cluster --interrupt` interrupts it"
    )
    assert "a session runs one at a time" in kernel.run("%%cluster\n1").traceback
    stopped = kernel.run("%cluster --attach", until=waits)
    assert stopped.error == "KeyboardInterrupt"
    assert "stopped following the cell, which goes on in the cluster" in stopped.traceback
    kernel.check("%cluster --interrupt")
    pipe.open()  # it reads, and then runs Python code
    ended = kernel.run("%cluster --attach")
    assert ended.error == "OperationCancelled"
    assert ended.stdout == "waiting\n"
    assert "no cell is running" in kernel.run("%cluster --interrupt").traceback


def test_with_several_jobs_one_is_named(kernel: Kernel) -> None:
    kernel.check("%%cluster\n'the cell of job'")
    kernel.check('looking = loom.connect(session=job.session, mode="watch"); other = loom.connect()')
    refused = kernel.run("%%cluster\n1")
    assert refused.error == "WrongState"
    assert "several jobs are open; --job NAME takes one of: " in refused.traceback
    assert "other (session " in refused.traceback
    assert "no open job is called 'nobody'" in kernel.run("%%cluster --job nobody\n1").traceback
    assert "attach with mode='drive'" in kernel.run("%%cluster --job looking\n1").traceback
    assert plain(kernel.check("%cluster --attach --job looking")) == ["'the cell of job'"]
    assert "no cell has run in session" in kernel.run("%cluster --attach --job other").traceback
    kernel.check("looking.detach(); other.close(); del looking, other")
    assert plain(kernel.check("%cluster --attach")) == ["'the cell of job'"]


@pytest.mark.parametrize(
    "code",
    [
        "%cluster",
        "%cluster --attach --interrupt",
        "%%cluster --attach\n1",
        "%%cluster --timeout x\n1",
        "%%cluster --timeout -1\n1",
        "%%cluster --job 'a\n1",
        "%%cluster job\n1",
    ],
)
def test_a_wrong_use_names_the_right_ones(kernel: Kernel, code: str) -> None:
    output = kernel.run(code)
    assert "UsageError: " in output.stderr
    assert "%cluster --attach [--job NAME] [--timeout SECONDS]" in output.stderr


class Dead(Exception):
    """The kernel has ended."""


@pytest.mark.parametrize("end", ["killed", "restarted"])
def test_a_cell_whose_kernel_ended_is_followed_from_another_one(
    environment: dict[str, str], pipe: Pipe, end: str
) -> None:
    first = Kernel(environment)

    def kill(output: Output) -> bool:
        if not waits(output):
            return False
        if end == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            first.manager.shutdown_kernel()  # interrupts it, as a restart does
        raise Dead

    try:
        session = first.check(
            "%load_ext loom\nimport loom\njob = loom.connect()\nprint(job.session)"
        ).stdout.strip()
        pid = int(first.check("import os\nprint(os.getpid())").stdout)
        with pytest.raises(Dead):
            first.run(f"%%cluster\nkept = 3\ndisplay('begun')\n{WAIT.format(path=pipe.path)}\nkept + 1", until=kill)
    finally:
        first.close()

    def let_go_on(output: Output) -> bool:
        if waits(output):
            pipe.open()
        return False

    second = Kernel(environment)
    try:
        second.check(f"%load_ext loom\nimport loom\njob = loom.connect(session={session!r}, take_over=True)")
        output = second.run("%cluster --attach", until=let_go_on)
        assert (output.error, output.stdout, plain(output)) == ("", "waiting\n", ["'begun'", "4"])
        assert plain(second.check("%%cluster\nkept")) == ["3"]
        dead = second.run("%%cluster\nos.kill(os.getpid(), 9)")
        assert dead.error == "SessionLost"
        assert dead.traceback.startswith("SessionLost: ")
    finally:
        second.close()
