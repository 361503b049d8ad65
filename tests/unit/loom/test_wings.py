"""The core runs without its wings: it imports none, and reaches them by `loom.wings.Part` on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from loom.wings import Part

WINGS = (
    "loom.alerting",
    "loom.chaos",
    "loom.exporters",
    "loom.instrument",
    "loom.nats",
    "loom.notebook",
    "loom.rl",
    "loom.slurm",
    "loom.tensors",
    "loom.train",
    "loom_gateway.chaos",
    "loom_gateway.pod",
    "loom_gateway.watched_tensors",
    "loom_proxy.kubernetes",
    "loom_proxy.notebook.cells",
    "loom_proxy.remote",
    "loom_proxy.slurm",
)


def is_wings(module: str) -> bool:
    return any(f"{module}.".startswith(f"{wing}.") for wing in WINGS)


@pytest.mark.parametrize("part", Part, ids=lambda part: part.name)
def test_a_part_is_there_and_a_wings(part: Part) -> None:
    module, _ = part.value

    assert callable(part.load())
    assert is_wings(module)


@pytest.mark.parametrize(
    "core",
    [
        "loom.threadlet",
        "loom.weaver.weaver",
        "loom.rest_client",
        "loom_proxy.job",
        "loom_proxy.local",
        "loom_proxy.session.open",
        "loom_gateway.app",
        "loom_gateway.driver.__main__",
        "loom_gateway.workers.host",
    ],
)
def test_the_core_is_imported_without_a_wing(core: str) -> None:
    program = f"import sys, {core}; print(*sys.modules)"

    imported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert imported.returncode == 0, imported.stderr
    assert not [module for module in imported.stdout.split() if is_wings(module)]
