"""Builds the page when Loom is installed or packed, if there is npm. Hatch runs this; see ``pyproject.toml``.

A wheel without the page is an error. An editable install without npm goes on: the gateway then says what to do.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "gateway/dashboard"
BUILT = "gateway/loom_gateway/dashboard/static"
STAMP = "source.sha256"  # beside the page, the hash of what it was built from
_NOT_BUILT = ("node_modules", "tests", "__pycache__")


class BuildPage(BuildHookInterface):
    """Runs ``npm ci`` and ``npm run build`` unless the page that is there was built from this source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        built, source = root / BUILT, root / SOURCE
        error = ""
        if (source / "package.json").is_file():
            error = build(source, built)
        if error and version == "editable":
            sys.stderr.write(f"Loom's page is not built: {error}. Everything else works.\n")
        elif error or not (built / "index.html").is_file():
            raise RuntimeError(
                f"a wheel of Loom has its page, which needs Node.js: {error or 'there is no source'}"
            )
        build_data["artifacts"].append(f"/{BUILT}/**")


def build(source: Path, built: Path) -> str:
    """Build the page if it is older than its source; return why it could not be built, or nothing."""
    stamp, now = built / STAMP, digest(source)
    if stamp.is_file() and stamp.read_text() == now:
        return ""
    npm = shutil.which("npm")
    if npm is None:  # what `npm run build` has left elsewhere is taken as it is
        return "" if (built / "index.html").is_file() else "there is no npm"
    for command in (["ci", "--no-audit", "--no-fund"], ["run", "build"]):
        try:
            done = subprocess.run([npm, *command], cwd=source, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"npm {command[0]}: {error}"
        if done.returncode:
            return f"npm {' '.join(command)} exits with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
    stamp.write_text(now)
    return ""


def digest(source: Path) -> str:
    """Return a hash of what the page is built from. Images are made without its tests and hidden files."""
    found = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        if path.is_file() and inside.parts[0] not in _NOT_BUILT and inside.name[0] != ".":
            found.update(f"{inside}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()
