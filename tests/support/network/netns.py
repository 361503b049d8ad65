"""What tests with network namespaces share: commands that must succeed, and why namespaces cannot be made here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable

__all__ = ["run", "why_not"]


def run(*command: str, given: str | None = None) -> str:
    """Run a command to its end; its output. Raises CalledProcessError."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=30.0)
    return done.stdout


def why_not(programs: Iterable[tuple[str, str]], attempt: Callable[[str], None]) -> str:
    """What this machine lacks; empty if nothing.

    Args:
        programs: that are needed, with Debian's package for each.
        attempt: tries what is needed in a namespace, given by its name, which is removed afterwards.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in programs:
        if shutil.which(program) is None:
            return f"the program {program} (Debian package {package}) is not installed"
    trial = f"loom-trial-{os.getpid()}"
    try:
        run("ip", "netns", "add", trial)
        attempt(trial)
        return ""
    except subprocess.CalledProcessError as error:
        return f"this machine cannot make network namespaces: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", trial], capture_output=True)
