"""Hooks of imports: a function is called once, with a module, when the program imports that module.

A finder in front of all others waits for the modules that have hooks. It finds nothing itself: it lets the others
find the module, and puts a loader around the module's own, which takes itself away before it loads. So the module
and its ``__spec__`` are as they would be without it. When no module is waited for, the finder leaves.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would take longer than the rest, in every process that a command starts
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def when_imported(name: str, hook: str | Callable[[ModuleType], object]) -> None:
    """Call a hook once with a module: now if it has been imported, or else when the program has imported it.

    Args:
        name: the module's full name.
        hook: a function, or ``"module:function"``, which is imported only then. If it raises, that is logged, and
            the program's import goes on.
    """
    if (module := sys.modules.get(name)) is not None and not _is_loading(module):
        _call(hook, module)
        return
    _finder.hooks.setdefault(name, []).append(hook)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def finds_loom() -> bool:
    """Return whether the program's `loom` is the package that this module lies in, and not one of the program's."""
    try:
        spec = importlib.util.find_spec("loom")
    except ValueError:  # a module without a spec
        return False
    folders = () if spec is None else spec.submodule_search_locations or ()
    return any(os.path.isfile(os.path.join(folder, "instrument", "imports.py")) for folder in folders)


def _call(hook: str | Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        if isinstance(hook, str):
            if not finds_loom():
                return _finder.step_back()
            home, _, function = hook.partition(":")
            hook = getattr(import_module(home), function)
        hook(module)  # type: ignore[operator]
    except Exception as error:  # noqa: BLE001 - whatever another version of a library makes of a hook
        import logging  # like `typing`

        log = logging.getLogger("loom")
        log.warning("Loom steps back from %s: %s: %s", module.__name__, type(error).__name__, error)


class _Finder:
    """The finder of modules that have hooks."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[str | Callable[[ModuleType], object]]] = {}
        """The hooks of modules that are not imported yet."""
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.hooks or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def loaded(self, module: ModuleType) -> None:
        """Call the hooks of a module that was imported."""
        hooks = self.hooks.pop(module.__name__, ())
        if not self.hooks and self in sys.meta_path:
            sys.meta_path.remove(self)
        for hook in hooks:
            _call(hook, module)

    def step_back(self) -> None:
        """Wait for nothing any more, because the program has a module of its own with the name of Loom's."""
        import logging

        self.hooks.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        logging.getLogger("loom").warning(
            "Loom steps back: the program has a module of its own named 'loom', and its trainings are not reported"
        )


class _Loader:
    """A loader that gives its place back to the module's own, loads the module, and tells the finder."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._finder.loaded(module)


_finder = _Finder()
