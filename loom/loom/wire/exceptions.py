"""Exceptions on their way between processes: class, attributes, text, causes and notes arrive.

pickle rebuilds an exception by a call of its class with its ``args``. This fails for a class whose constructor
takes something else, for an attribute that cannot be pickled, and loses causes. So an exception travels as a
description, a map of plain values and pickles. The other side uses the first of these ways that works:

1. the pickle of the exception, if its class says how to pickle it (``__reduce__``, ``__setstate__``);
2. its class without its constructor, with its ``args`` and each attribute that could be pickled;
3. a `RemoteException` with its class's name and its text, which is also of the nearest base class that is here.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import importlib
import itertools
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache, reduce
from typing import Any

from loom.errors import ActorError, RemoteException
from loom.wire.messages import Buffer

MOST_EXCEPTIONS = 256
"""Exceptions of one description: causes, contexts and members of groups. The others are left out."""

DEEPEST = 64
"""Links from an exception to the farthest one of its description."""

LARGEST_SPARE = 64 << 10
"""Bytes of a pickle that a description has besides a better one, for a side on which that cannot be unpickled."""

MOST_ATTRIBUTES = 256

LONGEST = 64 << 10
"""Characters of a text. The middle of a longer one is left out."""

Description = MutableMapping[str, Any]
Dump = Callable[[Any], Sequence[Buffer]]
Load = Callable[[Sequence[Buffer]], Any]

_Group: Any = getattr(builtins, "BaseExceptionGroup", None)  # from Python 3.11 on
_NO_STATE = frozenset(
    ("__dict__", "__weakref__", "__cause__", "__context__", "__traceback__", "__suppress_context__")
    + ("args", "exceptions", "message")
    + ("obj",)  # of an AttributeError: any object of the program, and all that it leads to
)
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType)


class LeftOut:
    """Takes the place of an attribute of an exception that did not travel; its ``repr`` says why."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<left out: {self.what}>"

    def __reduce__(self) -> Any:
        return LeftOut, (self.what,)


def text_of(error: BaseException) -> str:
    """Return ``str()`` of an exception, also of one whose ``__str__`` raises."""
    try:
        return shortened(str(error))
    except Exception as broken:  # noqa: BLE001 - a user's __str__ may raise anything
        return f"<its __str__ raised {type(broken).__name__}>"


def last_lines(error: BaseException) -> str:
    """Return the lines of a traceback behind its frames: class, text and notes."""
    try:
        return shortened("".join(traceback.format_exception_only(type(error), error)).strip())
    except Exception:  # noqa: BLE001 - the module reads attributes, and a user's __getattr__ may raise anything
        return f"{_name(type(error))}: {text_of(error)}"


def formatted(error: BaseException) -> str:
    """Return the traceback of an exception as text, also of one whose attributes cannot be read."""
    try:
        return shortened("".join(traceback.format_exception(type(error), error, error.__traceback__)))
    except Exception:  # noqa: BLE001 - as above
        frames = "".join(traceback.format_tb(error.__traceback__))
        return shortened(f"Traceback (most recent call last):\n{frames}{last_lines(error)}\n")


def shortened(text: str) -> str:
    """Return a text without its middle if it is longer than `LONGEST`."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST // 2]}\n… {len(text) - LONGEST} characters left out …\n{text[-LONGEST // 2 :]}"


def is_plain(error: BaseException) -> bool:
    """Return whether an exception's own pickle has all of it, on every side: a built-in one without links."""
    kind = type(error)
    if kind.__module__ != "builtins" or getattr(builtins, kind.__name__, None) is not kind:
        return False
    linked = error.__cause__ is not None or error.__context__ is not None or error.__suppress_context__
    if linked or vars(error) or (_Group is not None and isinstance(error, _Group)):
        return False
    return all(type(arg) in (str, int, float, bool, type(None)) for arg in error.args)


