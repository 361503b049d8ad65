"""What a script gave, as JSON, and whether two of them are the same to the program that made them."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

__all__ = ["difference", "outcome_of_error", "outcome_of_value"]


def outcome_of_value(value: Any) -> Any:
    """A value in terms of JSON: tagged lists, so that a tuple is not a list and a point is not a dict."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return ["float", repr(value)]
    if isinstance(value, BaseException):
        return outcome_of_error(value)
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(outcome_of_value, value)]
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(outcome_of_value, value), key=repr)]
    if isinstance(value, dict):
        pairs = [[outcome_of_value(key), outcome_of_value(item)] for key, item in value.items()]
        return ["dict", *pairs]
    name = type(value).__name__.removesuffix("Proxy")
    found = _outcome_of_monarchs(name, value)
    if found is not None:
        return found
    if isinstance(value, type):
        return ["type", value.__name__.removesuffix("Proxy")]
    if isinstance(value, Mapping):
        return [name, outcome_of_value(dict(value))]
    return [name, repr(value)]


def _outcome_of_monarchs(name: str, value: Any) -> Any:
    """What an object of Monarch's or Loom's is in terms of JSON; None for others."""
    if name == "Mistake":
        return {**outcome_of_error(value.error), "says": value.says}
    if name == "Point":
        return ["Point", value.rank, repr(value), outcome_of_value(dict(value)), outcome_of_value(value.extent)]
    if name in ("NDSlice", "Slice"):
        return ["NDSlice", repr(value)]
    if name == "Extent":
        return ["Extent", repr(value), outcome_of_value(value.labels), outcome_of_value(value.sizes)]
    if name == "ValueMesh":
        return ["ValueMesh", repr(value.extent), *map(outcome_of_value, value.items())]
    if name in ("HostMesh", "ProcMesh", "ActorMesh"):
        return [name, repr(value.extent)]
    return None


def outcome_of_error(error: BaseException, trace: bool = False) -> Any:
    """An exception: the names of its classes, outermost first, and what a program can read from it."""
    names = [cls.__name__ for cls in type(error).__mro__ if issubclass(cls, BaseException)]
    found: dict[str, Any] = {"raised": names}
    if "ActorError" in names:
        found["exception"] = outcome_of_error(error.exception)  # type: ignore[attr-defined]
        found["message"] = error.message  # type: ignore[attr-defined]
    elif type(error).__module__.partition(".")[0] not in ("builtins", "loom", "monarch"):
        found["args"] = outcome_of_value(error.args)
    found["text"] = str(error)
    if trace:
        found["trace"] = "".join(traceback.format_exception(error))
    return found


def difference(native: Any, loom: Any, path: str = "") -> str | None:
    """Where two outcomes differ; None where a program could not tell them apart.

    Through Loom an exception may be of a more special class than natively: whoever catches Monarch's catches it.
    Its text is compared where it is the user's own, and has to contain Monarch's in a `Mistake`.
    """
    if isinstance(native, dict) and isinstance(loom, dict) and "raised" in native and "raised" in loom:
        if native["raised"][0] not in loom["raised"] or native.get("says", "") not in loom.get("says", ""):
            return f"{path}: native raised {_short(native)}\n    Loom {_short(loom)}"
        for key in ("exception", "message", "args"):
            if key in native and key in loom:
                found = difference(native[key], loom[key], f"{path}.{key}")
                if found is not None:
                    return found
        return None
    if isinstance(native, list) and isinstance(loom, list) and len(native) == len(loom):
        for index, (theirs, ours) in enumerate(zip(native, loom, strict=True)):
            found = difference(theirs, ours, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    if native == loom and type(native) is type(loom):
        return None
    return f"{path}: native {_short(native)}\n    Loom {_short(loom)}"


def _short(outcome: Any) -> str:
    if isinstance(outcome, dict) and "raised" in outcome:
        text = outcome.get("trace") or outcome.get("text", "")
        return f"{' < '.join(outcome['raised'][:4])}: {text[:400]}…{text[-900:]}"
    return repr(outcome)[:1500]
