"""Payloads: Python objects to bytes and back, at the two ends only.

A payload is a pickle (protocol 5, by cloudpickle) followed by the buffers that it refers to, so that arrays and
large byte strings are not copied into the pickle. What travels how:

- plain data, and classes and functions of installed packages and synced folders: by reference, as with any pickle;
- classes and functions of ``__main__``, of a notebook, and of modules outside ``site-packages`` (the user's own
  project folder): by value, so that the cluster need not have them;
- meshes: as references, `Reference`, that the driver swaps for the real meshes.

`Encoder` and `Decoder` are in one module with the functions that their pickles name: what one writes the other has
to find under the same name.
"""

from __future__ import annotations

import io
import pickle
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle.cloudpickle import (
    _extract_code_globals,
    _lookup_module_and_qualname,
    _should_pickle_by_reference,
    subimport,
)

from loom.errors import LoomError, UnpicklableError
from loom.wire.arrays import IN_BAND, Carried, carried_or_value, passing_on, take_apart, take_apart_near_top, whole
from loom.wire.handshake import python_mismatch, python_version
from loom.wire.messages import Buffer
from loom.wire.mux import Pieces

_PLAIN_PICKLE = 512
"""A pickle shorter than this many bytes is looked through for names of ours before anything is set up for them."""

_OURS = b"loom"

_STACK_GLOBAL = b"\x93"
"""The opcode that names something; one in a number or a text is taken for it, and does no harm."""

_PLAIN = frozenset({type(None), bool, int, float, complex, str})
_BYTES = frozenset({bytes, bytearray})
_OWN_PACKAGES = frozenset({"loom", "loom_proxy", "loom_gateway"})


class Reference(NamedTuple):
    """What stands for a mesh inside a payload: the id that it has in the session."""

    mesh: int


class Made(NamedTuple):
    """What stands for a mesh in a result: one that the cluster has made and that the laptop does not know yet."""

    kind: str
    """``hosts``, ``procs``, ``actors`` or ``values``."""
    mesh: int
    """Its id; negative where the driver gave it, since the positive ones are the laptop's to give."""
    name: str
    shape: tuple[tuple[str, ...], int, tuple[int, ...], tuple[int, ...]]
    """Labels, offset, sizes and strides."""
    root: int = 0
    """The id of the mesh that it is a part of; its own where it is whole."""
    class_name: str = ""
    endpoints: dict[str, Any] | None = None
    """For an actor mesh, the parameters of each endpoint."""
    values: list[Any] | None = None
    """For a value mesh, the values, row by row."""


_APART = frozenset({"Carried", "ndarray", "Tensor", "Parameter"})
"""Names of the types that `loom.wire.arrays` may have taken apart, or may take apart."""

_resolving = threading.local()


def _unpack(recipe: bytes, count: int) -> Any:
    """Unpickle an object that was taken apart; its data is in the next ``count`` parts of the payload."""
    return carried_or_value(Carried(recipe, [next(_resolving.parts) for _ in range(count)]))


def _unpack_inside(recipe: bytes, count: int) -> Any:
    """As `_unpack`, inside another object, which needs it whole to be unpickled itself."""
    return Carried(recipe, [next(_resolving.parts) for _ in range(count)]).value()


def _resolve(mesh: int) -> Any:
    """Unpickle a `Reference`: the mesh itself where a `Decoder` knows it."""
    resolver: Callable[[int], Any] | None = getattr(_resolving, "resolver", None)
    return Reference(mesh) if resolver is None else resolver(mesh)


def _resolve_made(*fields: Any) -> Any:
    """Unpickle a `Made`: a proxy of the mesh where a `Decoder` makes them."""
    maker: Callable[[Made], Any] | None = getattr(_resolving, "maker", None)
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
def _is_project_file(path: str) -> bool:
    return not path.startswith(_LIBRARIES) and "/site-packages/" not in path and "/dist-packages/" not in path


def travels_by_value(module_name: str) -> bool:
    """Whether what a module defines is shipped by value: it is the user's own and not an installed package."""
    if module_name.partition(".")[0] in _OWN_PACKAGES:
        return False
    module = sys.modules.get(module_name)
    path = getattr(module, "__file__", None)
    return path is not None and _is_project_file(path)


