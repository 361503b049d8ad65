"""Payloads: Python objects to bytes and back, at the two ends only.

A payload is a pickle (protocol 5, by cloudpickle) followed by the buffers that it refers to, so that arrays and
large byte strings are not copied into the pickle. Objects travel in these ways:

- plain data, and classes and functions of installed packages and synced folders: by reference, as with any pickle;
- classes and functions of ``__main__``, of a notebook, and of modules outside ``site-packages`` (the user's own
  project folder): by value, so that the cluster need not have them;
- meshes: as a `Reference`, which the driver replaces by the real mesh.

`Encoder` and `Decoder` share a module with the functions that their pickles name, since the decoder must find each
function under the name that the encoder wrote.
"""

from __future__ import annotations

import collections
import enum
import io
import pickle
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import cloudpickle
from cloudpickle.cloudpickle import _lookup_module_and_qualname, _should_pickle_by_reference, subimport

from loom.errors import LoomError, UnpicklableError, describe_error
from loom.wire.arrays import IN_BAND, Carried, carried_or_value, passing_on, take_apart, take_apart_near_top, whole
from loom.wire.by_value import (
    NAMED,
    REDUCERS,
    HomeUnpickler,
    Missing,
    module_globals,
    module_of,
    reduce_class,
    reduce_member,
)
from loom.wire.exceptions import reduce_exception
from loom.wire.handshake import python_mismatch, python_version
from loom.wire.messages import Buffer
from loom.wire.mux import Pieces
from loom.wire.unpicklable import KEPT, explain

_PLAIN_PICKLE = 512
"""Bytes below which a pickle is first searched for `_OURS`: without it, decoding needs no set-up."""

_OURS = b"loom"  # part of every name that a pickle needs a `Decoder` for

_CODE_BY_VALUE = b"cloudpickle"  # the module that each pickle with code by value names

_STACK_GLOBAL = b"\x93"
"""The opcode that names a class or function. The same byte in a number or text also counts, which does no harm."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_BYTES = frozenset({bytes, bytearray})
_OWN_PACKAGES = frozenset({"loom", "loom_proxy", "loom_gateway"})


class Reference(NamedTuple):
    """The stand-in for a mesh in a payload: the mesh's id in the session."""

    mesh: int


class Made(NamedTuple):
    """The stand-in for a returned mesh, which the cluster has made and the laptop may not know yet."""

    kind: str
    """``hosts``, ``procs``, ``actors`` or ``values``."""
    mesh: int
    """The mesh's id. An id that the driver chose is negative, since the laptop chooses the positive ones."""
    name: str
    shape: tuple[tuple[str, ...], int, tuple[int, ...], tuple[int, ...]]
    """Labels, offset, sizes and strides."""
    root: int = 0
    """The id of the whole mesh, if this is a part of one; else the mesh's own id."""
    class_name: str = ""
    endpoints: Mapping[str, Sequence[tuple[str, int, bool]]] | None = None
    """The parameters of each endpoint of an actor mesh."""
    values: list[Any] | None = None
    """The values of a value mesh, row by row."""


_APART = frozenset({"Carried", "ndarray", "Tensor", "Parameter"})
"""Names of the types that `loom.wire.arrays` takes apart, and of its own."""


class _Unpickling(threading.local):
    """The payload that a thread unpickles: its `Decoder`'s functions, and its parts behind the pickle."""

    resolver: Callable[[int], Any] | None = None
    maker: Callable[[Made], Any] | None = None
    parts: Iterator[Buffer] = iter(())


_unpickling = _Unpickling()


def _unpack(recipe: bytes, count: int) -> Any:
    """Unpickle an object that was taken apart, whose data is in the next ``count`` parts of the payload."""
    return carried_or_value(Carried(recipe, [next(_unpickling.parts) for _ in range(count)]))


def _unpack_inside(recipe: bytes, count: int) -> Any:
    """Unpickle and make whole an object inside another object, whose own unpickling needs it whole."""
    return Carried(recipe, [next(_unpickling.parts) for _ in range(count)]).value()


def _resolve(mesh: int) -> Any:
    """Unpickle a `Reference`; return the mesh itself if the `Decoder` has a resolver."""
    resolver = _unpickling.resolver
    return Reference(mesh) if resolver is None else resolver(mesh)


def _resolve_made(*fields: Any) -> Any:
    """Unpickle a `Made`; return a proxy of the mesh if the `Decoder` has a maker."""
    maker = _unpickling.maker
    made = Made(*fields)
    return made if maker is None else maker(made)


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    return tuple(folder.rstrip("/") + "/" for folder in folders)