def reduce_exception(error: BaseException) -> Any:
    """Reduce an exception inside another object, if pickle would call its class's constructor; else return None.

    The constructor may take something else than the exception's ``args``.
    """
    kind = type(error)
    if not isinstance(kind.__init__, types.FunctionType) or _knows_how(kind):
        return None
    return copyreg.__newobj__, (kind, *error.args), dict(_state(error))  # type: ignore[attr-defined]


def describe(error: BaseException, dump: Dump) -> Mapping[str, Any]:
    """Return the description of an exception, as plain values and bytes. This raises nothing.

    Args:
        dump: pickles an object into the parts of a payload.
    """
    try:
        return _Describing(dump).describe(error)
    except Exception:  # noqa: BLE001 - a user's descriptor or metaclass may raise anything
        return {"type": _name(type(error)), "text": text_of(error), "classes": [], "args": [], "state": {}}


class _Describing:
    """The description of one exception, and of those that it leads to."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._seen: dict[int, BaseException] = {}
        self._depth = 0

    def describe(self, error: BaseException) -> Mapping[str, Any]:
        if isinstance(error, RemoteException) and error.description is not None:
            return error.description
        self._seen[id(error)] = error
        kind = type(error)
        made: Description = {
            "type": _name(kind),
            "text": text_of(error),
            "classes": [
                [base.__module__, base.__qualname__] for base in kind.__mro__ if issubclass(base, BaseException)
            ],
            "suppress": bool(error.__suppress_context__),
        }
        members = self._members(error)
        if notes := self._notes(error, members):
            made["notes"] = notes
        self._add_content(made, error, knows_how=members is None and _knows_how(kind), own=members is None)
        if _found(kind.__module__, kind.__qualname__) is not kind:
            made["class"] = self._pickled(kind)
        if members is not None:
            made["exceptions"] = members
            made["message"] = _Group.message.__get__(error)
        elif isinstance(error, ActorError) and (inner := self._linked(getattr(error, "exception", None))):
            made["actor_error"] = [inner, str(error.message), str(error.exception_formatted)]
        for name in ("cause", "context"):
            if (linked := self._linked(getattr(error, f"__{name}__"))) is not None:
                made[name] = linked
        return made

    def _add_content(self, made: Description, error: BaseException, knows_how: bool, own: bool) -> None:
        args = vars(BaseException)["args"].__get__(error)[:MOST_ATTRIBUTES]
        state = dict(itertools.islice(_state(error), MOST_ATTRIBUTES))
        made["knows_how"] = knows_how
        if own and (pickled := self._pickled(error)) and (knows_how or _is_spare(pickled)):
            made["own"] = pickled
        whole = self._pickled((args, state))
        if whole is not None and (not made.get("own") or not knows_how or _is_spare(whole)):
            made["whole"] = whole
        spare = bool(made.get("own") or whole)
        made["args"] = [self._part(arg, spare) for arg in args]
        made["state"] = {name: self._part(value, spare) for name, value in state.items()}

    def _members(self, error: BaseException) -> list[Mapping[str, Any]] | None:
        if _Group is None or not isinstance(error, _Group):
            return None
        members: Sequence[BaseException] = _Group.exceptions.__get__(error)
        return [found for member in members if (found := self._linked(member)) is not None]

    def _notes(self, error: BaseException, members: Sequence[object] | None) -> list[str]:
        notes = vars(error).get("__notes__")
        made = [shortened(note) for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
        if members is not None and (lost := len(_Group.exceptions.__get__(error)) - len(members)):
            made.append(f"{lost} more exceptions of the group were left out on the way here")
        return made

    def _linked(self, error: object) -> Mapping[str, Any] | None:
        if not isinstance(error, BaseException) or id(error) in self._seen:
            return None
        if len(self._seen) >= MOST_EXCEPTIONS or self._depth >= DEEPEST:
            return None
        self._depth += 1
        try:
            return self.describe(error)
        finally:
            self._depth -= 1

    def _part(self, value: Any, spare: bool) -> list[bytes] | str:
        parts = self._pickled(value)
        if parts is None:
            return f"a {_name(type(value))} cannot be pickled"
        return parts if not spare or _is_spare(parts) else f"a {_name(type(value))}, too large to be sent twice"

    def _pickled(self, value: Any) -> list[bytes] | None:
        try:
            return [bytes(part) for part in self._dump(value)]
        except Exception:  # noqa: BLE001 - a user's __reduce__ may raise anything
            return None


def rebuild(description: Description, load: Load) -> BaseException:
    """Return the exception of a description, or a `RemoteException`. This raises nothing.

    Args:
        load: unpickles the parts of a payload.
    """
    try:
        return _rebuild(description, load)
    except Exception as error:  # noqa: BLE001 - of another version, perhaps
        name, text = str(description.get("type", "unknown")), str(description.get("text", ""))
        return RemoteException(name, text, f"{type(error).__name__}: {error}")


def _rebuild(made: Description, load: Load) -> BaseException:
    why: BaseException | None = None
    error: BaseException | None = None
    for way in (_from_own, _from_parts) if made.get("knows_how") else (_from_parts, _from_own):
        try:
            found = way(made, load)
            error = error if found is None else found  # not by its truth: a user's __bool__ may raise anything
        except Exception as failed:  # noqa: BLE001 - a user's constructor may raise anything
            why = why or _root(failed)
            if isinstance(why, ImportError):  # something that it needs is not here
                break
        if error is not None and _name(type(error)).rpartition(".")[2] == made["type"].rpartition(".")[2]:
            break
    if error is None:
        error = _stand_in(made, why)
    for name in ("cause", "context"):
        if name in made:
            set_link(error, f"__{name}__", rebuild(made[name], load))
    if "exceptions" in made and "notes" in made:
        vars(error)["__notes__"] = made["notes"]
    set_link(error, "__suppress_context__", bool(made.get("suppress")))
    return error


def _from_own(made: Description, load: Load) -> BaseException | None:
    if not made.get("own"):
        return None
    error = load(made["own"])
    if not isinstance(error, BaseException):
        raise TypeError(f"its pickle is of a {_name(type(error))}")
    _set_state(error, {name: _value(part, load) for name, part in made["state"].items() if _is_empty(error, name)})
    return error


def _is_empty(error: BaseException, name: str) -> bool:
    """Return whether an attribute in a slot or in C has no value, as pickle leaves it."""
    slot = _slot(error, name)
    if slot is None:
        return False
    try:
        return slot.__get__(error, type(error)) is None
    except AttributeError:
        return True


def _knows_how(kind: type[BaseException]) -> bool:
    """Return whether a class, and not Python, says how its exceptions are pickled."""
    if kind in copyreg.dispatch_table:
        return True
    names = ("__reduce__", "__reduce_ex__", "__setstate__")
    return any(name in vars(base) for base in kind.__mro__ if base.__module__ != "builtins" for name in names)


def _is_spare(parts: Sequence[Buffer]) -> bool:
    return sum(map(len, parts)) <= LARGEST_SPARE


def _root(why: BaseException) -> BaseException:
    return why if why.__cause__ is None else why.__cause__


def _from_parts(made: Description, load: Load) -> BaseException | None:
    if "actor_error" in made:
        inner, message, text = made["actor_error"]
        return ActorError(rebuild(inner, load), message, text)
    kind = _class_of(made, load)
    if kind is None:
        raise ImportError(f"there is no {made['type']} here")
    args, state = _content(made, load)
    if "exceptions" in made and _Group is not None and issubclass(kind, _Group):
        members = [rebuild(member, load) for member in made["exceptions"]]
        error: BaseException = _Group.__new__(kind, made["message"], members)
    else:
        error = _new(kind, args)
        set_link(error, "args", args)
    _set_state(error, state)
    return error


def _new(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Return an exception of a class, without any code of the class."""
    base = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        made: BaseException = base.__new__(kind, *args)
    except TypeError:  # a class in C between the two has a __new__ of its own
        made = kind.__new__(kind, *args)
    return made


