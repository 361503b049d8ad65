"""``loom slurm``: allocations of Slurm with a gateway and workers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from loom.cli.options import Json
from loom.cli.output import counted, print_json, say, say_lines, show, when
from loom.errors import LoomError, WrongArguments

if TYPE_CHECKING:
    from loom.slurm.allocation import Allocation, ListedAllocation
    from loom.slurm.queue import QueuedJob, Slurm
    from loom.slurm.spec import MeshSpec

app = typer.Typer(
    help="Run Loom in an allocation of Slurm: a gateway on its first node, a worker on each.", no_args_is_help=True
)

Via = Annotated[
    str | None,
    typer.Option(
        "--via",
        metavar="ssh://[USER@]HOST[:PORT]",
        help="The login node, by OpenSSH and its configuration. Default: this machine is one.",
    ),
]
Name = Annotated[str, typer.Argument(help="Name of the allocation, as `loom slurm list` shows it.")]
Partition = Annotated[str | None, typer.Option("--partition", "-p", help="Partition of the cluster.")]
Account = Annotated[str | None, typer.Option("--account", "-A", help="Account that pays.")]
Qos = Annotated[str | None, typer.Option("--qos", "-q", help="Quality of service.")]
Gpus = Annotated[str | None, typer.Option("--gpus-per-node", metavar="[TYPE:]NUMBER", help="GPUs of each node.")]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time", "-t", metavar="TIME", help="Time limit, as for sbatch. Default: the partition's."),
]
Options = Annotated[
    list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Further options of sbatch, as they are.")
]


@app.command()
def up(
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1, help="Nodes, each with a worker.")] = 1,
    name: Annotated[str | None, typer.Option("--name", help="Name of the allocation. Default: loom-JOBID.")] = None,
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    gpus_per_node: Gpus = None,
    time_limit: TimeLimit = None,
    notice: Annotated[
        float,
        typer.Option(
            "--notice",
            min=0,
            metavar="SECONDS",
            help="How long before the time limit training processes are told to save their state.",
        ),
    ] = 120.0,
    chain: Annotated[
        int,
        typer.Option("--chain", min=1, help="Allocations one after the other: each submits the next at its start."),
    ] = 1,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            "--mesh",
            metavar="NAME:nodes=N[,KEY=VALUE...]",
            help="In place of --nodes: those of a named mesh; keys: partition, account, qos, gpus-per-node.",
        ),
    ] = None,
    gateway_only: Annotated[
        bool, typer.Option("--gateway-only", help="A gateway without workers, for `loom run` in other jobs.")
    ] = False,
    venv: Annotated[
        str | None,
        typer.Option("--venv", metavar="FOLDER", help="Virtual environment on the nodes. Default: this one."),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option("--container", metavar="IMAGE", help="Image with Loom: .sif by Apptainer, others by pyxis."),
    ] = None,
    wheelhouse: Annotated[
        str | None,
        typer.Option("--wheelhouse", metavar="FOLDER", help="Wheels of which each node makes an environment."),
    ] = None,
    array: Annotated[
        str | None,
        typer.Option(
            "--array",
            metavar="INDEXES",
            help="Equal jobs, such as 0-7%4: the others join the gateway of the first when they start.",
        ),
    ] = None,
    via: Via = None,
    options: Options = None,
) -> None:
    """Submit an allocation, wait until its gateway answers, and print its address.

    Without a name it is loom-JOBID. Ctrl-C while it waits cancels it.
    """
    from loom.slurm.address import SlurmAddress
    from loom.slurm.allocation import Allocation
    from loom.slurm.spec import AllocationSpec
    from loom.slurm.ssh import parse_ssh_address

    spec = AllocationSpec(
        nodes=nodes,
        name=name,
        partition=partition,
        account=account,
        qos=qos,
        gpus_per_node=gpus_per_node,
        time_limit=time_limit,
        notice=notice,
        chain=chain,
        gateway_only=gateway_only,
        venv=venv,
        container=container,
        wheelhouse=wheelhouse,
        options=tuple(options or ()),
        meshes=dict(map(_mesh, mesh or ())),
        array=array,
    )
    with _slurm(via) as slurm:
        allocation = Allocation.submit(slurm, spec, _tell)
        _tell(f"{allocation.name}: submitted job {allocation.job_id}")
        try:
            allocation.wait(_tell)
        except BaseException as error:
            with contextlib.suppress(LoomError):
                if ended := allocation.cancel():
                    _tell(f"{allocation.name}: job {', '.join(map(str, ended))} cancelled")
            if isinstance(error, KeyboardInterrupt):
                raise typer.Exit(1) from None
            raise
        address = str(SlurmAddress(allocation.name, None if via is None else parse_ssh_address(via)))
        _tell(f'join it: job = loom.connect("{address}")    end it: loom slurm down {_words(allocation.name, via)}')
    say(address)


@app.command("list")
def list_(
    via: Via = None,
    everything: Annotated[bool, typer.Option("--all", help="Ended ones, too.")] = False,
    json: Json = False,
) -> None:
    """List your allocations, with the state of the job that they have now."""
    from loom.slurm.allocation import listed

    with _slurm(via) as slurm:
        found = [one for one in listed(slurm) if everything or one.lives]
    columns = ["name", "job", "state", "nodes", "reason", "start", "ends"]
    show(json, {"allocations": [_described(one) for one in found]}, "allocations", columns, map(_row, found))


@app.command()
def status(name: Name, via: Via = None, json: Json = False) -> None:
    """Show an allocation: its job, its nodes, its gateway, and what it waits for."""
    with _slurm(via) as slurm:
        allocation = _found(slurm, name)
        job = allocation.job()
        gateway = None if job is None or job.state.is_over else allocation.gateway()
    if json:
        print_json(
            {
                "name": name,
                "folder": allocation.folder,
                "job": None if job is None else _described_job(job),
                "gateway": None if gateway is None else {"host": gateway.host, "port": gateway.port},
                "missing": [] if gateway is None else list(gateway.missing),
            }
        )
        return
    say(f"{name}: {_sentence(allocation.job_id, job)}")
    if gateway is not None:
        say(f"gateway: {gateway.host}:{gateway.port} on {gateway.node}")
        for text in gateway.missing:
            say(f"missing: {text}")
    say(f"folder: {allocation.folder} on {slurm.login.name}")


@app.command()
def down(name: Name, via: Via = None) -> None:
    """End an allocation, with the rest of its chain. What trains there is told to save its state first."""
    with _slurm(via) as slurm:
        ended = _found(slurm, name).end(_tell)
    jobs = f"ended job {', '.join(map(str, ended))}" if ended else "no job of it lives"
    say(f"{name}: {jobs}")


@app.command()
def logs(
    name: Name,
    node: Annotated[str | None, typer.Option("--node", help="Only this node's.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each log.")] = 40,
    via: Via = None,
) -> None:
    """Show the last lines of an allocation's logs: of its batch scripts, workers and gateway."""
    with _slurm(via) as slurm:
        say_lines(_found(slurm, name).last_lines(lines, node).rstrip("\n"))