_LIBRARIES = _library_folders()


@lru_cache(maxsize=4096)
def is_project_file(path: str) -> bool:
    """Return whether a file is of the user's own project, and not installed."""
    return not path.startswith(_LIBRARIES) and "/site-packages/" not in path and "/dist-packages/" not in path


def travels_by_value(module_name: str) -> bool:
    """Return whether a module's code is shipped by value, because it is the user's own and not installed."""
    if module_name.partition(".")[0] in _OWN_PACKAGES:
        return False
    module = sys.modules.get(module_name)
    path = getattr(module, "__file__", None)
    return path is not None and is_project_file(path)


def _is_plain(obj: Any, depth: int = 8) -> bool:
    kind = type(obj)
    if kind in _PLAIN:
        return True
    if kind in _BYTES:
        return len(obj) < IN_BAND
    if depth == 0:  # perhaps an object that contains itself
        return False
    # Loops instead of calls for plain types, since this checks the arguments and the result of every call.
    if kind is tuple or kind is list:
        if len(obj) > 16:
            return False
        for item in obj:  # noqa: SIM110 - a generator would be called once more for each item
            if type(item) not in _PLAIN and not _is_plain(item, depth - 1):
                return False
        return True
    if kind is dict:
        if len(obj) > 16:
            return False
        for key, value in obj.items():
            if type(key) is not str or (type(value) not in _PLAIN and not _is_plain(value, depth - 1)):
                return False
        return True
    return False


_CODE = (type, types.FunctionType, types.ModuleType, *NAMED)
"""Types of what can be found by a name in a module."""


