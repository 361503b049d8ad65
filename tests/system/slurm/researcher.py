"""What tests with Slurm share: ``loom slurm`` as a user types it, and programs that researchers run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.paths import ROOT
from tests.support.slurm import SlurmCluster
from tests.support.slurm.host import inner

__all__ = ["PROGRAMS", "VIA", "Researcher", "folder_of", "loom", "name_of", "up"]

VIA = ("--via", "ssh://login", "--venv", sys.prefix)
"""Options of ``loom slurm up`` on the laptop."""

PROGRAMS = Path(__file__).with_name("programs")


def loom(
    cluster: SlurmCluster, *arguments: str, host: str = "login", user: str = "ada", **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command ``loom`` on a host to its end."""
    return cluster.hosts[host].run(["loom", *arguments], user, **options)


def up(cluster: SlurmCluster, *options: str, host: str = "login") -> str:
    """Run ``loom slurm up``; what it prints."""
    done = loom(cluster, "slurm", "up", *options, host=host)
    assert done.returncode == 0, done.stderr
    address = done.stdout.removesuffix("\n")
    assert address.startswith("slurm://"), done.stdout
    return address


def name_of(address: str) -> str:
    """The name in an allocation's address."""
    return address.rpartition("/")[2]


def folder_of(cluster: SlurmCluster, address: str, user: str = "ada") -> Path:
    """The folder of an allocation, as this machine sees it."""
    return cluster.homes / user / ".loom" / "slurm" / name_of(address)


class Researcher:
    """A program on a host, which says what it does in lines of JSON. A context manager, which kills it."""

    def __init__(
        self,
        cluster: SlurmCluster,
        program: Path,
        *arguments: str,
        host: str = "login",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._said: list[str] = []
        self._process = cluster.hosts[host].popen(
            [sys.executable, str(program), *arguments],
            "ada",
            {"PYTHONPATH": str(ROOT), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def until(self, event: str, **about: Any) -> dict[str, Any]:
        """What it says when it comes to a point, or to the first of those points that is as ``about``."""
        assert self._process.stdout
        for line in self._process.stdout:
            self._said.append(line)
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                if found["event"] == event and all(found[name] == value for name, value in about.items()):
                    return found
        raise AssertionError(f"it ended before {event} {about}:\n{''.join(self._said[-60:])}")

    def rest(self) -> str:
        """What it says from now on until its end."""
        assert self._process.stdout
        return self._process.stdout.read()

    def kill(self) -> None:
        """Kill it, as a laptop's power button does."""
        inner(self._process).kill()
        self._process.wait(30.0)

    def __enter__(self) -> Researcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        rest, _ = self._process.communicate(timeout=30.0)
        if error is not None:
            print("".join(self._said[-60:]) + rest)