@app.command()
def grow(
    name: Name,
    more: Annotated[str, typer.Argument(metavar="+NODES", help="How many nodes to add.")],
    partition: Partition = None,
    account: Account = None,
    qos: Qos = None,
    gpus_per_node: Gpus = None,
    time_limit: TimeLimit = None,
    via: Via = None,
    options: Options = None,
) -> None:
    """Add workers to an allocation's gateway, by a further job. Their hosts join the sessions that live."""
    from dataclasses import replace

    if not re.fullmatch(r"\+?[1-9]\d{0,5}", more):
        raise WrongArguments(f"{more!r} is no number of nodes to add: write such as +2")
    with _slurm(via) as slurm:
        allocation = _found(slurm, name)
        spec = allocation.spec()
        spec = replace(
            spec,
            partition=partition or spec.partition,
            account=account or spec.account,
            qos=qos or spec.qos,
            gpus_per_node=gpus_per_node or spec.gpus_per_node,
            time_limit=time_limit or spec.time_limit,
            options=tuple(options) if options else spec.options,
        )
        job_id = allocation.grow(int(more), spec, _tell)
    say(f"{name}: submitted job {job_id} with {counted(int(more), 'further node')}; `loom status` shows its hosts")


def _mesh(text: str) -> tuple[str, MeshSpec]:
    from loom.slurm.spec import MeshSpec

    name, _, facts = text.partition(":")
    given = dict(fact.partition("=")[::2] for fact in facts.split(",") if fact)
    return name, MeshSpec.of(name, {key.replace("-", "_"): value for key, value in given.items()})


def _words(name: str, via: str | None) -> str:
    return name if via is None else f"{name} --via {via}"


@contextlib.contextmanager
def _slurm(via: str | None) -> Iterator[Slurm]:
    from loom.slurm.queue import Slurm
    from loom.slurm.ssh import login_of

    login = login_of(via)
    try:
        yield Slurm(login)
    finally:
        login.close()


def _found(slurm: Slurm, name: str) -> Allocation:
    from loom.slurm.allocation import Allocation

    return Allocation.find(slurm.login, name)


def _tell(text: str) -> None:
    say(text, err=True)


def _sentence(job_id: int, job: QueuedJob | None) -> str:
    from loom.slurm.queue import explain

    if job is None:
        return f"job {job_id}, which Slurm does not know any more"
    text = f"job {job.id} {job.state.value}"
    if job.state.waits:
        reason = explain(job.reason or "None")
        text += f": {reason.sentence} ({job.reason or 'None'})"
        text += f"; expected start {when(job.start)}" if job.start else ""
    elif not job.state.is_over:
        text += f" on {job.nodes}, until {when(job.end) or 'it is ended'}"
    return text


def _described_job(job: QueuedJob) -> dict[str, object]:
    return {
        "id": job.id,
        "state": job.state.value,
        "reason": job.reason,
        "partition": job.partition,
        "nodes": job.nodes,
        "start": job.start,
        "end": job.end,
    }


def _described(one: ListedAllocation) -> dict[str, object]:
    return {
        "name": one.name,
        "jobs": list(one.job_ids),
        "grown": list(one.grown_ids),
        "job": None if one.job is None else _described_job(one.job),
    }


def _row(one: ListedAllocation) -> tuple[object, ...]:
    job = one.job
    if job is None:
        return one.name, one.job_ids[-1], "forgotten", None, None, None, None
    reason = job.reason if job.state.waits else None
    return one.name, job.id, job.state.value, job.nodes or job.node_count, reason, when(job.start), when(job.end)