_EACH = (*_CODE, BaseException)
"""Types of objects that each have a way of their own."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = collections.ChainMap(
        REDUCERS,
        cloudpickle.Pickler.dispatch_table,
    )

    def __init__(
        self,
        file: io.BytesIO,
        encoder: Encoder,
        buffers: list[Buffer | Pieces],
        procs: int | None,
        travelling: _TravellingGlobals | None = None,
    ) -> None:
        def out_of_band(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if len(view) < IN_BAND:
                return True
            buffers.append(view)
            return False

        super().__init__(file, protocol=5, buffer_callback=out_of_band)
        self._encoder = encoder
        self._buffers = buffers
        self._procs = procs
        self._travelling = travelling
        self.last: collections.deque[Any] = collections.deque(maxlen=KEPT)
        """The parts that it has come to, the last one first."""
        self._ordinary: set[int] = set()  # ids of the types whose objects pickle alone reduces
        self.came_to_modules = False
        """True if a module had to travel by value, with all its globals."""

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        # If Monarch is imported, cloudpickle adds Monarch's loader, which asks the root client for the source. The
        # root client is another program than this one, and does not have the source.
        names = reduced[2][1]["__globals__"]
        if type(names.get("__loader__")).__module__.startswith("monarch."):
            del names["__loader__"]
        return reduced

    def reducer_override(self, obj: Any) -> Any:
        # Not persistent_id, which the pickler would call for every int of a list.
        self.last.appendleft(obj)
        if id(type(obj)) in self._ordinary:
            return NotImplemented
        reduced = self._reduced(obj)
        if reduced is NotImplemented and type(obj).__name__ not in _APART and not isinstance(obj, _EACH):
            self._ordinary.add(id(type(obj)))
        return reduced

    def _reduced(self, obj: Any) -> Any:
        reference = getattr(type(obj), "__loom_reference__", None)
        if reference is not None:
            return _resolve, (reference(obj, self._encoder.session),)
        swap = self._encoder.swaps.get(type(obj))
        if swap is not None:
            swapped = swap(obj)
            return (_resolve_made, tuple(swapped)) if isinstance(swapped, Made) else swapped
        if isinstance(obj, _CODE):
            by_name = self._encoder.by_name
            if by_name is not None and _has_name(obj, lambda module: by_name(module, self._procs)):
                # Not by cloudpickle, in which another session may have registered the module to travel by value.
                return (subimport, (obj.__name__,)) if isinstance(obj, types.ModuleType) else NotImplemented
            self._encoder.before_code(obj)
            if isinstance(obj, type) and not isinstance(obj, types.GenericAlias):  # a type for Python 3.10
                return reduce_class(obj)
            if isinstance(obj, types.ModuleType) and not _should_pickle_by_reference(obj):
                self.came_to_modules = True
                return module_of(obj, module_globals(obj) if self._travelling is None else self._travelling.of(obj))
        elif isinstance(obj, BaseException):
            if (reduced := reduce_exception(obj)) is not None:
                return reduced
        elif isinstance(obj, enum.Enum):
            return reduce_member(obj)
        elif type(obj).__name__ in _APART:
            is_near_top = type(obj) is Carried
            carried = obj if is_near_top else take_apart(obj)
            if carried is not None:
                self._buffers += carried.parts
                unpack = _unpack if is_near_top else _unpack_inside
                return unpack, (bytes(carried.recipe), len(carried.parts))
        return super().reducer_override(obj)


def _has_name(obj: Any, known: Callable[[str], bool]) -> bool:
    """Return whether code can be imported by its name from a module that the other side knows."""
    if isinstance(obj, types.ModuleType):
        return known(obj.__name__) and sys.modules.get(obj.__name__) is obj
    module = getattr(obj, "__module__", None)
    return isinstance(module, str) and known(module) and _lookup_module_and_qualname(obj) is not None


class Encoder:
    """An encoder of objects into payloads for one peer.

    Args:
        ship_project: ship the user's own modules by value (the laptop's side) instead of by reference.
        session: the session that meshes must belong to, which ``mesh.__loom_reference__(session)`` checks.
        swaps: by exact type, functions that return a `Made`, or a result of ``__reduce__``, to pickle instead.
    """

    def __init__(
        self,
        ship_project: bool = False,
        peer_python: Sequence[int] | None = None,
        session: object = None,
        swaps: Mapping[type, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.session = session
        self.swaps = swaps or {}
        self.by_name: Callable[[str, int | None], bool] | None = None
        """Returns whether a module travels by reference, before all other rules, to the proc mesh with an id."""
        self._ship_project = ship_project
        self._peer_python = peer_python
        self._mismatch = peer_python is not None and tuple(peer_python) != python_version()

    def before_code(self, obj: Any) -> None:
        """Decide how a class, function or module travels, right before it is pickled."""
        is_module = isinstance(obj, types.ModuleType)
        name = obj.__name__ if is_module else getattr(obj, "__module__", None)
        if name is None:
            return
        if self._ship_project and travels_by_value(name):
            cloudpickle.register_pickle_by_value(sys.modules[name])
        if self._mismatch and isinstance(obj, type | types.FunctionType) and not _should_pickle_by_reference(obj):
            assert self._peer_python is not None
            what = f"{name}.{getattr(obj, '__qualname__', obj)}"
            raise python_mismatch(what, python_version(), self._peer_python)

    def dumps(self, obj: Any, what: str = "the object", procs: int | None = None) -> list[Buffer]:
        """Pickle an object, which errors call ``what``, into a payload for the proc mesh ``procs``, if for any."""
        if _is_plain(obj):
            return [pickle.dumps(obj, 5)]
        try:
            return self._pickle(take_apart_near_top(obj), procs)
        except LoomError:
            raise
        except _Failed as failed:
            error = failed.error
            raise explain(obj, what, error, failed.last, self.pickled, travels_by_value) from error

    def pickled(self, obj: Any) -> list[Buffer]:
        """Pickle an object into a payload. Raise the error of the part that cannot be pickled, unexplained."""
        try:
            return self._pickle(take_apart_near_top(obj))
        except _Failed as failed:
            raise failed.error from None

    def _pickle(self, obj: Any, procs: int | None = None) -> list[Buffer]:
        file = io.BytesIO()
        buffers: list[Any] = []
        pickler = _Pickler(file, self, buffers, procs)
        try:
            pickler.dump(obj)
        except LoomError:
            raise
        except Exception as error:
            if not pickler.came_to_modules:
                raise _Failed(error, pickler.last) from error
            file, buffers = io.BytesIO(), []
            pickler = _Pickler(file, self, buffers, procs, _TravellingGlobals(self))
            try:
                pickler.dump(obj)
            except Exception as again:
                raise _Failed(again, pickler.last) from again
        return [file.getvalue(), *buffers]  # no view: one in a cycle of references crashes Python 3.12.1


class _Failed(Exception):
    """Pickling has failed: its error, and the parts that the pickler came to, the last one first."""

    def __init__(self, error: Exception, last: Iterable[Any]) -> None:
        super().__init__()
        self.error = error
        self.last = list(last)


class _TravellingGlobals:
    """The globals of the modules that travel by value in one payload, each if it can be pickled.

    The others are replaced by `Missing`. A module whose lock nobody uses over there can travel so.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._found: dict[types.ModuleType, dict[str, object]] = {}

    def of(self, module: types.ModuleType) -> dict[str, object]:
        found = self._found.get(module)
        if found is None:
            found = module_globals(module)
            if self._why_not(found) is not None:
                found = {name: self._travelling(module, name, value) for name, value in found.items()}
            self._found[module] = found
        return found

    def _travelling(self, module: types.ModuleType, name: str, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        why = self._why_not(value)
        if why is None:
            return value
        return Missing(
            f"{module.__name__}.{name} is on the laptop only: {why}. Make it in the cluster, in the function or "
            f"actor that uses it; or ship the folder of the module with job.sync, so that it is imported there"
        )

    def _why_not(self, value: Any) -> str | None:
        pickler = _Pickler(io.BytesIO(), self._encoder, [], None, _NoGlobals())
        try:
            pickler.dump(value)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may raise anything
            kind = type(pickler.last[0]) if pickler.last else type(value)
            return f"{kind.__module__}.{kind.__qualname__} cannot be pickled ({type(error).__name__}: {error})"
        return None


class _NoGlobals(_TravellingGlobals):
    """Stands in for the globals of the modules that an object leads to, which are looked at on their own."""

    def __init__(self) -> None: ...

    def of(self, module: types.ModuleType) -> dict[str, object]:
        return {}


class Decoder:
    """A decoder of payloads back into objects.

    Meshes stay `Reference`s without a ``resolver``, returned meshes stay `Made` without a ``maker``, and arrays and
    tensors stay `loom.wire.arrays.Carried` for ``passing_on``. With ``at_home``, objects whose classes this program
    defines are of these classes, though they come by value: a laptop's, not the cluster's.
    """

    def __init__(
        self,
        resolver: Callable[[int], Any] | None = None,
        maker: Callable[[Made], Any] | None = None,
        passing_on: bool = False,
        at_home: bool = False,
    ) -> None:
        self._at_home = at_home
        self._resolver = resolver
        self._maker = maker
        self._passing_on = passing_on

    def loads(self, parts: Sequence[Buffer], what: str = "a payload") -> Any:
        """Unpickle the parts of a payload, which errors call ``what``."""
        if len(parts) == 1 and len(parts[0]) < _PLAIN_PICKLE and _needs_no_setup(parts[0]):
            try:
                return pickle.loads(parts[0])
            except LoomError:
                raise
            except Exception as error:
                raise _cannot_unpickle(what, error) from error
        now = _unpickling
        outer = now.resolver, now.maker, now.parts  # unpickling one payload may unpickle another
        now.resolver, now.maker = self._resolver, self._maker
        # Each `_unpack` takes the next parts: objects are unpickled in the order in which they were pickled.
        now.parts = beside = iter(parts[1:])
        try:
            if self._passing_on:
                with passing_on():
                    return pickle.loads(parts[0], buffers=map(whole, beside))
            if self._at_home:
                return HomeUnpickler(io.BytesIO(parts[0]), buffers=map(whole, beside)).load()
            return pickle.loads(parts[0], buffers=map(whole, beside))
        except LoomError:
            raise
        except Exception as error:
            raise _cannot_unpickle(what, error) from error
        finally:
            now.resolver, now.maker, now.parts = outer


def _needs_no_setup(pickled: Buffer) -> bool:
    small = bytes(pickled)
    return _STACK_GLOBAL not in small or (_OURS not in small and _CODE_BY_VALUE not in small)


def plain_payload(parts: Sequence[Buffer]) -> bytes | None:
    """Return the pickle of a payload if it names no class or function, so that it can be passed on; else None."""
    if len(parts) != 1:
        return None
    pickled = bytes(parts[0])
    return None if _STACK_GLOBAL in pickled else pickled


def _cannot_unpickle(what: str, error: Exception) -> UnpicklableError:
    return UnpicklableError(f"{what} cannot be unpickled on this side: {describe_error(error)}.{IF_MISSING}")


IF_MISSING = " If it is a package that is missing, install it here too."
"""The end of the text of such an error, where nobody knows better."""

dumps = Encoder().dumps
"""Pickles an object; all importable code travels by reference."""

loads = Decoder().loads
"""Unpickles a payload, and leaves references to meshes as they are."""
