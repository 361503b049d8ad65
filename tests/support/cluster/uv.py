"""A stand-in for uv in a pod without a network: installs nothing, and fails for what is not there. A test tool.

A package that is there in another version than is wanted stands for the wanted one, which uv would fetch: images
name versions, and a new environment has the newest ones.

The first argument is the Python interpreter's; the rest is uv's: ``pip install`` with options and requirements.
"""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from pathlib import Path

import tomllib
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

_WITH_VALUE = ("--index-url", "--extra-index-url", "--find-links", "-i", "-f", "--index", "--default-index")


def _problem(word: str) -> str:
    """Why a requirement is not met; empty if it is."""
    if word.startswith((".", "/")):
        return _problem_of_path(Path(word))
    try:
        wanted = Requirement(word)
    except InvalidRequirement:
        return f"{word}: only requirements by name are known here"
    return "" if _version(wanted.name) else f"{wanted.name} is not installed, and there is no network"


def _version(name: str) -> str | None:
    """The version of a package that is installed here."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _problem_of_path(path: Path) -> str:
    """Why a folder or a wheel cannot be installed; empty if what it has is installed already."""
    if not path.exists():
        return f"Distribution not found at: {path.resolve().as_uri()}"
    if path.suffix == ".whl":
        try:
            name, version, *_ = parse_wheel_filename(path.name)
            zipfile.ZipFile(path).close()
        except (InvalidWheelFilename, zipfile.BadZipFile) as error:
            return f"Failed to read {path}: {error}"
        if (found := _version(name)) != str(version):
            return f"{path} has {name} {version}, and {found or 'none'} is installed here"
        return ""
    project = path / "pyproject.toml"
    if not project.exists():
        return f"{path.resolve()} does not appear to be a Python project, as `pyproject.toml` is not there"
    return _problem(tomllib.loads(project.read_text())["project"]["name"])


def main(arguments: list[str]) -> int:
    if arguments[:2] != ["pip", "install"]:
        print(f"error: unrecognized subcommand {' '.join(arguments[:2])}", file=sys.stderr)
        return 2
    words = iter(arguments[2:])
    failed = False
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            problem = _problem(word)
            if problem:
                print(f"error: {problem}", file=sys.stderr, flush=True)
            else:
                print(f"Requirement already satisfied: {word}", flush=True)
            failed = failed or bool(problem)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
