"""What Loom's names mean in a process that runs Monarch: exceptions that catch, classes that hold."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace

import monarch.actor
import pytest
from monarch._rust_bindings.monarch_hyperactor.handle import _new_handle_pair
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError as MonarchsSupervisionError
from monarch._src.actor.shape import NDSlice, Shape
from monarch.actor import Future

import loom
import loom.actor  # from here on `except` catches Monarch's
from loom.errors import catch_monarchs
from loom.in_cluster import be_base_of, in_cluster, time_out_with


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is an actor's, by the name of its main module."""
    main = SimpleNamespace(__spec__=SimpleNamespace(name="monarch._src.actor.bootstrap_main"))
    monkeypatch.setitem(sys.modules, "__main__", main)  # type: ignore[arg-type]


# Exceptions.


@pytest.mark.parametrize(
    ("error", "name", "other"),
    [
        (monarch.actor.ActorError(ValueError("bad")), "ActorError", "SupervisionError"),
        (MonarchsSupervisionError("lost"), "SupervisionError", "ActorError"),
    ],
    ids=["actor", "lost"],
)
def test_except_catches_what_monarch_raises(error: Exception, name: str, other: str) -> None:
    for caught_by in (getattr(loom, name), loom.LoomError, type(error)):
        with pytest.raises(caught_by) as caught:
            raise error
        assert caught.value is error
    assert not isinstance(error, getattr(loom, other))
    assert error.code == getattr(loom, name).code  # type: ignore[attr-defined]


def test_what_monarch_raises_is_and_travels_as_its_own_class() -> None:
    failed, lost = monarch.actor.ActorError(ValueError("bad"), "why"), MonarchsSupervisionError("lost")
    assert str(failed).startswith("why\n")
    assert str(lost) == "lost"

    failed_there, lost_there = pickle.loads(pickle.dumps((failed, lost)))

    assert type(failed_there) is monarch.actor.ActorError
    assert (failed_there.message, repr(failed_there.exception)) == ("why", "ValueError('bad')")
    assert failed_there.exception_formatted == failed.exception_formatted
    assert (type(lost_there), lost_there.args) == (MonarchsSupervisionError, ("lost",))


def test_a_class_of_another_layout_cannot_be_the_base() -> None:
    class Roomy(Exception):
        """Its objects can be referred to weakly, which no exception of Python's can."""

    class Monarchs(Exception):
        __slots__ = ()

    with pytest.raises(TypeError, match="layout"):
        be_base_of(Monarchs, Roomy)


ORDERS = {
    "errors first, as in a driver": "import loom.errors, monarch.actor; loom.errors.catch_monarchs()",
    "Monarch first, as in an actor": "import monarch.actor, loom.errors",
    "the names of an actor's class": "import loom.errors, loom.actor",
    "Monarch's package only": "import monarch, loom.errors",
}


@pytest.mark.parametrize("order", ORDERS)
def test_it_catches_in_whatever_order_the_two_are_imported(order: str) -> None:
    program = f"""
{ORDERS[order]}
import loom, monarch.actor
for _ in range(2):
    try:
        raise monarch.actor.ActorError(ValueError("bad"))
    except loom.ActorError:
        print("caught")
    loom.errors.catch_monarchs()  # a second time does nothing
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["caught", "caught"], done.stderr


def test_without_monarch_nothing_is_imported_for_it() -> None:
    program = "import loom, sys; loom.SupervisionError; print('monarch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


# Waits.


def test_a_wait_for_monarchs_future_times_out_as_one_for_looms() -> None:
    handle, completer = _new_handle_pair()
    future: Future[int] = Future._from_handle(handle)

    with pytest.raises(loom.WaitTimeout, match=r"no answer within 0.01 s; the operation goes on"):
        future.get(timeout=0.01)
    with pytest.raises(loom.WaitTimeout):
        future.result(0.01)

    completer.set_result(5)
    assert future.get(timeout=30) == 5
    catch_monarchs()
    assert not hasattr(Future.get.__wrapped__, "__wrapped__"), "wrapped twice"


def test_a_time_out_that_was_not_the_waits_is_raised_as_it_is() -> None:
    class Later(TimeoutError):
        pass

    for error, timeout in ((Later("own"), 30), (TimeoutError("the result's"), None)):
        handle, completer = _new_handle_pair()
        completer.set_exception(error)
        with pytest.raises(TimeoutError) as raised:
            Future._from_handle(handle).get(timeout)
        assert type(raised.value) is type(error)
    time_out_with(Later)  # changes nothing: the first one stays
    handle, completer = _new_handle_pair()
    with pytest.raises(loom.WaitTimeout):
        Future._from_handle(handle).get(0.0)
    completer.set_result(None)


# Classes.


def test_classes_hold_for_monarchs_of_the_same_name_only() -> None:
    future: Future[int] = Future._resolved(1)
    assert isinstance(future, loom.Future)
    assert issubclass(Future, loom.Future)
    assert not isinstance(future, loom.ValueMesh)
    assert not issubclass(Future, loom.HostMesh)
    assert issubclass(monarch.actor.ValueMesh, loom.ValueMesh)
    assert not isinstance(3, loom.Future)

    class Port:
        """A user's own class of a name that Monarch has."""

    assert not isinstance(Port(), loom.Port)


def test_on_the_laptop_points_and_commands_are_looms() -> None:
    assert not in_cluster()
    extent = loom.Extent(["a"], [2])
    shape = loom.Shape(["a"], loom.NDSlice.new_row_major([2]))
    made = (extent, loom.Point(1, extent), shape, shape.ndslice, loom.ValueMesh(shape, [1, 2]))
    assert {type(thing).__module__.partition(".")[0] for thing in made} == {"loom", "loom_proxy"}
    assert type(loom.default_bootstrap_cmd()).__module__ == "loom.bootstrap"


@pytest.mark.usefixtures("within")
def test_in_the_cluster_points_and_commands_are_monarchs() -> None:
    assert in_cluster()
    extent = loom.Extent(["a", "b"], [2, 3])
    point = loom.Point(4, extent)
    command = loom.default_bootstrap_cmd().with_env({"A": "b"})
    shape = loom.Shape(["a"], loom.NDSlice.new_row_major([2]))

    assert type(shape) is type(loom.Shape.unity()) is Shape
    assert type(shape.ndslice) is NDSlice
    assert isinstance(shape, loom.Shape)
    assert isinstance(shape.ndslice, loom.NDSlice)
    assert type(loom.ValueMesh.from_indexed(shape, [(1, 2), (0, 1)])) is monarch.actor.ValueMesh
    assert type(point) is monarch.actor.Point
    assert type(extent) is monarch.actor.Extent
    assert (point.rank, dict(point), isinstance(point, loom.Point)) == (4, {"a": 1, "b": 1}, True)
    assert type(command) is type(monarch.actor.default_bootstrap_cmd())
    assert command.env["A"] == "b"
    assert loom.BootstrapCommand(program="/bin/python").program == "/bin/python"


@pytest.mark.usefixtures("within")
def test_in_the_cluster_a_point_that_cannot_be_is_refused_by_monarch() -> None:
    with pytest.raises((IndexError, ValueError, OverflowError)):
        dict(loom.Point(9, loom.Extent(["a"], [2])))
