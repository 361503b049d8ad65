"""Who may import whom: the laptop's side needs neither torch nor Monarch, and the three packages stay apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

PACKAGES = {"loom": ROOT / "loom", "loom_gateway": ROOT / "gateway", "loom_proxy": ROOT / "proxy"}

MAY_IMPORT_MONARCH = (
    "loom.actor",
    "loom.weaver",
    "loom.threadlet",
    "loom_gateway.driver",
    "loom_gateway.workers.host",
)
"""Modules, and packages with all that is in them."""

LAZY_IN_FUNCTIONS = ("loom.cli",)
"""Where a function of `loom` may import another package, when its command runs and not before."""


class Import(NamedTuple):
    module: str
    """Who imports."""
    line: int
    name: str
    """What is imported, in full."""
    in_function: bool

    def is_of(self, *packages: str) -> bool:
        return is_in(self.name, *packages)

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(module: str, is_package: bool, tree: ast.AST, in_function: bool = False) -> Iterator[Import]:
    """The imports of a module that happen when it runs: not those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_type_checking(node.test):
            for rest in node.orelse:
                yield from imports_of(module, is_package, ast.Module([rest], []), in_function)
        elif isinstance(node, ast.Import):
            yield from (Import(module, node.lineno, alias.name, in_function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module.split("."), is_package)
            yield from (Import(module, node.lineno, f"{base}.{alias.name}", in_function) for alias in node.names)
        elif isinstance(node, ast.Call) and is_import_call(node):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(module, node.lineno, name.value, in_function)
            yield from imports_of(module, is_package, node, in_function)
        else:
            inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports_of(module, is_package, node, inside)


def absolute(node: ast.ImportFrom, module: list[str], is_package: bool) -> str:
    """The module that a ``from`` imports from, in full."""
    if not node.level:
        return node.module or ""
    ups = node.level - 1 if is_package else node.level
    return ".".join([*module[: len(module) - ups], *filter(None, [node.module])])


def is_import_call(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def parse(source: str, module: str = "pkg.mod", is_package: bool = False) -> list[Import]:
    return list(imports_of(module, is_package, ast.parse(source)))


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    found: list[Import] = []
    for module, path in modules():
        found += parse(path.read_text(), module, path.name == "__init__.py")
    return found


def refused(broken: list[Import]) -> str:
    return "\n".join(str(one) for one in broken)


def test_loom_imports_neither_the_gateway_nor_the_proxy(imports: list[Import]) -> None:
    broken = [
        one
        for one in imports
        if is_in(one.module, "loom")
        and one.is_of("loom_gateway", "loom_proxy")
        and not (one.in_function and is_in(one.module, *LAZY_IN_FUNCTIONS))
    ]

    assert not broken, refused(broken)


def test_not_even_a_command_imports_the_gateway(imports: list[Import]) -> None:
    broken = [one for one in imports if is_in(one.module, "loom") and one.is_of("loom_gateway")]

    assert not broken, refused(broken)


def test_the_gateway_and_the_proxy_never_import_each_other(imports: list[Import]) -> None:
    broken = [
        one
        for one in imports
        if (is_in(one.module, "loom_gateway") and one.is_of("loom_proxy"))
        or (is_in(one.module, "loom_proxy") and one.is_of("loom_gateway"))
    ]

    assert not broken, refused(broken)


def test_monarch_is_imported_only_where_a_root_client_or_an_actor_runs(imports: list[Import]) -> None:
    broken = [one for one in imports if one.is_of("monarch") and not is_in(one.module, *MAY_IMPORT_MONARCH)]

    assert not broken, refused(broken)


def test_the_proxy_and_the_wire_import_no_torch(imports: list[Import]) -> None:
    broken = [one for one in imports if one.is_of("torch") and is_in(one.module, "loom_proxy", "loom.wire")]

    assert not broken, refused(broken)


def test_every_package_is_looked_at(imports: list[Import]) -> None:
    assert {one.module.partition(".")[0] for one in imports} == set(PACKAGES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import monarch.actor", ["monarch.actor"]),
        ("import os, monarch", ["os", "monarch"]),
        ("from monarch import actor", ["monarch.actor"]),
        ("from . import sibling", ["pkg.sibling"]),
        ("from .sibling import name", ["pkg.sibling.name"]),
        ("def f():\n    import monarch", ["monarch"]),
        ("class A:\n    def f(self):\n        import monarch", ["monarch"]),
        ("try:\n    import monarch\nexcept ImportError:\n    pass", ["monarch"]),
        ("x = import_module('monarch.actor').Actor", ["monarch.actor"]),
        ("importlib.import_module('monarch')", ["monarch"]),
        ("if TYPE_CHECKING:\n    import monarch\nelse:\n    import os", ["os"]),
        ("if typing.TYPE_CHECKING:\n    import monarch", []),
        ("if not TYPE_CHECKING:\n    import monarch", ["monarch"]),
        ("'import monarch'", []),
    ],
)
def test_an_import_is_seen_however_it_is_written(source: str, expected: list[str]) -> None:
    assert [one.name for one in parse(source)] == expected


def test_a_relative_import_in_a_package_is_of_the_package() -> None:
    assert [one.name for one in parse("from . import a\nfrom .b import c\nfrom ..d import e", "x.pkg", True)] == [
        "x.pkg.a",
        "x.pkg.b.c",
        "x.d.e",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "loom",
        "loom_proxy.job",
        "loom_proxy.local",
        "loom.cli.app",
        "loom.train",
        "loom.chaos.runs.reports",
        "loom.chaos.plans.files",
    ],
)
def test_the_laptops_side_needs_neither_torch_nor_monarch_nor_fastapi(name: str) -> None:
    assert not imported_with(name, "torch", "monarch", "fastapi", "uvicorn", "numpy", "matplotlib")


@pytest.mark.parametrize("name", ["loom.train.job", "loom.train.digits", "loom.train.controller.lighthouse"])
def test_a_job_can_be_described_without_torch(name: str) -> None:
    assert not imported_with(name, "torch", "torchft", "numpy", "sklearn")


def imported_with(name: str, *heavy: str) -> list[str]:
    """Which of some packages a module imports."""
    program = (
        f"import sys, {name}\n"
        f"print(*{{module.partition('.')[0] for module in sys.modules}}.intersection({heavy!r}))"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.split()