def _is_plain(obj: Any, depth: int = 8) -> bool:
    kind = type(obj)
    if kind in _PLAIN:
        return True
    if kind in _BYTES:
        return len(obj) < IN_BAND
    if depth == 0:  # perhaps an object that contains itself
        return False
    # Loops, and no call for what is plain by its type: this looks at the arguments and the result of every call.
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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self, file: io.BytesIO, encoder: Encoder, buffers: list[Buffer | Pieces], procs: int | None
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

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        reduced = super()._dynamic_function_reduce(func)
        # Monarch, where it is imported, has cloudpickle add a loader that asks the root client for the source. That
        # is another program than this one, and has none.
        names = reduced[2][1]["__globals__"]
        if type(names.get("__loader__")).__module__.startswith("monarch."):
            del names["__loader__"]
        return reduced

    def reducer_override(self, obj: Any) -> Any:
        # Not persistent_id: the pickler would call it for every int of a list.
        reference = getattr(type(obj), "__loom_reference__", None)
        if reference is not None:
            return _resolve, (reference(obj, self._encoder.session),)
        swap = self._encoder.swaps.get(type(obj))
        if swap is not None:
            swapped = swap(obj)
            return (_resolve_made, tuple(swapped)) if isinstance(swapped, Made) else swapped
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            by_name = self._encoder.by_name
            if by_name is not None and _has_name(obj, lambda module: by_name(module, self._procs)):
                # Not by cloudpickle, which may have been told for another session to ship the module by value.
                return (subimport, (obj.__name__,)) if isinstance(obj, types.ModuleType) else NotImplemented
            self._encoder.before_code(obj)
        elif type(obj).__name__ in _APART:
            is_near_top = type(obj) is Carried
            carried = obj if is_near_top else take_apart(obj)
            if carried is not None:
                self._buffers += carried.parts
                unpack = _unpack if is_near_top else _unpack_inside
                return unpack, (bytes(carried.recipe), len(carried.parts))
        return super().reducer_override(obj)


def _has_name(obj: Any, known: Callable[[str], bool]) -> bool:
    """Whether code can be imported by the name that it has, from a module that is known on the other side."""
    if isinstance(obj, types.ModuleType):
        return known(obj.__name__) and sys.modules.get(obj.__name__) is obj
    module = getattr(obj, "__module__", None)
    return isinstance(module, str) and known(module) and _lookup_module_and_qualname(obj) is not None


