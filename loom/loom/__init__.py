"""Loom: drive a Monarch actor mesh inside a cluster from a laptop or a notebook.

Public names are imported when they are first used (PEP 562), so that ``import loom`` costs milliseconds and
needs neither torch nor torchmonarch. ``__init__.pyi`` is the table of them, for this module and for type checkers::

    import loom

    class Counter(loom.Actor):
        def __init__(self, start): self.n = start
        @loom.endpoint
        def add(self, k): self.n += k; return self.n

    with loom.local(hosts=2) as job:
        counters = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("counters", Counter, 10)
        print(counters.add.call(1).get())
"""

from __future__ import annotations

from importlib import import_module

from loom._version import __version__ as __version__

_homes: dict[str, tuple[str, str]] = {}
"""The module of each public name and its name there; empty until the first name is used."""


def _read_stub() -> dict[str, tuple[str, str]]:
    """Return what ``__init__.pyi`` lists. The imports are here so that ``import loom`` does without them."""
    import ast
    from pathlib import Path

    homes: dict[str, tuple[str, str]] = {}
    for line in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        match line:
            case ast.ImportFrom(module=str(module), names=names):
                star = names[0].name == "*"
                found = import_module(module).__all__ if star else [alias.name for alias in names]
                homes.update((name, (module, name)) for name in found)
            case ast.Assign(targets=[ast.Name(id=alias)], value=ast.Name(id=name)):
                homes[alias] = homes[name]
    return homes


def __getattr__(name: str) -> object:
    global _homes
    _homes = _homes or _read_stub()
    if name not in _homes:
        raise AttributeError(f"module 'loom' has no attribute {name!r}")
    module, its_name = _homes[name]
    value = globals()[name] = getattr(import_module(module), its_name)
    return value


def __dir__() -> list[str]:
    return sorted(_homes or _read_stub())