def set_link(error: BaseException, name: str, value: object) -> None:
    """Set an attribute that every exception has, also of one whose class is frozen."""
    object.__setattr__(error, name, value)


def _content(made: Description, load: Load) -> tuple[tuple[Any, ...], dict[str, object]]:
    """Return the arguments and attributes of an exception."""
    if made.get("whole"):
        with contextlib.suppress(Exception):  # a part of it cannot be unpickled here
            args, state = load(made["whole"])
            return tuple(args), dict(state)
    args = tuple(_value(part, load) for part in made["args"])
    return args, {name: _value(part, load) for name, part in made["state"].items()}


def _class_of(made: Description, load: Load) -> type[BaseException] | None:
    found = _found(*made["classes"][0]) if made["classes"] else None
    if found is None and made.get("class"):
        found = load(made["class"])
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _value(part: Sequence[Buffer] | str, load: Load) -> Any:
    if isinstance(part, str):
        return LeftOut(part)
    try:
        return load(part)
    except Exception as error:  # noqa: BLE001 - a user's __setstate__ may raise anything
        return LeftOut(f"it cannot be unpickled here: {type(error).__name__}: {text_of(error)}")


def _slot(error: BaseException, name: str) -> Any:
    """Return the descriptor of an attribute that is not in the exception's ``__dict__``, or None."""
    found = next((vars(base)[name] for base in type(error).__mro__ if name in vars(base)), None)
    return found if isinstance(found, _DESCRIPTORS) else None


