"""The folder of an allocation whose gateway is a cluster of this machine, and a ``squeue`` that is a stand-in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from loom.slurm.folder import GATEWAY, JOBS, TOKEN, GatewayFacts

__all__ = ["MadeAllocation"]

_SQUEUE = """\
#!/bin/sh
# A stand-in for Slurm's squeue: it prints the file beside it, with one job.
case "$*" in *--version*) echo slurm 22.05.8; exit;; esac
cat "${0%/*}/queue"
"""


@dataclass
class MadeAllocation:
    """An allocation of job 17 with the name ``train``, as its nodes and Slurm would tell of it.

    Args:
        root: the folder of all allocations, which does not exist yet.
    """

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / "train"

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a login node has this allocation and this Slurm."""
        return {"LOOM_SLURM_FOLDER": str(self.root), "PATH": f"{self.root}/bin:/usr/bin:/bin"}

    def make(self, token: str, port: int) -> None:
        """Make the allocation, of which Slurm says that it runs."""
        self.folder.mkdir(parents=True)
        (self.folder / JOBS).write_text("17\n")
        (self.folder / TOKEN).write_text(f"{token}\n")
        (self.root / "bin").mkdir()
        for name in ("squeue", "sbatch"):
            (self.root / "bin" / name).write_text(_SQUEUE)
            (self.root / "bin" / name).chmod(0o755)
        self.is_in_queue("RUNNING")
        self.move_gateway(port)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this machine the login node."""
        monkeypatch.setenv("LOOM_SLURM_FOLDER", str(self.root))
        monkeypatch.setenv("PATH", f"{self.root}/bin:{os.environ['PATH']}")

    def move_gateway(self, port: int) -> None:
        """Let the gateway listen on another port of 127.0.0.1."""
        (self.folder / GATEWAY).write_text(GatewayFacts("127.0.0.1", port, 17).to_json())

    def end_gateway(self) -> None:
        """Let there be no gateway."""
        (self.folder / GATEWAY).unlink()

    def is_in_queue(self, state: str, reason: str = "None") -> None:
        """Let Slurm tell of the job."""
        columns = [
            "17",
            state,
            "ada",
            "main",
            "(null)",
            "1",
            "N/A",
            "N/A",
            "1700000000",
            "10:00",
            "n1",
            reason,
            "train",
        ]
        (self.root / "bin" / "queue").write_text("|".join(columns) + "\n")

    def is_forgotten(self) -> None:
        """Let Slurm know the job no more."""
        (self.root / "bin" / "queue").write_text("")
