"""A module that a program in the cluster did not find, and this machine has: where it is, and what to do.

A module of its own, as each error of the cluster passes here, whatever the way on which it came.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys

from loom.wire.codec import is_project_file

_MISSING = re.compile(r"No module named '([\w.]+)'")


def cure(text: str) -> str:
    """Return what to do about the module that a text says is missing; "" if it is not here either."""
    found = _MISSING.search(text)
    place = None if found is None else _place(found[1])
    if found is None or place is None:
        return ""
    name = found[1]
    if not is_project_file(place):
        return (
            f"Package {name.partition('.')[0]!r} is installed on the laptop and not in the cluster: install it "
            f"on the workers and at the gateway, too"
        )
    folder = _folder(name if name in sys.modules else name.partition(".")[0], place)
    return (
        f"Module {name!r} is on the laptop, at {place}, and not in the cluster: job.sync({folder!r}), then spawn "
        f"the processes again; or import it at the top of the module that uses it, so that it travels by value"
    )


def cured(error: ImportError) -> None:
    """Put the cure into the text of an exception that came from the cluster."""
    if found := cure(str(error)):
        error.msg = f"{error}. {found}"
        error.args = (error.msg, *error.args[1:])


def _place(module: str) -> str | None:
    """Return the file of a module here, or its folder. This imports nothing."""
    loaded = getattr(sys.modules.get(module), "__file__", None)
    if isinstance(loaded, str):
        return loaded
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, AttributeError, ValueError):  # it is half imported
        return None
    if spec is None or spec.origin in ("built-in", "frozen"):
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _folder(module: str, place: str) -> str:
    """Return the folder to sync: that from which the module is imported."""
    folder = place if os.path.isdir(place) else os.path.dirname(place)
    if os.path.basename(place) != "__init__.py" and not os.path.isdir(place):
        module = module.rpartition(".")[0]
    for _ in module.split(".") if module else ():
        folder = os.path.dirname(folder)
    return folder