def _set_state(error: BaseException, state: dict[str, object]) -> None:
    for name, value in state.items():
        slot = _slot(error, name)
        if slot is None:
            vars(error)[name] = value
        else:
            with contextlib.suppress(AttributeError, TypeError, ValueError):  # read-only, or of another type
                slot.__set__(error, value)


def _state(error: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an exception, those in slots and in its class's C code included."""
    yield from list(vars(error).items())
    for base in type(error).__mro__:
        in_c = "__slots__" not in vars(base)
        for name, slot in vars(base).items():
            if isinstance(slot, _DESCRIPTORS) and name not in _NO_STATE:
                with contextlib.suppress(Exception):  # an empty slot, or a C attribute without a value
                    value = slot.__get__(error, type(error))
                    if value is not None or not in_c:  # what is None in C may have no value
                        yield name, value


def _stand_in(made: Description, why: BaseException | None) -> RemoteException:
    reason = "it could not be pickled in the cluster" if why is None else f"{type(why).__name__}: {text_of(why)}"
    bases = (found for module, name in made["classes"] if (found := _found(module, name)) is not None)
    kind = _stand_in_like(next(bases, Exception))
    error: RemoteException = kind.__new__(kind)
    RemoteException.__init__(error, made["type"], made["text"], reason)
    error.description = made
    if "notes" in made:
        vars(error)["__notes__"] = made["notes"]
    return error


@cache
def _stand_in_like(base: type[BaseException]) -> type[RemoteException]:
    """Return the class of stand-ins that ``except base`` catches, if there can be one."""
    if base in (Exception, BaseException, object) or issubclass(RemoteException, base):
        return RemoteException
    try:
        kind = types.new_class("RemoteException", (RemoteException, base), exec_body=_as_remote_exception)
        kind.__new__(kind)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001 - a metaclass, another layout in memory, a __new__ that takes more
        return RemoteException
    return kind


def _as_remote_exception(names: dict[str, object]) -> None:
    names["__module__"] = RemoteException.__module__
    names["__init__"] = RemoteException.__init__


def _name(kind: type) -> str:
    module, qualname = (type.__getattribute__(kind, name) for name in ("__module__", "__qualname__"))
    return f"{module}.{qualname}"


def _found(module: str, qualname: str) -> Any:
    """Return the class of a name; None if it is not here."""
    try:
        found = sys.modules.get(module) or importlib.import_module(module)
        return reduce(getattr, qualname.split("."), found)
    except Exception:  # noqa: BLE001 - an import may raise anything
        return None
