"""`AllocationFolder`: the names in an allocation's folder on the shared home, and what its nodes write there."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

TOKEN = "token"
SPEC = "spec.json"
SCRIPT = "script"
JOBS = "job"
"""The ids of the jobs with a gateway, a line each, the newest last: each but the first continues the one before."""
GROWN = "grown"
"""The ids of the jobs that brought further workers, a line each."""
GATEWAY = "gateway.json"
WORKERS = "workers"
DRAINING = "draining"
"""A folder with a file for each node that Slurm drains, named JOB.NODE. The first node of each job keeps its."""
STATE = "state"
LOG = "log"
NOTICE = "notice-"
"""The beginning of the name of a file of each start of a job, empty until the job ends soon: then it has the word
`SOON`, or why the allocation cannot run. All nodes end then."""
SOON = "notice"


def worker_file(mesh: str = "") -> str:
    """Return the name of the file with the workers of a mesh; by default that of an allocation without meshes."""
    return f"{WORKERS}-{mesh}.txt" if mesh else f"{WORKERS}.txt"


def notice_file(job: int | str, restart: int | str) -> str:
    """Return the name of the file by which all nodes of a start of a job are told to end."""
    return f"{NOTICE}{job}-{restart}"


@dataclass(frozen=True)
class GatewayFacts:
    """Where the gateway of an allocation listens."""

    host: str
    """The address of its node, which the cluster's other nodes and the login nodes reach."""
    port: int
    job_id: int
    restart: int = 0
    """How often Slurm had requeued the job."""
    node: str = ""
    """The name of its node."""
    missing: tuple[str, ...] = ()
    """In words, the nodes whose worker did not come, or cannot be reached from the gateway's node."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GatewayFacts:
        """Return what `to_json` wrote; what only a newer Loom knows is left out."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in json.loads(text).items() if name in known}
        return cls(**{**given, "missing": tuple(given.get("missing", ()))})


class WorkerKey(NamedTuple):
    """Names the file with a worker's address, in the folder `WORKERS`."""

    job: int
    restart: int
    rank: int
    """The number of the node in its job, of which those of each mesh follow one another."""
    node: str

    def __str__(self) -> str:
        return f"{self.job}.{self.restart}.{self.rank}.{self.node}"

    @classmethod
    def read(cls, text: str) -> WorkerKey | None:
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)\.(.+)", text)
        return match and cls(int(match[1]), int(match[2]), int(match[3]), match[4])


class PublishedWorker(NamedTuple):
    """A worker that its node has published."""

    key: WorkerKey
    address: str

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port)


def published(folder: Path) -> list[PublishedWorker]:
    """Return the workers in an allocation's folder, by job, restart and rank."""
    found = []
    for path in (folder / WORKERS).iterdir():
        key = WorkerKey.read(path.name)
        try:
            address = path.read_text().strip() if key else ""
        except OSError:  # it was just removed
            continue
        if key is not None and address:
            found.append(PublishedWorker(key, address))
    return sorted(found)


def merged(
    workers: Iterable[PublishedWorker], job: int, restart: int, grown: Container[int]
) -> list[PublishedWorker]:
    """Return the workers of a gateway's job, and after them those of jobs that have grown it.

    Those that the same job had before a requeue, and the jobs before it in a chain, are none of them.

    Args:
        job: the gateway's job.
        restart: how often it was requeued.
        grown: the ids of the jobs that have grown it.
    """
    own = [worker for worker in workers if worker.key[:2] == (job, restart)]
    others = [worker for worker in workers if worker.key.job != job and worker.key.job in grown]
    return own + others
