"""What an extra installs is enough for what it is for."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.support.paths import ROOT
from tests.support.processes import run

NEEDS = {"gateway": ["loom_gateway.server", "loom_gateway.workers.host", "loom_gateway.weaver_process"]}
"""The modules that each extra has to be enough for."""

IMPORT = """
import importlib.abc, sys
absent, modules = set(sys.argv[1].split(",")), sys.argv[2:]

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for module in modules:
    importlib.import_module(module)
"""


def name_of(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed_with(extra: str) -> set[str]:
    """The distributions that an installation with an extra has, with what they depend on."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    left = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"][extra]]]
    found: set[str] = set()
    while left:
        required = left.pop()
        if name_of(required.name) in found:
            continue
        found.add(name_of(required.name))
        for text in metadata.requires(required.name) or ():
            one = Requirement(text)
            if one.marker is None or any(one.marker.evaluate({"extra": each}) for each in {"", *required.extras}):
                left.append(one)
    return found


@pytest.mark.parametrize("extra", NEEDS)
def test_an_extra_is_enough(extra: str) -> None:
    there = installed_with(extra)
    absent = [
        module
        for module, distributions in metadata.packages_distributions().items()
        if not there.intersection(map(name_of, distributions)) and not module.startswith(("loom", "tests", "_"))
    ]
    assert "matplotlib" in absent

    done = run("-c", "import importlib\n" + IMPORT, ",".join(absent), *NEEDS[extra])

    assert done.returncode == 0, done.stderr
