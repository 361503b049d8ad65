"""No import goes in a circle, and the laptop's side runs without what only the cluster has.

Who may import whom is a contract in pyproject.toml, which `lint-imports` checks.
"""

from __future__ import annotations

import subprocess
import sys

import grimp
import pytest


def test_no_import_goes_in_a_circle_not_even_a_lazy_one_or_one_for_type_checkers() -> None:
    graph = grimp.build_graph("loom", "loom_gateway", "loom_proxy", cache_dir=None)

    circles = circles_of(graph)

    assert not circles, "\n".join(circles)
    assert len(graph.modules) > 300


def test_a_circle_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b")):
        graph.add_import(importer=importer, imported=imported)

    assert circles_of(graph) == ["b -> c -> b", "c -> b -> c"]


def circles_of(graph: grimp.ImportGraph) -> list[str]:
    """Return for each import that is part of a circle the shortest way round."""
    return [
        " -> ".join([importer, *chain])
        for importer in sorted(graph.modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if (chain := graph.find_shortest_chain(imported, importer))
    ]


@pytest.mark.parametrize(
    "name",
    [
        "loom",
        "loom_proxy.job",
        "loom_proxy.local",
        "loom.cli.app",
        "loom.rl.diagnosis",
        "loom.train",
        "loom.chaos.runs.reports",
        "loom.chaos.plans",
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
