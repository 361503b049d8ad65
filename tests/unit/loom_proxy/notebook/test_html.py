"""What a notebook shows, and what the laptop knows of the states of a mesh's elements. No cluster."""

from __future__ import annotations

import gc
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest

import loom
from loom.errors import ActorError, SessionClosed, SupervisionError
from loom.shape import Shape
from loom.signatures import endpoints
from loom.wire.bodies import AwaitInitialized, Call, CallOne, Choose, StreamCall
from loom.wire.body import Body
from loom_proxy.futures.future import FutureProxy
from loom_proxy.mesh.actors import ActorMeshProxy
from loom_proxy.mesh.base import WholeMesh
from loom_proxy.mesh.procs import HostMeshProxy, ProcMeshProxy
from loom_proxy.mesh.rank_states import MOST_UNKNOWN, MeshStates, RankState
from loom_proxy.mesh.values import ValueMeshProxy
from loom_proxy.notebook.html import job_html
from tests.unit.loom_proxy.session.silence import Silence


class Connection(Silence):
    """What meshes and futures ask of a connection."""

    def __init__(self) -> None:
        super().__init__()
        self.states = MeshStates()
        self.wholes: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.welcome = SimpleNamespace(session="session-1")
        self.meshes: dict[str, Any] = {}
        self.error: Exception | None = None
        self._ids = iter(range(100, 1000))

    def send(self, *_: Any) -> int:
        return next(self._ids)

    def note_stopped(self, ident: int) -> None: ...

    def ask(self, *_: Any) -> FutureProxy[Any]:
        return FutureProxy(self)  # type: ignore[arg-type]


