"""Exceptions on their way between processes: what arrives of each kind."""

from __future__ import annotations

import builtins
import pickle
import socket
import sys
import threading
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loom.errors import ActorError, RemoteException
from loom.wire.codec import Encoder, loads
from loom.wire.exceptions import LARGEST_SPARE, MOST_EXCEPTIONS, describe, formatted, is_plain, last_lines, rebuild
from tests.support.standard_exceptions import instance, standard_exceptions

encoder = Encoder()


def arrived(error: BaseException) -> BaseException:
    """The exception after its way: through a description that itself is a plain pickle."""
    return rebuild(pickle.loads(pickle.dumps(describe(error, encoder.pickled))), loads)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001
        return caught


STANDARD = [f"{kind.__module__}:{kind.__qualname__}" for kind in standard_exceptions()]


def test_the_walk_finds_the_standard_librarys_exceptions() -> None:
    assert len(STANDARD) > 200
    assert {"urllib.error:HTTPError", "builtins:ValueError", "subprocess:CalledProcessError"} <= set(STANDARD)


@pytest.mark.parametrize("name", STANDARD)
def test_an_exception_of_the_standard_library_arrives_as_its_class(name: str) -> None:
    error = raised(instance(name))
    error.__cause__ = KeyError("cause")

    back = arrived(error)

    assert type(back) is type(error)
    assert last_lines(back) == last_lines(error)
    assert [repr(arg) for arg in back.args if "0x" not in repr(arg)] == [
        repr(arg) for arg in error.args if "0x" not in repr(arg)
    ]
    assert repr(back.__cause__) == "KeyError('cause')"


def of_libraries() -> list[str]:
    """Return the exceptions of installed libraries that are importable by their names."""
    modules = ("numpy", "numpy.linalg", "torch", "pydantic", "requests", "httpx", "cryptography.exceptions", "yaml")
    found = {}
    for module in map(pytest.importorskip, modules):
        for top in (module, getattr(module, "exceptions", None), getattr(module, "errors", None)):
            names = (
                (*vars(top), *getattr(top, "__all__", ())) if top is not None else ()
            )  # some are made when asked for
            for kind in (getattr(top, name, None) for name in names):
                if isinstance(kind, type) and issubclass(kind, BaseException) and kind.__module__ != "builtins":
                    name = f"{kind.__module__}:{kind.__qualname__}"
                    found[name] = kind
    return sorted(found)


def test_the_exceptions_of_libraries_arrive_as_their_classes() -> None:
    wrong = []
    for name in of_libraries():
        error = raised(instance(name))
        back = arrived(error)
        if type(back) is not type(error) or last_lines(back) != last_lines(error):
            wrong.append((name, last_lines(error), repr(back)))
    assert wrong == []


class Keyword(Exception):
    def __init__(self, *, number: int) -> None:
        super().__init__(f"number {number}")
        self.number = number


class More(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first, self.second = first, second


class Slotted(Exception):
    __slots__ = ("code", "empty")

    def __init__(self, code: int | None) -> None:
        super().__init__("slotted")
        self.code = code


class NoText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no text")

    __repr__ = __str__


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("no reduce")


class StrangeReduce(Exception):
    def __reduce__(self) -> Any:
        return str, ("a text",)


class BadGetattr(Exception):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class BadSetstate(Exception):
    def __setstate__(self, state: Any) -> None:
        raise ZeroDivisionError("no state")


class Holding(ValueError):
    def __init__(self, held: Any) -> None:
        super().__init__("holds")
        self.held = held
        self.kept = 5


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    "error",
    [Keyword(number=3), More(1, 2), BadReduce("x"), StrangeReduce("x"), BadGetattr("x"), BadSetstate("x", 1)],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_that_pickle_cannot_rebuild_arrives_with_its_attributes(error: BaseException) -> None:
    vars(error)["mark"] = 7

    back = arrived(raised(error))

    assert type(back) is type(error)
    assert (back.args, vars(back)) == (error.args, vars(error))


def test_slots_arrive() -> None:
    back = arrived(Slotted(5))
    none: Any = arrived(Slotted(None))

    assert none.code is None
    assert isinstance(back, Slotted)
    assert (back.code, hasattr(back, "empty")) == (5, False)


def test_an_exception_whose_text_cannot_be_had_arrives() -> None:
    back = arrived(raised(NoText()))

    assert isinstance(back, NoText)
    assert "NoText" in formatted(raised(NoText()))


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock,
        socket.socket,
        generator,
        lambda: threading.Thread(),
        lambda: open(__file__, "rb"),  # noqa: SIM115 - the test closes it
        sys._getframe,
    ],
    ids=["lock", "socket", "generator", "thread", "file", "frame"],
)
def test_an_attribute_that_cannot_be_pickled_is_left_out(make: Callable[[], Any]) -> None:
    held = make()
    try:
        back = arrived(raised(Holding(held)))
    finally:
        if hasattr(held, "close"):
            held.close()

    assert isinstance(back, Holding)
    assert back.kept == 5
    assert repr(back.held).startswith("<left out: a ")
    assert str(back) == "holds"


