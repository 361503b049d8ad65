"""Two versions of Loom's code side by side, for tests of upgrades."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT

FROM = os.environ.get("LOOM_UPGRADE_FROM", "HEAD")
"""The commit with the old version. By default that of the checkout, which a clone of any depth has: then the two
differ in the checkout's uncommitted changes and in their numbers alone."""

PACKAGES = ("loom", "gateway/loom_gateway", "proxy/loom_proxy")


class Version:
    """A copy of Loom's code in a folder, which processes run.

    Args:
        name: what `loom.__version__` says there.
        raise_minor: by how much the protocol's minor version is raised.
    """

    def __init__(self, folder: Path, name: str, raise_minor: int = 0) -> None:
        self.name = name
        paths = [folder / package.split("/")[0] for package in PACKAGES]
        self.variables: Mapping[str, str] = {
            "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))  # the tests are those of the checkout
        }
        """The environment of processes that run it."""
        core = folder / "loom" / "loom"
        _replace(core / "_version.py", r'__version__ = ".*"', f'__version__ = "{name}"')
        if raise_minor:
            handshake = core / "wire" / "handshake.py"
            found = re.search(r"^PROTOCOL = \((\d+), (\d+)\)", handshake.read_text(), re.MULTILINE)
            assert found is not None
            raised = f"PROTOCOL = ({found[1]}, {int(found[2]) + raise_minor})"
            _replace(handshake, re.escape(found[0]), raised)

    @classmethod
    def before(cls, folder: Path) -> Version:
        """The version of the commit `FROM`."""
        command = ["git", "-C", str(ROOT), "archive", FROM, *PACKAGES]
        archive = subprocess.run(command, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder)
        return cls(folder, "0.0.1+before")

    @classmethod
    def after(cls, folder: Path) -> Version:
        """The checkout, with the next minor version of the protocol."""
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        return cls(folder, "0.0.2+after", raise_minor=1)


def _replace(path: Path, pattern: str, text: str) -> None:
    content, number = re.subn(pattern, text, path.read_text())
    assert number == 1, f"{path} has {number} of {pattern}"
    path.write_text(content)
