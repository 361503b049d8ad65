"""Code that travels by value, where cloudpickle's own way loses something or fails.

`Encoder` uses these reductions on the laptop. In the cluster `repair_cloudpickle` puts them into cloudpickle, by
which Monarch pickles on the way from process to process. The pickles name only functions of Python and cloudpickle
where that is possible, so that an older Loom can read them.
"""

from __future__ import annotations

import abc
import contextvars
import enum
import functools
import operator
import pickle
import sys
import types
import typing
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import (
    _class_reduce,
    _class_setstate,
    _code_reduce,
    _extract_class_dict,
    _function_setstate,
    _get_bases,
    _get_or_create_tracker_id,
    _lookup_module_and_qualname,
    _make_skeleton_class,
    _make_skeleton_enum,
    _should_pickle_by_reference,
    subimport,
)

from loom.errors import UnpicklableError
from loom.wire.exceptions import reduce_exception

_OF_ENUMS = frozenset(
    ("_generate_next_value_", "_member_names_", "_member_map_", "_member_type_", "_value2member_map_")
    + ("_unhashable_values_", "_hashable_values_", "_unhashable_values_map_")
)
"""Attributes of an enum class that its metaclass makes."""

_OF_MEMBERS = frozenset({"_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"})

_OF_MODULES = frozenset({"__builtins__", "__loader__", "__spec__", "__cached__"})
"""Globals of a module that mean something only where its file is."""

_NATIVE = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
)


class Missing:
    """Takes the place of a global of a module that could not travel with it. Each use raises `UnpicklableError`."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_why":
            raise AttributeError(name)
        raise UnpicklableError(self._why)

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise UnpicklableError(self._why)

    __call__ = __enter__ = __iter__ = __next__ = __getitem__ = __setitem__ = __len__ = __contains__ = _raise

    def __exit__(self, *args: object) -> None: ...

    def __repr__(self) -> str:
        return f"<not sent: {self._why}>"

    def __reduce__(self) -> Any:
        return Missing, (self._why,)


# -- classes ------------------------------------------------------------------------------------------------


def reduce_class(cls: type) -> Any:
    """Reduce a class, as cloudpickle's ``reducer_override`` does."""
    if cls not in _TYPES and _should_pickle_by_reference(cls):
        return NotImplemented
    if (found := _class_of_types(cls)) is not None:
        return found
    if _is_native(cls) and _lookup_module_and_qualname(cls) is None:
        return _by_another_name(cls)
    return _reduce_enum(cls) if issubclass(cls, enum.Enum) else _reduce_plain_class(cls)


def _class_of_types(cls: type) -> Any:
    """Reduce a class of Python's that only the module ``types`` names, as cloudpickle does."""
    try:
        named = cls in _TYPES or cls in cloudpickle.cloudpickle._BUILTIN_TYPE_NAMES
    except TypeError:  # its metaclass makes it unhashable
        return None
    return _class_reduce(cls) if named else None


_TYPES = (type(None), type(Ellipsis), type(NotImplemented))


def _reduce_plain_class(cls: type) -> Any:
    body: dict[str, object] = {"__module__": cls.__module__} if "__module__" in vars(cls) else {}
    body["__qualname__"] = cls.__qualname__
    if "__slots__" in vars(cls) and not issubclass(cls, tuple):  # a named tuple has them anyway
        body["__slots__"] = _slots(cls)
    if isinstance(vars(cls).get("__dict__"), property):
        body["__dict__"] = vars(cls)["__dict__"]
    made_of = (type(cls), cls.__name__, _get_bases(cls), body, _get_or_create_tracker_id(cls), None)
    return _make_skeleton_class, made_of, (_class_state(cls), {}), None, None, _class_setstate


def _slots(cls: type) -> Any:
    slots = vars(cls)["__slots__"]
    if isinstance(slots, str | tuple | list | dict):
        return slots
    return tuple(name for name, slot in vars(cls).items() if isinstance(slot, types.MemberDescriptorType))