class Html(HTMLParser):
    """Reads HTML strictly, as far as matters: every tag is closed, and what text and attributes there are."""

    _NO_END = frozenset({"br", "img"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self._NO_END:
            self.open.append(tag)
        self.titles += [value or "" for name, value in attrs if name == "title"]
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class Echo(loom.Actor):
    @loom.endpoint
    def echo(self, value: Any) -> Any:
        return value


PROCS, ACTORS = 1, 2


@pytest.fixture
def connection() -> Connection:
    return Connection()


def proc_mesh(connection: Any, name: str = "trainers", **sizes: int) -> ProcMeshProxy:
    return ProcMeshProxy(WholeMesh(connection, PROCS, name, Shape.row_major(sizes or {"hosts": 2, "gpus": 2})))


def actor_mesh(connection: Any, procs: ProcMeshProxy, name: str = "echoes") -> ActorMeshProxy:
    whole = WholeMesh(connection, ACTORS, name, procs._shape, PROCS)
    return ActorMeshProxy(whole, class_name="Echo", signatures=endpoints(Echo), cls=Echo)


def states(mesh: Any) -> list[str]:
    whole = mesh._whole
    return [state.value for state, _ in whole.caller.states.of(whole.ident, mesh._shape.ranks())]


# -- states -------------------------------------------------------------------------------------------------


def test_a_new_mesh_is_starting_and_the_hosts_are_alive(connection: Any) -> None:
    hosts = HostMeshProxy(WholeMesh(connection, 0, "hosts", Shape.row_major({"hosts": 2})))
    assert states(hosts) == ["alive", "alive"]
    assert states(proc_mesh(connection)) == ["starting"] * 4


@pytest.mark.parametrize("operation", [Call(ACTORS, "echo"), AwaitInitialized(ACTORS)])
def test_an_answer_of_all_actors_shows_that_they_and_their_processes_live(connection: Any, operation: Body) -> None:
    procs = proc_mesh(connection)
    actors = actor_mesh(connection, procs)
    connection.states.answered(operation)
    assert states(actors) == states(procs) == ["alive"] * 4
    assert connection.states.unseen == {PROCS}


def test_an_answer_of_a_slice_says_nothing_of_the_others(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    part = actors.slice(hosts=1)
    connection.states.answered(Call(part._ident, "echo"))
    assert states(actors) == ["starting", "starting", "alive", "alive"]
    assert states(part) == ["alive", "alive"]


def test_each_result_of_a_stream_shows_one_actor(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    connection.states.answered(StreamCall(ACTORS, "echo"), 2)
    assert states(actors) == ["starting", "starting", "alive", "starting"]


def test_whichever_actor_was_chosen_is_not_known(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    connection.states.answered(Choose(ACTORS, "echo"))
    assert states(actors) == ["starting"] * 4


def test_a_call_to_one_actor_that_fails_by_supervision_shows_which_is_dead(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    one = actors.slice(hosts=0, gpus=1)
    connection.states.failed(CallOne(one._ident, "echo"), SupervisionError.code, "it died")
    connection.states.failed(Call(ACTORS, "echo"), SupervisionError.code, "one of them died")
    assert states(actors) == ["starting", "failed", "starting", "starting"]
    assert "it died" in actors._repr_html_()


def test_an_actor_that_raises_lives(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    one = actors.slice(hosts=0, gpus=1)
    connection.states.failed(CallOne(one._ident, "echo"), ActorError.code, "it raised")
    assert states(one) == ["alive"]


def test_processes_that_start_or_are_lost_are_told_by_events(connection: Any) -> None:
    procs = proc_mesh(connection)
    connection.states.event("processes_started", {"id": PROCS, "ranks": [0, 3]})
    connection.states.event("process_lost", {"mesh": "trainers", "id": PROCS, "rank": 3, "actors": []})
    actors = actor_mesh(connection, procs)
    assert states(procs) == ["alive", "starting", "starting", "failed"]
    assert states(actors) == ["starting", "starting", "starting", "failed"]
    assert connection.states.started(ACTORS) == (2, 4)


def test_processes_that_were_stopped_by_whatever_means_are_told_by_events(connection: Any) -> None:
    procs = proc_mesh(connection)
    connection.states.event("processes_stopped", {"id": PROCS, "ranks": [0, 1]})
    connection.states.event("processes_stopped", {"id": 77, "ranks": [0]})
    assert states(actor_mesh(connection, procs)) == ["stopped", "stopped", "starting", "starting"]


def test_what_was_told_before_a_mesh_was_known_is_kept(connection: Any) -> None:
    connection.states.event("processes_started", {"id": PROCS, "ranks": [0, 1, 2]})
    connection.states.event("process_lost", {"mesh": "trainers", "id": PROCS, "rank": 1, "actors": [ACTORS]})
    assert states(proc_mesh(connection)) == ["alive", "failed", "alive", "starting"]


def test_a_lost_host_is_shown(connection: Any) -> None:
    hosts = HostMeshProxy(WholeMesh(connection, 0, "hosts", Shape.row_major({"hosts": 2})))
    connection.states.event("host_lost", {"host": 1, "address": "tcp://10.0.0.6:26600"})
    assert states(hosts) == ["alive", "failed"]


def test_a_fault_that_monarch_reports_marks_the_element_that_the_driver_names(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    report = {"mesh": "echoes-4xYz", "report": "The actor echoes{…} failed"}
    connection.states.event("failure", {**report, "id": ACTORS, "ranks": [2]})
    assert states(actors) == ["starting", "starting", "failed", "starting"]


def test_a_report_that_names_no_element_marks_nothing(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    connection.states.event("failure", {"mesh": "echoes-4xYz", "report": "something has failed"})
    connection.states.event("failure", {"mesh": "others-4xYz", "report": "failed", "id": 77, "ranks": [0]})
    assert states(actors) == ["starting"] * 4


def test_stopping_processes_stops_the_actors_on_them(connection: Any) -> None:
    procs = proc_mesh(connection)
    actors = actor_mesh(connection, procs)
    procs.slice(hosts=0).stop()
    assert states(procs) == states(actors) == ["stopped", "stopped", "starting", "starting"]


def test_stopping_actors_leaves_their_processes(connection: Any) -> None:
    procs = proc_mesh(connection)
    actors = actor_mesh(connection, procs)
    connection.states.answered(Call(ACTORS, "echo"))
    actors.stop()
    assert states(actors) == ["stopped"] * 4
    assert states(procs) == ["alive"] * 4


def test_a_mesh_that_could_not_be_made_has_failed(connection: Any) -> None:
    procs = proc_mesh(connection)
    connection.states.not_made(PROCS, "no such host")
    connection.states.not_made(77, "no mesh at all")
    assert states(procs) == ["failed"] * 4


def test_a_mesh_whose_proxies_are_garbage_leaves_nothing_behind(connection: Any) -> None:
    procs = proc_mesh(connection)
    assert procs.slice(hosts=0)._ident in connection.states.unseen
    del procs
    gc.collect()
    connection.states.answered(Call(PROCS, "echo"))
    assert connection.states.name_and_shape(PROCS) is None
    assert connection.states.unseen == set()


def test_events_of_meshes_without_a_proxy_are_kept_of_the_last_ones_only(connection: Any) -> None:
    for ident in range(PROCS, PROCS + MOST_UNKNOWN + 1):
        connection.states.event("processes_started", {"id": ident, "ranks": [0]})
    assert connection.states.of(PROCS + 1, [0]) == [(RankState.ALIVE, "")]
    assert connection.states.of(PROCS, [0]) == [(RankState.STARTING, "")]


# -- the grid of a mesh -------------------------------------------------------------------------------------


def test_a_mesh_is_a_grid_with_a_row_for_each_host(connection: Any) -> None:
    procs = proc_mesh(connection)
    connection.states.event("processes_started", {"id": PROCS, "ranks": [0, 1, 2]})
    connection.states.event("process_lost", {"mesh": "trainers", "id": PROCS, "rank": 1, "actors": []})
    page = Html(procs._repr_html_())
    assert page.tags.count("td") == 4
    assert page.tags.count("tr") == 3
    assert "4 processes: 1 starting, 2 alive, 1 failed" in page.text
    assert "✕1" in page.text
    assert page.titles[0] == "hosts 0, gpus 0: alive"
    assert page.titles[1] == "hosts 0, gpus 1: failed (process 1 of proc mesh 'trainers' is gone)"


@pytest.mark.parametrize(
    ("sizes", "rows"), [({"a": 3}, 2), ({"a": 1}, 1), ({"a": 2, "b": 3, "c": 4}, 7), ({"a": 2, "b": 40}, 4)]
)
def test_grids_of_other_dimensions(connection: Any, sizes: dict[str, int], rows: int) -> None:
    page = Html(proc_mesh(connection, **sizes)._repr_html_())
    assert page.tags.count("tr") == rows


def test_a_single_element_has_a_grid_too(connection: Any) -> None:
    page = Html(proc_mesh(connection).slice(hosts=1, gpus=0)._repr_html_())
    assert page.tags.count("td") == 1
    assert "part of {hosts: 2, gpus: 2}" in page.text
    assert "1 process: 1 starting" in page.text


def test_a_large_mesh_is_cut_and_counted(connection: Any) -> None:
    html = proc_mesh(connection, hosts=512, gpus=8)._repr_html_()
    page = Html(html)
    assert page.tags.count("td") == 512
    assert "… and 3,584 more" in page.text
    assert "4,096 processes: 4,096 starting" in page.text
    assert len(html) < 300_000


def test_names_are_escaped(connection: Any) -> None:
    procs = proc_mesh(connection, "<script>alert('x')</script>", **{"<b>": 2})
    connection.states.not_made(PROCS, "<img src=x onerror=alert(1)>")
    html = procs._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert "<script>alert('x')</script>" in Html(html).text


def test_a_mesh_of_a_session_that_is_over_says_so(connection: Any) -> None:
    procs = proc_mesh(connection)
    connection.error = SessionClosed("session 'x' was closed here")
    assert "as last seen: session 'x' was closed here" in Html(procs._repr_html_()).text


def test_an_actor_mesh_names_its_class_whatever_its_endpoints_are_called(connection: Any) -> None:
    class Odd(loom.Actor):
        @loom.endpoint
        def class_name(self) -> None: ...

    procs = proc_mesh(connection)
    whole = WholeMesh(connection, ACTORS, "odd", procs._shape, PROCS)
    odd = ActorMeshProxy(whole, class_name="Odd", signatures=endpoints(Odd), cls=Odd)
    assert "odd of Odd" in Html(odd._repr_html_()).text


def test_an_endpoint_shows_its_signature(connection: Any) -> None:
    text = Html(actor_mesh(connection, proc_mesh(connection)).echo._repr_html_()).text
    assert "Echo.echo(value)" in text
    assert "echoes" in text


def test_jupyter_finds_no_method_that_an_actor_mesh_does_not_have(connection: Any) -> None:
    actors = actor_mesh(connection, proc_mesh(connection))
    for name in (
        "_ipython_display_",
        "_ipython_canary_method_should_not_exist_",
        "_repr_png_",
    ):
        assert not hasattr(actors, name)


# -- values -------------------------------------------------------------------------------------------------


def value_mesh(*values: Any) -> ValueMeshProxy[Any]:
    return ValueMeshProxy(Shape.row_major({"hosts": len(values)}), values)


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Array:
    """Stands for an array of numpy or torch, whose repr would be long in the making."""

    shape = (1000, 3)
    dtype = "float32"

    def __repr__(self) -> str:
        raise AssertionError("not asked for")


def test_values_are_shown_short_and_in_full_under_the_pointer() -> None:
    page = Html(value_mesh(1, "x" * 1000, list(range(100_000)), bytes(10_000_000))._repr_html_())
    assert page.tags.count("td") == 4
    assert page.titles[0] == "hosts 0: 1"
    assert max(map(len, page.titles)) < 450
    assert page.titles[3] == "hosts 3: bytes of 10,000,000 bytes"
    assert len(page.text) < 400


def test_values_that_cannot_be_shown_do_not_break_the_others() -> None:
    page = Html(value_mesh(Unprintable(), Array(), {"<b>": "<script>"})._repr_html_())
    assert "Unprintable" in page.titles[0]
    assert page.titles[1] == "hosts 1: Array(1000, 3) float32"
    assert "{'<b>': '<script>'}" in page.titles[2]


def test_a_large_value_mesh_is_cut() -> None:
    page = Html(value_mesh(*range(2000))._repr_html_())
    assert page.tags.count("td") == 512
    assert "… and 1,488 more" in page.text


# -- futures ------------------------------------------------------------------------------------------------


@pytest.fixture
def future(connection: Any) -> FutureProxy[Any]:
    return FutureProxy(connection)


def test_a_future_shows_its_state_and_is_not_waited_for(future: FutureProxy[Any]) -> None:
    assert "pending" in Html(future._repr_html_()).text

    future._complete(lambda: "<b>the value</b>", 3.0)

    assert "arrived" in Html(future._repr_html_()).text
    future.get()
    page = Html(future._repr_html_())
    assert "<b>the value</b>" in page.text
    assert "3.0 ms in the cluster" in page.text


def test_a_future_shows_the_value_mesh_that_it_gave(future: FutureProxy[Any]) -> None:
    future._complete(lambda: value_mesh(1, 2))
    future.get()
    assert "ValueMesh" in Html(future._repr_html_()).text


def test_a_future_shows_how_it_failed(future: FutureProxy[Any]) -> None:
    def fail() -> None:
        raise SupervisionError("<gone>" + "x" * 10_000)

    future._complete(fail)
    future.exception()
    page = Html(future._repr_html_())
    assert "SupervisionError: <gone>" in page.text
    assert len(page.text) < 2000


# -- a job --------------------------------------------------------------------------------------------------


def test_a_job_shows_its_hosts_and_meshes(connection: Any) -> None:
    hosts = HostMeshProxy(WholeMesh(connection, 0, "hosts", Shape.row_major({"hosts": 2})))
    connection.meshes["trainers"] = proc_mesh(connection)
    meshes = {name: (repr(mesh), mesh._panel()) for name, mesh in connection.meshes.items()}
    text = Html(job_html("Job session-1", "open, at ws://host:8470", hosts._panel(), meshes)).text
    assert "session-1" in text
    assert "2 hosts: 2 alive" in text
    assert "trainers" in text


def test_every_state_has_a_colour_and_a_sign() -> None:
    from loom_proxy.notebook.html import _COLOURS, _SIGNS

    assert set(_COLOURS) == set(_SIGNS) == set(RankState)
    assert len({*_COLOURS.values()}) == len({*_SIGNS.values()}) == len(RankState)
