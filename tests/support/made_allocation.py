"""The folder of an allocation whose gateway is a cluster of this machine, and stand-ins for Slurm's commands."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from loom.slurm.folder import GATEWAY, JOBS, TOKEN, GatewayFacts

__all__ = ["MadeAllocation"]

_COMMANDS = {
    "squeue": """\
#!/bin/sh
# A stand-in for Slurm's squeue: it prints the file beside it.
case "$*" in *--version*) echo slurm 22.05.8; exit;; esac
cat "${0%/*}/queue"
: >"${0%/*}/asked"
""",
    "sbatch": """\
#!/bin/sh
# A stand-in for Slurm's sbatch: it does what the file beside it says.
cat >"${0%/*}/submitted"
. "${0%/*}/on_submit"
echo 18
""",
    "scancel": """\
#!/bin/sh
# A stand-in for Slurm's scancel: the job is over in the file beside it, also by a signal to its script.
state=CANCELLED
[ "$1" = --batch ] && state=COMPLETED
for id; do :; done
echo "$id" >>"${0%/*}/cancelled"
sed -i "s/^$id|[A-Z]*|/$id|$state|/" "${0%/*}/queue"
""",
}


@dataclass
class MadeAllocation:
    """An allocation of the name ``train``, first of job 17, as its nodes and Slurm would tell of it.

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
        return {"LOOM_SLURM_FOLDER": str(self.root), "PATH": f"{self._bin}:/usr/bin:/bin"}

    @property
    def submitted(self) -> str:
        """The batch script that was submitted."""
        return (self._bin / "submitted").read_text()

    @property
    def cancelled(self) -> list[str]:
        """The ids of the jobs that were cancelled."""
        file = self._bin / "cancelled"
        return file.read_text().split() if file.exists() else []

    @property
    def is_asked_for(self) -> bool:
        """Whether Slurm was asked for the job."""
        return (self._bin / "asked").exists()

    @property
    def _bin(self) -> Path:
        return self.root / "bin"

    def make(self, token: str, port: int) -> None:
        """Make the allocation, of which Slurm says that it runs."""
        self.folder.mkdir(parents=True)
        (self.folder / JOBS).write_text("17\n")
        (self.folder / TOKEN).write_text(f"{token}\n")
        self._bin.mkdir()
        for name, script in _COMMANDS.items():
            (self._bin / name).write_text(script)
            (self._bin / name).chmod(0o755)
        self.is_in_queue("RUNNING")
        self.move_gateway(port)

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this machine the login node."""
        monkeypatch.setenv("LOOM_SLURM_FOLDER", str(self.root))
        monkeypatch.setenv("PATH", f"{self._bin}:{os.environ['PATH']}")

    def move_gateway(self, port: int) -> None:
        """Let the gateway listen on another port of 127.0.0.1."""
        (self.folder / GATEWAY).write_text(GatewayFacts("127.0.0.1", port, 17).to_json())

    def end_gateway(self) -> None:
        """Let there be no gateway."""
        (self.folder / GATEWAY).unlink()

    def is_in_queue(self, state: str, reason: str = "None") -> None:
        """Let Slurm tell of the job."""
        (self._bin / "queue").write_text(f"{_row(17, state, reason)}\n")

    def runs_when_submitted(self, port: int | None) -> None:
        """End job 17, and let what is submitted be job 18, which runs; its gateway listens on a port, if given."""
        self.is_in_queue("COMPLETED")
        script = f"echo '{_row(18, 'RUNNING')}' >>{self._bin}/queue\n"
        if port is not None:
            facts = GatewayFacts("127.0.0.1", port, 18).to_json()
            script += f"echo '{facts}' >{self.folder}/{GATEWAY}\n"
        (self._bin / "on_submit").write_text(script)


def _row(job: int, state: str, reason: str = "None") -> str:
    """The row of a job as ``squeue --format`` prints it."""
    return f"{job}|{state}|ada|main|(null)|1|N/A|N/A|1700000000|10:00|n1|{reason}|train"
