"""Cells that run in the driver, as ``%%cluster`` sends them; in a kernel: `tests/system/test_notebook_cells.py`."""

from __future__ import annotations

import io
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError

import pytest

import loom
from loom.notebook import RUN_NAME, Record
from loom.wire.bodies import ListRuns
from loom_proxy.local import LocalCluster
from loom_proxy.notebook import cells
from loom_proxy.notebook.cells import MOST_TEXT, TAIL, CellView, interrupt, last, start
from loom_proxy.runs import KnownRuns
from tests.integration.session.http_sessions import port_of
from tests.integration.session.run_functions import IN_TIME, until_it_prints
from tests.support.gateways import await_true
from tests.support.kernels import Pipe
from tests.support.network.gate import Gate
from tests.support.users import House


class Counter(loom.Actor):
    def __init__(self) -> None:
        self.n = 0

    @loom.endpoint
    def add(self, k: int) -> int:
        self.n += k
        return self.n


@pytest.fixture(scope="module", autouse=True)
def counters(shared: loom.Job) -> loom.ActorMeshProxy[Counter]:
    return shared.hosts.spawn_procs(name="procs").spawn("counters", Counter)


def run(job: loom.Job, source: str) -> list[Record]:
    """Run a cell; return what it displays. What it prints is printed."""
    shown: list[Record] = []
    CellView(start(job, source), shown.append, interrupting=True).follow(IN_TIME)
    return shown


def value(job: loom.Job, source: str) -> object:
    """The plain text of the value of a cell's last expression, its only display."""
    (record,) = run(job, source)
    return record.data["text/plain"]


def traceback_of(error: BaseException) -> str:
    return "\n".join(error._render_traceback_())  # type: ignore[attr-defined]


# -- the namespace ------------------------------------------------------------------------------------------


