"""`AllocationSpec`: what is asked of Slurm, and of Loom in the allocation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace

from loom.errors import WrongArguments
from loom.slurm.queue import read_duration

NOTICE = 120.0
"""Default seconds before the time limit at which training processes are told to save their state."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""The form of the name of an allocation."""

_UNNAMED = re.compile(r"loom-\d+")
"""The form of the names of allocations that were given none."""

_OURS = {
    "--job-name": "--name",
    "-J": "--name",
    "--output": "",
    "-o": "",
    "--error": "",
    "-e": "",
    "--signal": "--notice",
    "--parsable": "",
    "--wrap": "",
    "--ntasks-per-node": "",
    "--ntasks": "--nodes",
    "-n": "--nodes",
    "--array": "--array",
    "-a": "--array",
}
"""Options of ``sbatch`` that Loom gives itself, and Loom's options in their place."""


_MESH_NAME = re.compile(r"[^\W_]\w*")


@dataclass(frozen=True)
class MeshSpec:
    """Nodes of a named mesh, a component of a heterogeneous job. What is None is as for the allocation."""

    nodes: int = 1
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: str | None = None

    @classmethod
    def of(cls, name: str, given: Mapping[str, object]) -> MeshSpec:
        """Return what a user asks for a mesh.

        Raises:
            WrongArguments: the name or one of the facts makes no sense.
        """
        known = [one.name for one in fields(cls)]
        if not _MESH_NAME.fullmatch(name) or not name.isidentifier():
            raise WrongArguments(f"{name!r} cannot name a mesh: give a name such as trainers")
        if wrong := [one for one in given if one not in known]:
            raise WrongArguments(f"the mesh {name} has no {wrong[0]!r}: give {', '.join(known)}")
        nodes = str(given.get("nodes", "1"))
        if not nodes.isdecimal() or int(nodes) < 1:
            raise WrongArguments(f"the mesh {name} has 1 node at least, not {nodes}")
        texts = {one: str(value) for one, value in given.items() if one != "nodes" and value is not None}
        return cls(int(nodes), **texts)


