"""Synchronised folders on ``sys.path``, in the processes of a session and in its driver.

They come first, but behind the standard library if one has a module of its, such as ``types.py``: Loom, Monarch and
torch import the standard library's.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from loom.errors import LoomError, SyncFailed
from loom.manifest import STANDARD_MODULES
from loom_gateway.driver.code_sync.cache import Hold, TreeCache


class SyncedTree(NamedTuple):
    """A version of a synchronised folder."""

    name: str
    digest: str
    roots: tuple[str, ...]  # its folders that go on ``sys.path``; ``""`` is the tree itself
    places: tuple[str, ...]  # trees' paths on the hosts


class OnPath:
    """An object whose unpickling puts trees on ``sys.path``.

    Later objects in the same pickle, such as the user's bootstrap function, can be imported from the trees. `check`
    raises if a tree is missing: an error while unpickling would not reach the client unchanged.
    """

    def __init__(self, trees: Sequence[SyncedTree]) -> None:
        self._trees = tuple(trees)
        self._error: LoomError | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _enter, (tuple(map(tuple, self._trees)),)

    def check(self) -> None:
        if self._error is not None:
            raise self._error


_holds: list[Hold] = []  # locks on the trees, kept for the life of the process

_current: OnPath | None = None


def current() -> OnPath | None:
    """Return the object that puts this process's trees on the ``sys.path`` of another; None if there are none."""
    return _current


def make_current(on_path: OnPath) -> None:
    """Let the processes that this one starts have trees."""
    global _current
    _current = on_path


_entering = threading.Lock()
_entered: dict[tuple[Any, ...], OnPath] = {}


def _enter(trees: tuple[tuple[Any, ...], ...]) -> OnPath:
    with _entering:
        entered = _entered.get(trees)
        if entered is None:
            entered = _entered[trees] = OnPath([SyncedTree(*tree) for tree in trees])
            try:
                _put_on_path(entered._trees)
            except LoomError as error:
                entered._error = error
            else:
                make_current(entered)
        return entered


def _put_on_path(trees: Sequence[SyncedTree]) -> None:
    paths: list[str] = []
    for tree in trees:
        place = _hold(tree)
        paths += [os.path.join(place, root) if root else place for root in tree.roots]
    _insert(paths)


_STANDARD_FOLDERS = frozenset(
    path
    for name in ("stdlib", "platstdlib")
    for folder in [sysconfig.get_path(name)]
    for path in (folder, os.path.join(folder, "lib-dynload"))
)


def _insert(paths: Sequence[str], instead_of: Sequence[str] = ()) -> None:
    """Put folders first on ``sys.path``, and offer them to the Python programs that this process starts.

    If one has a module of the standard library's name, all come behind the standard library. No program that needs
    the module would start with the folder in ``PYTHONPATH``, which always precedes the standard library.
    """
    outdated = {*paths, *instead_of}
    others = [path for path in sys.path if path not in outdated]
    hide = any(_origin(name, paths) for name in STANDARD_MODULES)
    first = [path for path in others if path in _STANDARD_FOLDERS] if hide else []
    sys.path[:] = [*first, *paths, *(path for path in others if path not in first)]
    needed = STANDARD_MODULES & sys.modules.keys() if hide else ()
    offered = [path for path in paths if not any(_origin(name, [path]) for name in needed)]
    before = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in outdated]
    os.environ["PYTHONPATH"] = os.pathsep.join([*offered, *filter(None, before)])
    importlib.invalidate_caches()


def _origin(name: str, folders: Sequence[str]) -> str | None:
    """Return the file of a module or package in folders; None if there is none."""
    spec = importlib.machinery.PathFinder.find_spec(name, folders)
    return None if spec is None else spec.origin


def _hold(tree: SyncedTree) -> str:
    """Hold a tree on this machine. Return its folder."""
    own = TreeCache.of_this_machine()
    # This process may have a different environment, and so a different cache, than the host's agent.
    others = [Path(place).parent.parent for place in tree.places]
    for folder in dict.fromkeys([own.folder, *others]):
        if not (folder / "trees" / tree.digest).is_dir():
            continue
        cache = own if folder == own.folder else TreeCache(folder, own.limit)
        hold = cache.hold(tree.digest)
        if hold is not None:
            _holds.append(hold)
            return os.fspath(hold.folder)
    raise SyncFailed(
        f"the synced folder {tree.name!r} is gone from the cache of this host ({own.folder}): call job.sync again, "
        f"then spawn"
    )


class DriverPath:
    """The trees that the driver itself imports from, which change while it runs."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[SyncedTree, Hold]] = {}
        self._paths: list[str] = []

    def show(self, tree: SyncedTree, hold: Hold, names: frozenset[str]) -> None:
        """Put a tree first on ``sys.path``, in place of the previous tree of its name.

        Modules of the previous tree are removed from ``sys.modules``. So are those of other trees that ``names``
        hide now. The next import gets the newer ones.
        """
        before = self._places.pop(tree.name, None)
        same = before is not None and before[0][:3] == tree[:3]
        others = [os.fspath(other.folder) for _, other in self._places.values()]
        self._places = {tree.name: (tree, hold), **self._places}
        earlier = self._paths
        self._paths = [
            os.path.join(held.folder, root) if root else os.fspath(held.folder)
            for entry, held in self._places.values()
            for root in entry.roots
        ]
        _insert(self._paths, instead_of=earlier)
        if before is not None:
            if not same:
                _forget_modules(lambda name, place: place.startswith(f"{before[1].folder}/"))
            before[1].close()
        _forget_modules(
            lambda name, place: (
                name.partition(".")[0] in names and any(place.startswith(f"{other}/") for other in others)
            )
        )


def _forget_modules(outdated: Callable[[str, str], bool]) -> None:
    """Remove modules from ``sys.modules``. ``outdated`` decides by a module's name and file."""
    for name, module in list(sys.modules.items()):
        try:
            place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
        except KeyError:  # a folder without __init__.py in a package that is not imported any more
            del sys.modules[name]
            continue
        if isinstance(place, str) and outdated(name, place):
            del sys.modules[name]


def shadowed(names: Iterable[str]) -> list[str]:
    """Return a sentence for each module name of a tree that another module of this machine has, too."""
    folders = [path for path in sys.path if "site-packages" in path or "dist-packages" in path]
    found = []
    for name in sorted(names):
        if name in STANDARD_MODULES:
            found.append(f"{name!r} is hidden by the standard library's module of that name: rename it")
        elif (origin := _origin(name, folders)) is not None:
            found.append(f"{name!r} hides the installed {origin}")
    return found