def test_names_live_on_and_a_connection_that_attaches_later_finds_them(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as first:
        assert run(first, "n = 40\ndef more(k):\n    return n + k") == []
        assert value(first, "more(2)") == "42"
        first.detach()
    with loom.connect(cluster.url, cluster.token, session=first.session, take_over=True) as later:
        assert value(later, "more(_ - 41)") == "41"


def test_the_job_and_its_meshes_are_monarchs_own(shared: loom.Job) -> None:
    assert value(shared, "sorted(counters.add.call(1).get().values())") == "[1, 1]"
    assert value(shared, "type(job.meshes['counters']) is type(counters), len(job.hosts)") == "(True, 2)"
    assert value(shared, "job.session") == repr(shared.session)
    with pytest.raises(AttributeError, match="job has no 'weaver'; it has hosts, meshes and session"):
        run(shared, "job.weaver")


def test_a_mesh_that_is_made_later_is_there_and_one_that_was_stopped_is_not(tidied: loom.Job) -> None:
    extra = tidied.hosts.spawn_procs(name="extra")
    assert value(tidied, "len(extra)") == "2"
    extra.stop().get(IN_TIME)
    with pytest.raises(NameError):
        run(tidied, "extra")


def test_a_name_that_a_cell_assigns_hides_a_mesh(tidied: loom.Job) -> None:
    tidied.hosts.spawn_procs(name="hidden")
    assert run(tidied, "hidden = 5") == []
    assert value(tidied, "hidden, len(job.meshes['hidden'])") == "(5, 2)"


def test_an_actor_whose_class_a_cell_defines_runs_on_the_workers(shared: loom.Job) -> None:
    run(
        shared,
        """
from loom import Actor, endpoint
def helper(name):
    return f"hello {name}"
class Greeter(Actor):
    @endpoint
    def greet(self, name):
        return helper(name)
    @endpoint
    def fail(self):
        return 1 / 0
greeters = job.hosts.spawn_procs().spawn("greeters", Greeter)
""",
    )
    assert value(shared, "set(greeters.greet.call('ann').get().values())") == "{'hello ann'}"
    with pytest.raises(loom.ActorError, match="ZeroDivisionError"):
        run(shared, "greeters.slice(hosts=0).fail.call_one().get()")


# -- what a cell shows --------------------------------------------------------------------------------------


def test_prints_and_displays_come_in_their_order(shared: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def publish(record: Record) -> None:
        seen.append(capsys.readouterr().out)
        seen.append(record.data["text/plain"])

    CellView(start(shared, "print('a'); display(1, 2); print('b'); 3"), publish, interrupting=True).follow(IN_TIME)
    assert "".join(seen) == "a\n12b\n3"
    assert shared.runs()[RUN_NAME].output() == "a\nb\n"
    assert "".join(shared.runs()[RUN_NAME].follow()) == "a\nb\n"


def test_a_value_is_shown_in_its_rich_forms(shared: loom.Job) -> None:
    (record,) = run(
        shared,
        """
class Rich:
    def _repr_html_(self): return "<b>rich</b>"
    def _repr_png_(self): return b"png", {"width": 3}
    def __repr__(self): return "plain"
Rich()
""",
    )
    assert record.data == {"text/html": "<b>rich</b>", "image/png": "cG5n", "text/plain": "plain"}
    assert record.metadata == {"image/png": {"width": 3}}


def test_figures_are_shown_by_show_and_at_the_end_of_a_cell(shared: loom.Job) -> None:
    pytest.importorskip("matplotlib")
    shown = run(shared, "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nplt.plot([2, 1]);")
    assert [set(record.data) for record in shown] == [{"image/png", "text/plain"}] * 2
    assert run(shared, "plt.get_fignums();") == []


def test_await_works_at_top_level(shared: loom.Job) -> None:
    assert value(shared, "import asyncio\nawait asyncio.sleep(0)\nawait counters.slice(hosts=0).add.call_one(0)")
    assert value(shared, "[i async for i in (await asyncio.sleep(0, f) for f in ())]") == "[]"
    assert run(shared, "await asyncio.sleep(0, 5);") == []


def test_long_output_is_cut_and_its_end_is_shown(shared: loom.Job, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        run(shared, "for i in range(400):\n    print(f'{i:099999}')\nprint('the end')\n1/0")
    shown = capsys.readouterr()
    assert len(shown.out) <= MOST_TEXT + TAIL
    assert shown.out.endswith("\nthe end\n")
    assert "more than 4,194,304 characters" in shown.err or "characters of output dropped" in shown.err
    assert "----> 4    1/0" in traceback_of(raised.value)
    assert len(last(shared).output()) <= (1 << 20) + 100


def test_over_the_bounds_text_is_shown_at_the_end_and_displays_are_counted(
    shared: loom.Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, bound in [("MOST_TEXT", 10), ("TAIL", 5), ("MOST_RECORDS", 40)]:
        monkeypatch.setattr(cells, name, bound)
    seen: list[Record] = []
    source = "print('0123456789abcdef')\nprint('the end')\nfor n in range(3): display(n)\n1/0"
    with pytest.raises(ZeroDivisionError) as raised:
        CellView(start(shared, source), seen.append, interrupting=True).follow(IN_TIME)
    assert [record.data["text/plain"] for record in seen] == ["0"]
    shown = capsys.readouterr()
    assert shown.out == "0123456789 end\n"
    assert shown.err == (
        "\n… more than 10 characters; the last ones follow at the cell's end …\n"
        "… 2 displays left out: more than 40 characters …\n"
    )
    assert "----> 4    1/0" in traceback_of(raised.value)


def test_a_driver_of_an_older_loom_is_named(shared: loom.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared._calls, "knows_cells", False)
    with pytest.raises(loom.ProtocolMismatch, match=r"runs no cells: its Loom is \d.*; upgrade the gateway"):
        start(shared, "1")


# -- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raising", "kind", "text"),
    [
        (
            "from urllib.error import *\nraise HTTPError('http://x', 404, 'gone', {}, None)",
            HTTPError,
            "404: gone",
        ),
        ("import threading\ne = ValueError('x')\ne.lock = threading.Lock()\nraise e", ValueError, "ValueError: x"),
        ("class Own(KeyError): pass\ne = Own('k')\ne.__notes__ = ['noted']\nraise e", KeyError, "Own: 'k'"),
    ],
    ids=["no file", "lock", "a class of the cell"],
)
def test_what_a_cell_raises_arrives(shared: loom.Job, raising: str, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as raised:
        run(shared, raising)

    assert text in traceback_of(raised.value)


def test_what_a_cell_raises_is_shown_with_the_lines_of_its_cells(shared: loom.Job) -> None:
    run(shared, "def divide(a, b):\n    return a / b")
    with pytest.raises(ZeroDivisionError) as raised:
        run(
            shared,
            "there = 1\ntry:\n    divide(1, 0)\nexcept ZeroDivisionError as e:\n    raise e from ValueError('why')",
        )
    text = re.sub(r"cell \d+", "cell", traceback_of(raised.value))
    assert "ValueError: why\n\nThe above exception was the direct cause of the following exception:" in text
    assert "<%%cluster cell>, line 3\n      1    there = 1\n      2    try:\n----> 3        divide(1, 0)" in text
    assert "<%%cluster cell>, line 2, in divide\n      1    def divide(a, b):\n----> 2        return a / b" in text
    assert text.endswith("\nZeroDivisionError: division by zero")
    assert "loom" not in text
    assert value(shared, "there") == "1"


def test_a_syntax_error_names_its_line(shared: loom.Job) -> None:
    with pytest.raises(SyntaxError) as raised:
        run(shared, "x = 1\ny = = 2")
    assert "line 2\n    y = = 2\n" in traceback_of(raised.value)
    assert last(shared).status == "failed"


# -- one at a time, interrupts, and following ---------------------------------------------------------------


def test_a_second_cell_is_refused_while_one_runs(shared: loom.Job) -> None:
    running = start(shared, "import time\nprint('begun')\nwhile True: time.sleep(0.01)")
    until_it_prints(running, "begun")
    with pytest.raises(
        loom.RunNameTaken, match="still running, and a session runs one at a time: `%cluster --attach`"
    ):
        start(shared, "1")
    with pytest.raises(loom.WaitTimeout, match=r"still running after 0\.1 s: `%cluster --attach` follows it"):
        CellView(last(shared), print, interrupting=False).follow(0.1)
    interrupt(shared)
    with pytest.raises(loom.OperationCancelled, match="another program interrupted the cell"):
        CellView(last(shared), print, interrupting=False).follow(IN_TIME)
    with pytest.raises(loom.WrongState, match="no cell is running"):
        interrupt(shared)
    assert value(shared, "time.__name__") == "'time'"


def test_only_the_last_cell_is_kept_so_that_cells_push_out_no_other_run(shared: loom.Job) -> None:
    shared.run(int, detach=True, name="other").result(IN_TIME)
    for number in range(3):
        assert value(shared, f"{number}") == f"{number}"
    runs = shared._calls.ask(ListRuns()).get(IN_TIME)
    assert [name for _, name, *_ in runs if name in ("other", RUN_NAME)] == ["other", RUN_NAME]


def test_two_programs_that_start_a_cell_at_once_run_one(shared: loom.Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver itself refuses the second one: its program does not know of the first."""
    first = start(shared, "import time\nprint('begun')\nwhile True: time.sleep(0.01)")
    until_it_prints(first, "begun")
    with monkeypatch.context() as patch:
        patch.setattr(shared, "_runs", KnownRuns(shared._calls))
        patch.setattr(shared, "runs", dict)
        refused = start(shared, "1")
    with pytest.raises(loom.RunNameTaken, match="still running, and a session runs one at a time"):
        CellView(refused, print, interrupting=True).follow(IN_TIME)
    first.cancel()
    assert isinstance(first.exception(IN_TIME), loom.OperationCancelled)


def test_a_cell_whose_client_is_gone_is_followed_by_a_later_one(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "go"
    source = f"""
import os, time
display("begun")
print("waiting")
while not os.path.exists({str(path)!r}):
    time.sleep(0.01)
print("there")
display("ended")
"""
    first = loom.connect(cluster.url, cluster.token)
    until_it_prints(start(first, source), "waiting")
    first.detach()
    with loom.connect(cluster.url, cluster.token, session=first.session, take_over=True) as later:
        seen: list[str] = []

        def publish(record: Record) -> None:
            seen.append(record.data["text/plain"])
            path.touch()  # once it is followed

        CellView(last(later), publish, interrupting=False).follow(IN_TIME)
        assert seen == ["'begun'", "'ended'"]
        assert capsys.readouterr().out == "waiting\nthere\n"
        CellView(last(later), publish, interrupting=False).follow(IN_TIME)  # any number of times
        assert seen == ["'begun'", "'ended'"] * 2


def test_a_program_that_watches_follows_a_cell_with_many_displays_next_to_its_own(
    cluster: LocalCluster, shared: loom.Job, tmp_path: Path
) -> None:
    path = tmp_path / "go"
    source = f"""
import os, time
class Large:
    def _repr_html_(self): return "a" * (3 << 20)
    def __repr__(self): return "large"
for _ in range(5):
    display(Large())
while not os.path.exists({str(path)!r}):
    time.sleep(0.01)
display("end")
"""
    own: list[Record] = []
    seen: list[Record] = []

    def publish(record: Record) -> None:
        seen.append(record)
        if len(seen) == 5:
            path.touch()

    with (
        loom.connect(cluster.url, cluster.token, session=shared.session, mode="watch") as watching,
        ThreadPoolExecutor(1) as pool,
    ):
        following = pool.submit(CellView(start(shared, source), own.append, interrupting=True).follow, IN_TIME)
        await_true(lambda: RUN_NAME in watching.runs() and not last(watching).done(), IN_TIME)
        CellView(last(watching), publish, interrupting=False).follow(IN_TIME)
        following.result(IN_TIME)
        assert [record.data["text/plain"] for record in seen] == ["large"] * 5 + ["'end'"]
        assert own == seen
        CellView(last(watching), seen.append, interrupting=False).follow(IN_TIME)  # all at once
        assert seen[6:] == own
        assert last(shared).output() == ""
    assert not shared.closed


def test_a_cut_line_loses_nothing_of_what_a_cell_puts_out(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "go"
    with Gate(port_of(cluster)) as gate, loom.connect(f"ws://127.0.0.1:{gate.port}", cluster.token) as job:
        seen: list[str] = []

        def publish(record: Record) -> None:
            seen.append(record.data["text/plain"])
            if len(seen) == 1:
                gate.shut()
                path.touch()  # the cell goes on while the line is cut
                assert gate.knocked.wait(IN_TIME)
                gate.open()

        source = f"""
import os, time
display("before")
while not os.path.exists({str(path)!r}):
    time.sleep(0.01)
for number in range(1000):
    print(number)
display("after")
"""
        CellView(start(job, source), publish, interrupting=True).follow(IN_TIME)
        assert seen == ["'before'", "'after'"]
        assert capsys.readouterr().out == "".join(f"{number}\n" for number in range(1000))


class Impatient(io.StringIO):
    """A standard error whose user interrupts again on being told how."""

    def write(self, text: str) -> int:
        if "Interrupt again" in text:
            raise KeyboardInterrupt
        return super().write(text)


def test_a_second_interrupt_stops_waiting_for_a_cell_that_does_not_end(
    shared: loom.Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Pipe(tmp_path / "pipe")
    source = f"display('begun')\nwith open({pipe.path!r}, 'rb', 0) as gate:\n    gate.read(1)\nprint('not reached')"

    def press(record: Record) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", Impatient())
        with pytest.raises(KeyboardInterrupt, match="stopped waiting for the cell, which has not ended yet"):
            CellView(start(shared, source), press, interrupting=True).follow(IN_TIME)
    assert not last(shared).done()
    pipe.open()
    assert isinstance(last(shared).exception(IN_TIME), loom.OperationCancelled)
    assert last(shared).output() == ""


def test_a_driver_that_dies_says_so(cluster: LocalCluster) -> None:
    job = loom.connect(cluster.url, cluster.token)
    with pytest.raises(loom.SessionLost, match="its driver was killed by SIGKILL"):
        run(job, "import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(loom.SessionLost):
        run(job, "1")
    with pytest.raises(loom.SessionLost):
        loom.connect(cluster.url, cluster.token, session=job.session)


# -- who may ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_who_may_only_look_on_follows_a_cell_and_runs_none(cluster: LocalCluster, tmp_path: Path) -> None:
    house = House(list(cluster.workers), tmp_path)
    try:
        with house.connect("ann") as of_ann:
            of_ann.share("bob", "view")
            with pytest.raises(loom.ScopeError, match="view"):
                house.connect("bob", of_ann.session, take_over=True)
            with house.watch("bob", of_ann.session) as of_bob:
                with pytest.raises(loom.NoSuchRun, match="no cell has run in session"):
                    last(of_bob)
                assert value(of_ann, "secret = 5\nsecret") == "5"
                with pytest.raises(loom.ReadOnlySession, match="attach with mode='drive' to change something"):
                    start(of_bob, "secret")
                with pytest.raises(loom.ReadOnlySession):
                    interrupt(of_bob)
                shown: list[Record] = []
                CellView(last(of_bob), shown.append, interrupting=False).follow(IN_TIME)
                assert [record.data for record in shown] == [{"text/plain": "5"}]
        token = house.file.create("eve", "view")[1]
        with pytest.raises(loom.ScopeError, match="drive"):
            loom.connect(house.url, token)
    finally:
        house.gateway.close()


def test_two_threads_of_one_program_can_follow_the_same_cell(shared: loom.Job) -> None:
    run_ = start(shared, "7")
    shown: list[Record] = []
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(CellView(run_, shown.append, interrupting=False).follow, IN_TIME) for _ in "ab"]:
            done.result(IN_TIME)
    assert len(shown) == 2
    await_true(run_.done, IN_TIME)