@dataclass(frozen=True)
class AllocationSpec:
    """An allocation to ask for.

    Raises:
        WrongArguments: something makes no sense, whatever the cluster.
    """

    nodes: int = 1
    name: str | None = None
    """The allocation's name; by default ``loom-JOBID``."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpus_per_node: str | None = None
    """As ``sbatch`` takes it: a number, or ``TYPE:NUMBER``."""
    time_limit: str | None = None
    """As ``sbatch`` takes it: minutes, ``HOURS:MINUTES:SECONDS`` or ``DAYS-HOURS:MINUTES:SECONDS``."""
    notice: float = NOTICE
    """Seconds before the time limit at which training processes are told to save their state."""
    chain: int = 1
    """Allocations in all, each of which submits its successor, which starts when it ends."""
    gateway_only: bool = False
    """True for a gateway without workers."""
    venv: str | None = None
    """A virtual environment with Loom on the nodes; by default the one that submits."""
    container: str | None = None
    """An image with Loom: a file ``.sif`` or an address that Apptainer takes; any other is for pyxis."""
    wheelhouse: str | None = None
    """A folder of wheels, of which each node makes an environment once."""
    options: tuple[str, ...] = ()
    """Further options of ``sbatch``, as they are."""
    meshes: Mapping[str, MeshSpec] = field(default_factory=dict)
    """Named meshes in place of `nodes`, in their order."""
    array: str | None = None
    """Equal jobs of `nodes` each, as ``sbatch --array`` counts them: ``0-7``, or ``0-7%4`` for four at a time. The
    first has the gateway, and the workers of the others join it as they start."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise WrongArguments(f"an allocation has 1 node at least, not {self.nodes}")
        if self.gateway_only and self.nodes > 1:
            raise WrongArguments("a gateway alone has one node: leave --nodes out")
        if self.meshes and (self.nodes > 1 or self.gateway_only):
            raise WrongArguments("meshes have nodes of their own: leave --nodes and --gateway-only out")
        if self.array is not None:
            rest_of_array(self.array)
            if self.meshes or self.gateway_only or self.chain != 1:
                raise WrongArguments(
                    "an array has equal jobs with workers: leave --mesh, --gateway-only and --chain out"
                )
        if self.chain < 1:
            raise WrongArguments(f"a chain has 1 allocation at least, not {self.chain}")
        if self.name is not None:
            check_name(self.name)
        if [self.venv, self.container, self.wheelhouse].count(None) < 2:
            raise WrongArguments("Loom comes from --venv, from --container or from --wheelhouse: give one")
        limit = None if self.time_limit is None else read_duration(self.time_limit)
        if self.time_limit is not None and limit is None:
            raise WrongArguments(
                f"{self.time_limit!r} is no time limit: write minutes, HOURS:MINUTES:SECONDS or "
                "DAYS-HOURS:MINUTES:SECONDS"
            )
        if not 0 <= self.notice < 65536:
            raise WrongArguments(f"a notice is between 0 and 65535 s, not {self.notice:g}")
        if limit is not None and self.notice >= limit:
            raise WrongArguments(
                f"the notice of {self.notice:g} s comes before a time limit of {limit:g} s has begun: give a "
                "longer --time or a shorter --notice"
            )
        for option in self.options:
            word = option.partition("=")[0]
            if word in _OURS:
                instead = f"use {_OURS[word]} of Loom's" if _OURS[word] else "Loom gives it itself"
                raise WrongArguments(f"{word} is no option for an allocation of Loom's: {instead}")

    @property
    def node_count(self) -> int:
        """The nodes of all meshes together."""
        return sum(mesh.nodes for mesh in self.meshes.values()) or self.nodes

    def to_json(self) -> str:
        """Return it as JSON, for the allocation's folder."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> AllocationSpec:
        """Return what `to_json` wrote; what only a newer Loom knows is left out."""
        known = {field.name for field in fields(cls)}
        given = {name: value for name, value in json.loads(text).items() if name in known}
        meshes = {name: MeshSpec(**mesh) for name, mesh in given.get("meshes", {}).items()}
        return cls(**{**given, "options": tuple(given.get("options", ())), "meshes": meshes})


def rest_of_array(array: str) -> str | None:
    """Return, as ``sbatch --array`` takes it, the jobs of an array besides the first; None if there are none.

    Raises:
        WrongArguments: it is of another form.
    """
    indexes, _, limit = array.partition("%")
    count = 0
    for part in indexes.split(","):
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7})(?::([1-9]\d{0,6}))?)?", part)
        count += len(range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))) if match else 0
        if match is None or not count or (limit and not limit.isdecimal()):
            raise WrongArguments(
                f"{array!r} is no array: write such as 0-7, for eight jobs, or 0-7%4, for four of them at a time"
            )
    at_once = f"%{max(int(limit) - 1, 1)}" if limit else ""
    return f"1-{count - 1}{at_once}" if count > 1 else None


def check_name(name: str) -> None:
    """Raise `WrongArguments` if a user may not give an allocation this name."""
    if not NAME.fullmatch(name):
        raise WrongArguments(
            f"{name!r} is no name for an allocation: write at most 64 letters, digits, '-', '_' and '.', the first "
            "of them a letter or a digit"
        )
    if _UNNAMED.fullmatch(name):
        raise WrongArguments(f"{name!r} is a name that Loom gives itself, by the job's id: choose another")


def is_for_apptainer(container: str) -> bool:
    """Return whether Apptainer runs an image, and not pyxis."""
    schemes = ("docker", "oras", "library", "shub")
    return container.endswith(".sif") or container.partition("://")[0] in schemes


def components(spec: AllocationSpec) -> list[AllocationSpec]:
    """Return what is asked for each component of an allocation's job; one if it is not heterogeneous."""
    return [
        replace(
            spec,
            nodes=mesh.nodes,
            partition=mesh.partition or spec.partition,
            account=mesh.account or spec.account,
            qos=mesh.qos or spec.qos,
            gpus_per_node=mesh.gpus_per_node or spec.gpus_per_node,
            meshes={},
        )
        for mesh in spec.meshes.values()
    ] or [spec]


def sbatch_lines(spec: AllocationSpec, name: str, output: str) -> Sequence[str]:
    """Return the options of ``sbatch`` for an allocation, of which no one holds a secret."""
    first, *others = components(spec)
    lines = [*_component_lines(first, name), *_script_lines(spec, output)]
    for other in others:
        lines += ["hetjob", *_component_lines(other, name)]
    return lines


def _component_lines(spec: AllocationSpec, name: str) -> Iterator[str]:
    given = {
        "job-name": name,
        "nodes": str(spec.nodes),
        "ntasks-per-node": "1",
        "partition": spec.partition,
        "account": spec.account,
        "qos": spec.qos,
        "gpus-per-node": spec.gpus_per_node,
        "time": spec.time_limit,
        "array": spec.array,
    }
    yield from (f"--{word}={value}" for word, value in given.items() if value is not None)
    yield from ("--requeue", "--no-kill", *spec.options)


def _script_lines(spec: AllocationSpec, output: str) -> Iterator[str]:
    """Yield the options that concern the batch script, which runs on the first component."""
    yield from (f"--output={output}", "--open-mode=append")
    if spec.notice:
        yield f"--signal=B:USR1@{spec.notice:.0f}"
