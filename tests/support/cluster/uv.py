"""A stand-in for uv in a pod without a network: installs nothing, and fails for what is not there. A test tool.

The first argument is the Python interpreter's; the rest is uv's: ``pip install`` with options and requirements.
"""

from __future__ import annotations

import importlib.metadata
import sys

from packaging.requirements import InvalidRequirement, Requirement

_WITH_VALUE = ("--index-url", "--extra-index-url", "--find-links", "-i", "-f", "--index", "--default-index")


def _problem(word: str) -> str:
    """Why a requirement is not met; empty if it is."""
    try:
        wanted = Requirement(word)
    except InvalidRequirement:
        return f"{word}: only requirements by name are known here"
    try:
        found = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed, and there is no network"
    if not wanted.specifier.contains(found, prereleases=True):
        return f"{word} is wanted, {wanted.name} {found} is installed, and there is no network"
    return ""


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
            print(f"error: {problem}" if problem else f"Requirement already satisfied: {word}", flush=True)
            failed = failed or bool(problem)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
