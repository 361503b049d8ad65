"""The lazy import of a package's names on first use (PEP 562), as its ``__init__.pyi`` lists them."""

from __future__ import annotations

import sys
from importlib import import_module

from loom._former_names import FORMER_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing `typing` would take longer than everything else here
    from collections.abc import Callable


def lazy_names(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package, next to whose ``__file__`` the stub lies."""
    homes: dict[str, tuple[str, str]] = {}

    def find(name: str) -> object:
        homes.update(homes or _read_stub(file))
        if name not in homes:
            if f"{package}.{name}" in FORMER_NAMES:
                return import_module(f"{package}.{name}")
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, its_name = homes[name]
        if module == package:  # a module of the package
            return import_module(f"{package}.{its_name}")
        value = getattr(import_module(module), its_name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted(homes or _read_stub(file))


def _read_stub(file: str) -> dict[str, tuple[str, str]]:
    """Return the module of each name and its name there."""
    # Not imported with the module, so that `import loom` is quick.
    import ast
    from pathlib import Path

    homes: dict[str, tuple[str, str]] = {}
    for line in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        match line:
            case ast.ImportFrom(module=str(module), names=names):
                star = names[0].name == "*"
                found = import_module(module).__all__ if star else [alias.name for alias in names]
                homes.update((name, (module, name)) for name in found)
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=name)):
                homes[alias] = homes[name]
    return homes