def _class_state(cls: type) -> dict[str, object]:
    """Return the attributes of a class that are not made with the class itself."""
    state: dict[str, object] = _extract_class_dict(cls)
    for name in ("__weakref__", "__dict__", "__slots__", "__annotate_func__", "__qualname__"):
        state.pop(name, None)
    for name, value in list(state.items()):
        if isinstance(value, types.MemberDescriptorType) and value.__objclass__ is cls:
            del state[name]
    if isinstance(cls, abc.ABCMeta):
        for name in ("_abc_cache", "_abc_negative_cache", "_abc_negative_cache_version", "_abc_registry"):
            state.pop(name, None)
        registry = abc._get_dump(cls)[0]  # type: ignore[attr-defined]
        state["_abc_impl"] = [found for reference in registry if (found := reference()) is not None]
    return state


def _reduce_enum(cls: type[enum.Enum]) -> Any:
    members = {name: member._value_ for name, member in cls.__members__.items()}
    state = {
        name: value for name, value in _class_state(cls).items() if name not in _OF_ENUMS and name not in members
    }
    made_of = (
        *(cls.__bases__, cls.__name__, cls.__qualname__, members, cls.__module__),
        *(_get_or_create_tracker_id(cls), None),
    )
    more = {
        name: own
        for name, member in cls.__members__.items()
        if (own := {key: value for key, value in vars(member).items() if key not in _OF_MEMBERS})
    }
    if more:
        return _make_skeleton_enum, made_of, (state, more), None, None, _set_enum
    return _make_skeleton_enum, made_of, (state, {}), None, None, _class_setstate


def reduce_member(member: enum.Enum) -> Any:
    """Reduce a member of an Enum by its name if no copy of a value would find it again; else return NotImplemented.

    Python does so from 3.12 on. Before, it calls the class with the value, which may be an ``object()``.
    """
    cls = type(member)
    own = getattr(cls.__reduce_ex__, "__module__", None) not in (enum.__name__, None)
    named = cls.__members__.get(member._name_) is member
    if own or not named or all(type(one._value_) in (int, str) for one in cls.__members__.values()):
        return NotImplemented
    return getattr, (cls, member._name_)


def _set_enum(cls: type[enum.Enum], state: tuple[dict[str, object], dict[str, dict[str, object]]]) -> None:
    """Unpickle the attributes of an enum class, and of its members."""
    _class_setstate(cls, (state[0], {}))
    for name, attributes in state[1].items():
        vars(cls.__members__[name]).update(attributes)


def _is_native(cls: type) -> bool:
    return any(
        isinstance(value, _NATIVE) and (getattr(value, "__objclass__", None) or value.__self__) is cls  # type: ignore[union-attr]
        for value in vars(cls).values()
    )