@pytest.mark.parametrize("lock", [True, False])
def test_a_large_attribute_arrives_and_travels_once(lock: bool) -> None:
    error = Holding(threading.Lock() if lock else None)
    vars(error)["large"] = bytes(4 * LARGEST_SPARE)

    assert len(pickle.dumps(describe(error, encoder.pickled))) < 6 * LARGEST_SPARE
    assert vars(arrived(error))["large"] == bytes(4 * LARGEST_SPARE)


class Prefixed(Exception):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name}")
        self.name = name


def test_a_constructor_that_makes_a_text_is_not_called_with_the_text() -> None:
    back = arrived(Prefixed("dog"))

    assert isinstance(back, Prefixed)
    assert (str(back), back.name) == ("no dog", "dog")


def test_causes_contexts_and_notes_arrive() -> None:
    def chained() -> None:
        try:
            try:
                raise Keyword(number=1)
            except Keyword:
                raise Holding(threading.Lock()) from urllib.error.URLError("away")
        except Holding as error:
            vars(error)["__notes__"] = ["look here"]
            raise More(3, 4) from None

    with pytest.raises(More) as caught:
        chained()
    back = arrived(caught.value)

    assert isinstance(back, More)
    assert (back.__cause__, back.__suppress_context__) == (None, True)
    context = back.__context__
    assert isinstance(context, Holding)
    assert vars(context)["__notes__"] == ["look here"]
    assert repr(context.__cause__) == "URLError('away')"
    assert isinstance(context.__context__, Keyword)
    assert context.__context__.number == 1


def test_a_ring_and_a_long_chain_of_causes_end() -> None:
    ring = ValueError("ring")
    ring.__cause__ = KeyError("in it")
    ring.__cause__.__cause__ = ring
    long: BaseException = ValueError(0)
    for number in range(1000):
        longer = ValueError(number)
        longer.__cause__ = long
        long = longer

    assert repr(arrived(ring).__cause__) == "KeyError('in it')"
    assert repr(arrived(long)) == "ValueError(999)"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are from Python 3.11 on")
def test_groups_arrive_with_members_of_every_kind() -> None:
    inner = Holding(threading.Lock())
    inner.__cause__ = More(1, 2)
    kind: Any = vars(builtins)["ExceptionGroup"]
    group = kind("several", [inner, Keyword(number=2), kind("deep", [OSError(2, "no")])])
    vars(group)["__notes__"] = ["noted"]

    back: Any = arrived(raised(group))

    assert type(back) is kind
    assert back.message == "several"
    assert [type(member).__name__ for member in back.exceptions] == ["Holding", "Keyword", "ExceptionGroup"]
    assert isinstance(back.exceptions[0].__cause__, More)
    assert vars(back)["__notes__"] == ["noted"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups are from Python 3.11 on")
def test_a_large_group_says_how_many_of_its_members_are_missing() -> None:
    kind: Any = vars(builtins)["ExceptionGroup"]

    back: Any = arrived(kind("many", [ValueError(number) for number in range(1000)]))

    assert len(back.exceptions) == MOST_EXCEPTIONS - 1
    assert vars(back)["__notes__"] == ["745 more exceptions of the group were left out on the way here"]


def test_an_exception_of_a_local_class_arrives_as_that_class() -> None:
    class Local(More):
        pass

    assert type(arrived(Local(1, 2))) is Local


def missing(base: type[Exception]) -> Exception:
    """An exception of a class that the other side does not have, with a cause and a note."""
    made = type("Missing", (base,), {"__module__": "not_here", "__reduce__": lambda self: (_not_here, ())})
    error: Exception = made.__new__(made)  # type: ignore[call-overload]
    error.args = ("away",)
    error.__cause__ = KeyError("cause")
    vars(error)["__notes__"] = ["noted"]
    return error


def _not_here() -> None:
    raise ModuleNotFoundError("No module named 'not_here'")


@pytest.mark.parametrize(
    "base", [ValueError, OSError, KeyError, UnicodeDecodeError, urllib.error.HTTPError, More, Keyword, Exception]
)
def test_a_class_that_is_missing_here_has_a_stand_in_of_its_nearest_base(base: type[Exception]) -> None:
    back = arrived(missing(base))

    assert isinstance(back, RemoteException)
    assert isinstance(back, base)
    assert back.type_name == "not_here.Missing"
    assert str(back).startswith("not_here.Missing: ")
    assert "not_here" in back.unpickle_error
    assert repr(back.__cause__) == "KeyError('cause')"
    assert vars(back)["__notes__"] == ["noted"]


def test_a_stand_in_passes_the_original_on() -> None:
    stand_in = arrived(missing(ValueError))
    assert isinstance(stand_in, RemoteException)

    assert describe(stand_in, encoder.pickled)["type"] == "not_here.Missing"


def test_an_actor_error_that_holds_what_cannot_be_pickled_arrives() -> None:
    back = arrived(ActorError(Holding(threading.Lock()), "the call failed", "remote lines"))

    assert isinstance(back, ActorError)
    assert isinstance(back.exception, Holding)
    assert (back.message, back.exception_formatted) == ("the call failed", "remote lines")


@pytest.mark.parametrize(
    ("error", "plain"),
    [(ValueError("x"), True), (OSError(2, "no"), True), (ValueError([]), False), (More(1, 2), False)],
)
def test_a_built_in_exception_with_plain_arguments_needs_no_description(error: Exception, plain: bool) -> None:
    assert is_plain(error) is plain
    error.__cause__ = KeyError()
    assert not is_plain(error)