class Encoder:
    """Turns objects into payloads for one peer.

    Args:
        ship_project: ship the user's own modules by value (the laptop's side) instead of by reference.
        peer_python: the peer's ``(major, minor)``; code by value is refused if this Python's differs.
        session: what a mesh has to belong to; it is asked with ``__loom_reference__(session)``.
        swaps: by exact type, what to pickle instead of an object: a `Made`, or what ``__reduce__`` would return.
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
        """Whether a module is to travel by reference whatever else holds, to the proc mesh of an id."""
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
        if self._mismatch and not is_module and not _should_pickle_by_reference(obj):
            assert self._peer_python is not None
            what = f"{name}.{getattr(obj, '__qualname__', obj)}"
            raise python_mismatch(what, python_version(), self._peer_python)

    def dumps(self, obj: Any, what: str = "the object", procs: int | None = None) -> list[Buffer]:
        """Pickle an object into the parts of a payload.

        Args:
            what: names the object in an error.
            procs: id of the proc mesh that it is for, if it is for one.

        Raises:
            UnpicklableError: naming the attribute that is in the way, inside ``what``.
            PythonVersionMismatch: code would have to travel by value to another minor version of Python.
        """
        if _is_plain(obj):
            return [pickle.dumps(obj, 5)]
        try:
            return self._pickle(take_apart_near_top(obj), procs)
        except LoomError:
            raise
        except Exception as error:
            raise self._explain(obj, what, error) from error

    def _pickle(self, obj: Any, procs: int | None = None) -> list[Buffer]:
        file = io.BytesIO()
        buffers: list[Any] = []
        _Pickler(file, self, buffers, procs).dump(obj)
        return [file.getbuffer(), *buffers]

    def _explain(self, obj: Any, what: str, error: Exception) -> UnpicklableError:
        path, culprit, cause = self._blame(obj, what, error, {}) or (what, obj, error)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
        return UnpicklableError(
            f"{path} cannot be pickled: it is a {kind.removeprefix('builtins.')} ({cause}). Make it inside the "
            f"actor, in __init__ or an endpoint, instead of sending it; or leave it out with __getstate__."
        )

    def _blame(
        self, obj: Any, path: str, error: Exception, seen: dict[int, Any]
    ) -> tuple[str, Any, Exception] | None:
        """The innermost part of an object that cannot be pickled, and the path to it.

        None if the object fails only since it leads back to what contains it (``seen``): a method that names its
        class is not what is wrong with the class.
        """
        seen[id(obj)] = obj
        to_blame = True
        for name, child in _children(obj):
            if id(child) in seen:
                to_blame = False
                continue
            if _is_plain(child):
                continue
            try:
                self._pickle(child)
            except Exception as deeper:  # noqa: BLE001 - the same pickling as above, of a part
                found = self._blame(child, path + name, deeper, seen)
                if found is not None:
                    return found
                to_blame = False
        return (path, obj, error) if to_blame else None


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.40}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, type):
        for base in obj.__mro__:
            if base is obj or travels_by_value(base.__module__) or base.__module__ == "__main__":
                members = ((name, getattr(base, name, value)) for name, value in vars(base).items())
                yield from ((f".{name}", member) for name, member in members if not name.startswith("__weak"))
    elif isinstance(obj, types.FunctionType):
        names = obj.__code__.co_freevars
        for name, cell in zip(names, obj.__closure__ or (), strict=False):
            try:
                yield f" (its closure's {name})", cell.cell_contents
            except ValueError:  # an empty cell
                continue
        for name in _extract_code_globals(obj.__code__):
            if name in obj.__globals__:
                yield f" (its global {name})", obj.__globals__[name]
        yield from ((f" (its default {value!r:.40})", value) for value in obj.__defaults__ or ())
    elif hasattr(obj, "_method") and isinstance(obj._method, types.FunctionType):  # an endpoint
        yield "", obj._method
    elif hasattr(obj, "__dict__"):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
        yield " (its class)", type(obj)


class Decoder:
    """Turns payloads back into objects.

    Args:
        resolver: gives the mesh for an id; without one, meshes stay `Reference`s.
        maker: gives the proxy for a `Made`; without one, they stay what they are.
        passing_on: leave arrays and tensors taken apart, as `loom.wire.arrays.Carried`: for who passes them on.
    """

    def __init__(
        self,
        resolver: Callable[[int], Any] | None = None,
        maker: Callable[[Made], Any] | None = None,
        passing_on: bool = False,
    ) -> None:
        self._resolver = resolver
        self._maker = maker
        self._passing_on = passing_on

    def loads(self, parts: Sequence[Buffer], what: str = "a payload") -> Any:
        """Unpickle the parts of a payload.

        Raises:
            UnpicklableError: something that the pickle names cannot be imported or rebuilt here.
            LoomError: whatever the resolver raised.
        """
        if len(parts) == 1 and len(parts[0]) < _PLAIN_PICKLE and _OURS not in bytes(parts[0]):
            try:
                return pickle.loads(parts[0])
            except LoomError:
                raise
            except Exception as error:
                raise _cannot_unpickle(what, error) from error
        outer = getattr(_resolving, "resolver", None)  # of the payload that this one is unpickled in
        outer_maker = getattr(_resolving, "maker", None)
        outer_parts = getattr(_resolving, "parts", None)
        _resolving.resolver, _resolving.maker = self._resolver, self._maker
        # What asks for a part gets the next one: objects are unpickled in the order in which they were pickled.
        _resolving.parts = beside = iter(parts[1:])
        try:
            if self._passing_on:
                with passing_on():
                    return pickle.loads(parts[0], buffers=map(whole, beside))
            return pickle.loads(parts[0], buffers=map(whole, beside))
        except LoomError:
            raise
        except Exception as error:
            raise _cannot_unpickle(what, error) from error
        finally:
            _resolving.resolver, _resolving.maker = outer, outer_maker
            _resolving.parts = outer_parts


def plain_payload(parts: Sequence[Buffer]) -> bytes | None:
    """The pickle of a payload that names no class and no function: it can be passed on as it is. Else None."""
    if len(parts) != 1:
        return None
    pickled = bytes(parts[0])
    return None if _STACK_GLOBAL in pickled else pickled


def _cannot_unpickle(what: str, error: Exception) -> UnpicklableError:
    return UnpicklableError(
        f"{what} cannot be unpickled on this side: {type(error).__name__}: {error}. "
        f"If it is a package that is missing, install it here too."
    )


_plain_encoder = Encoder()
_plain_decoder = Decoder()


def dumps(obj: Any) -> list[Buffer]:
    """`Encoder.dumps` where everything importable travels by reference."""
    return _plain_encoder.dumps(obj)


def loads(parts: Sequence[Buffer]) -> Any:
    """`Decoder.loads` without meshes."""
    return _plain_decoder.loads(parts)
