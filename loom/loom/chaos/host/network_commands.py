"""The system's programs for faults of the network, and the shell that undoes their work."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable

from loom.errors import FaultRefused

PROGRAM_WITHIN = 10.0  # seconds that ``ip``, ``tc`` or ``nft`` may take

COMPONENT = "images/kubernetes/chaos"
"""The kustomize component that gives a cluster's pods the rights that faults need."""

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}


def run(program: str, *arguments: str, given: str | None = None) -> str:
    """Run a program and return its output."""
    if shutil.which(program) is None:
        raise FaultRefused(f"the program {program} is not installed here: install {_PACKAGES[program]}")
    command = [program, *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=PROGRAM_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise FaultRefused(f"`{' '.join(command)}` did not end within {PROGRAM_WITHIN:g} s") from error
    _check(" ".join(command), done.returncode, done.stderr)
    return done.stdout


def run_at_end(*commands: list[str]) -> Callable[[], None]:
    """Return a function that runs commands. If this process is killed first, they run at that moment."""
    program = " && ".join(map(shlex.join, commands))
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    # The shell waits for the end of a pipe that only this process holds, and the kernel closes it if it is killed.
    shell = subprocess.Popen(
        ["sh", "-c", f"read nothing; {program}"],
        stdin=pipe,
        stdout=null,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )

    def undo() -> None:
        _, errors = shell.communicate(timeout=PROGRAM_WITHIN)
        _check(program, shell.returncode, errors)

    return undo


def _check(command: str, code: int, errors: str) -> None:
    if code != 0:
        errors = errors.strip() or f"exit code {code}"
        forbidden = "ermitted" in errors or "ermission" in errors
        needed = f"it needs root, or CAP_NET_ADMIN in this network namespace; in a pod, the component {COMPONENT}"
        advice = f": {needed}" if forbidden else ""
        raise FaultRefused(f"`{command}` failed: {errors}{advice}")