def _by_another_name(cls: type) -> Any:
    """Reduce a class of a native extension that names a module which does not have it, such as ``builtins``."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType) and vars(module).get(cls.__name__) is cls:
            return operator.attrgetter(cls.__name__), (module,)
    raise pickle.PicklingError(
        f"class {cls.__qualname__} of a native extension says that it is of module {cls.__module__!r}, which does "
        f"not have it, and no other imported module has it under this name"
    )


# -- modules ------------------------------------------------------------------------------------------------


def reduce_module(module: types.ModuleType) -> Any:
    """Reduce a module: by its name if the other side may have it, else with its globals."""
    if _should_pickle_by_reference(module):
        return subimport, (module.__name__,)
    return module_of(module, module_globals(module))


def module_globals(module: types.ModuleType) -> dict[str, object]:
    """Return the globals of a module that travel."""
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def module_of(module: types.ModuleType, names: Mapping[str, Any]) -> Any:
    """Reduce a module with globals. It is made before them, since they may lead back to it."""
    return types.ModuleType, (module.__name__,), dict(names)


# -- objects that hold functions, or are named as functions are ---------------------------------------------


def _reduce_cached(cached: Any) -> Any:
    """Reduce a function under ``functools.lru_cache``, without its cache."""
    if _has_a_name(cached):
        return str(cached.__qualname__)
    function = cached.__wrapped__
    own = {name: value for name, value in vars(cached).items() if name != "__wrapped__"}
    if not isinstance(function, types.FunctionType) or _should_pickle_by_reference(function):
        return _cache, (cached.cache_parameters(), function), own
    # The function's state comes after its cache was made, since it may lead back to that.
    state = cloudpickle.cloudpickle._function_getstate(function)
    names = state[1]["__globals__"]
    if type(names.get("__loader__")).__module__.startswith("monarch."):
        del names["__loader__"]
    around = {name: function.__globals__[name] for name in _AROUND if name in function.__globals__}
    return (
        _cached_skeleton,
        (cached.cache_parameters(), function.__code__, around),
        (state, own),
        None,
        None,
        _set_cached,
    )


_AROUND = ("__package__", "__name__", "__path__", "__file__")


def _cache(parameters: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_skeleton(parameters: Mapping[str, Any], code: types.CodeType, around: dict[str, object]) -> Any:
    closure = tuple(types.CellType() for _ in code.co_freevars)
    return _cache(parameters, types.FunctionType(code, around, code.co_name, None, closure))


def _set_cached(cached: Any, state: tuple[Any, dict[str, object]]) -> None:
    """Unpickle the function under a cache."""
    _function_setstate(cached.__wrapped__, state[0])
    functools.update_wrapper(cached, cached.__wrapped__)
    vars(cached).update(state[1])


def _reduce_cached_property(found: Any) -> Any:
    return functools.cached_property, (found.func,), {"attrname": found.attrname, "__doc__": found.__doc__}


def _reduce_new_type(found: Any) -> Any:
    if _has_a_name(found):
        return str(found.__qualname__)
    named = {"__module__": found.__module__, "__qualname__": found.__qualname__}
    return typing.NewType, (found.__name__, found.__supertype__), named


def _reduce_param_spec(found: Any) -> Any:
    return str(found.__name__) if _has_a_name(found) else (type(found), (found.__name__,))


def _has_a_name(named: Any) -> bool:
    """Return whether the other side may import an object that is no class, function or module by its name."""
    found = _lookup_module_and_qualname(named, getattr(named, "__qualname__", named.__name__))
    return found is not None and not cloudpickle.cloudpickle._is_registered_pickle_by_value(found[0])


def _reduce_weak(reference: Any) -> Any:
    target = reference()
    return (_dead, ()) if target is None else (weakref.ref, (target,))


def _dead() -> Any:
    """Return a weak reference to what is gone."""
    return weakref.ref(set())


def _reduce_weak_dictionary(found: Any) -> Any:
    return type(found), (), None, None, iter(list(found.items()))


_variables: dict[contextvars.ContextVar[Any], str] = {}
_variables_by_id: dict[str, contextvars.ContextVar[Any]] = {}


def _reduce_variable(variable: contextvars.ContextVar[Any]) -> Any:
    """Reduce a context variable without its value, which belongs to a context of this process."""
    ident = _variables.setdefault(variable, uuid.uuid4().hex)
    _variables_by_id[ident] = variable
    try:
        default = (contextvars.Context().run(variable.get),)
    except LookupError:
        return _variable, (ident, variable.name)
    return _variable, (ident, variable.name, *default)


def _variable(ident: str, name: str, *default: Any) -> contextvars.ContextVar[Any]:
    """Return the context variable of an id, the same one each time in a process."""
    found = _variables_by_id.get(ident)
    if found is None:
        found = contextvars.ContextVar(name, default=default[0]) if default else contextvars.ContextVar(name)
        _variables_by_id[ident] = found
        _variables[found] = ident
    return found


NAMED: tuple[type, ...] = (functools._lru_cache_wrapper, typing.NewType, typing.ParamSpec)
"""Types of objects that pickle finds by their names, besides classes, functions and modules."""

REDUCERS: dict[type, Callable[[Any], Any]] = {
    types.ModuleType: reduce_module,
    functools._lru_cache_wrapper: _reduce_cached,
    functools.cached_property: _reduce_cached_property,
    typing.NewType: _reduce_new_type,
    typing.ParamSpec: _reduce_param_spec,
    weakref.ref: _reduce_weak,
    weakref.WeakKeyDictionary: _reduce_weak_dictionary,
    weakref.WeakValueDictionary: _reduce_weak_dictionary,
    contextvars.ContextVar: _reduce_variable,
}
"""The reducers for a pickler's ``dispatch_table``, by exact type."""


def reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Reduce a code object with the name of its file, which cloudpickle leaves out and a traceback needs."""
    make, args = _code_reduce(code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


REDUCERS[types.CodeType] = reduce_code


def repair_cloudpickle() -> None:
    """Let all that this process pickles with cloudpickle travel as by an `Encoder`. Again is harmless."""
    cloudpickle.Pickler._dispatch_table.update(REDUCERS)
    plain = cloudpickle.Pickler.reducer_override
    if hasattr(plain, "__wrapped__"):
        return

    @functools.wraps(plain)
    def reducer_override(self: Any, obj: Any) -> Any:
        if issubclass(type(obj), type):  # not list[int], which Python 3.10 takes for a type
            return reduce_class(obj)
        if isinstance(obj, BaseException) and (reduced := reduce_exception(obj)) is not None:
            return reduced
        if isinstance(obj, enum.Enum) and (reduced := reduce_member(obj)) is not NotImplemented:
            return reduced
        return plain(self, obj)

    cloudpickle.Pickler.reducer_override = reducer_override


def share_with_children() -> None:
    """Let `multiprocessing` pass on functions and classes that came here by value, as a script's own do.

    It names them to its processes, by a module that has them on the other side alone.
    """
    from multiprocessing.reduction import ForkingPickler

    def reducer_override(self: Any, obj: Any) -> Any:
        if issubclass(type(obj), (types.FunctionType, type)) and not _is_found(obj):
            return _load_in_child, (cloudpickle.dumps(obj),)
        return NotImplemented

    ForkingPickler.reducer_override = reducer_override  # type: ignore[method-assign]


def _load_in_child(data: bytes) -> Any:
    share_with_children()  # what it makes of them goes back in the same way
    return pickle.loads(data)


def _is_found(obj: Any) -> bool:
    """Return whether a function or class is what its module has under its name."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj


# -- the way back -------------------------------------------------------------------------------------------


class HomeUnpickler(pickle.Unpickler):
    """Unpickles objects of classes that are defined here as objects of these, though they come by value.

    cloudpickle would change the class here to its copy's state: its methods, and attributes that changed since.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in _AT_HOME and name in _AT_HOME[module]:
            return _AT_HOME[module][name]
        return super().find_class(module, name)


_made: weakref.WeakSet[type] = weakref.WeakSet()  # classes that came here by value, and are defined elsewhere


def _home_class(make: Any, name: str, bases: Any, body: dict[str, object], tracker: Any, extra: Any) -> type:
    found = _own_class(body.get("__module__"), body.get("__qualname__"), tracker)
    if found is not None and [base.__name__ for base in bases] != [base.__name__ for base in _get_bases(found)]:
        found = None  # another class of the same name
    return found or _noted(_make_skeleton_class(make, name, bases, body, tracker, extra))


def _home_enum(bases: Any, name: str, qualname: str, members: Any, module: Any, tracker: Any, extra: Any) -> type:
    found = _own_class(module, qualname, tracker)
    if found is not None and set(members) != set(getattr(found, "__members__", ())):
        found = None  # another class of the same name
    return found or _noted(_make_skeleton_enum(bases, name, qualname, members, module, tracker, extra))


def _own_class(module: Any, qualname: Any, tracker: Any) -> type | None:
    known = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker)
    if isinstance(known, type):
        return known
    if not isinstance(module, str) or not isinstance(qualname, str) or "<locals>" in qualname:
        return None
    try:  # an earlier process of the same program has sent it
        found = operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return found if isinstance(found, type) and found.__module__ == module else None


def _noted(cls: type) -> type:
    _made.add(cls)
    return cls


def _home_state(cls: type, state: Any) -> type:
    return _class_setstate(cls, state) if cls in _made else cls


def _home_enum_state(cls: type[enum.Enum], state: Any) -> None:
    if cls in _made:
        _set_enum(cls, state)


_AT_HOME: dict[str, dict[str, Callable[..., Any]]] = {
    "cloudpickle.cloudpickle": {
        "_make_skeleton_class": _home_class,
        "_make_skeleton_enum": _home_enum,
        "_class_setstate": _home_state,
    },
    __name__: {"_set_enum": _home_enum_state},
}
