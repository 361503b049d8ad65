"""``loom run``: starts a command so that every process in it which trains takes part by itself.

It takes this process's place, so that its input, output, signals and exit code are its own. With ``--on`` it runs
on a cluster, see `loom.cli.run_on`. This module is imported without the other commands, because they take longer
than what it does.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePath
from time import monotonic
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from loom.cli.output import say
from loom.control.address import ADDRESS_VARIABLE, parse_weaver_address
from loom.control.run_start import (
    COMMAND_VARIABLE,
    LAUNCHER_VARIABLE,
    MAX_COMMAND,
    START_VARIABLE,
    read_start,
    start_of_slurm,
)
from loom.errors import Conflict, Unavailable, WrongArguments
from loom.instrument.training import (
    AUTO_VARIABLE,
    FOUND_VARIABLE,
    MAX_RUN_NAME,
    NAME_VARIABLE,
    NOWHERE,
    as_run_name,
)

if TYPE_CHECKING:
    from loom_proxy.contexts import GatewayChoice

SITE = Path(__file__).parents[1] / "instrument" / "site"
"""The folder with the `sitecustomize` that Python runs at its start."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit codes of a shell for a command that it cannot start."""

STARTS_WITHIN = 5.0
"""Seconds after which the command starts, whatever name server, keyring, gateway or weaver has not answered."""

T = TypeVar("T")

RANK_VARIABLES = ("RANK", "GROUP_RANK", "NODE_RANK", "PET_NODE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Variables by which launchers number the processes, or the nodes, of one job."""

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run. Default: that of the script.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(metavar="URL|CONTEXT", help="Run it on this cluster, with this folder and its packages."),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, help="With --on: on this many hosts.")] = 1,
    per_host: Annotated[
        str | None,
        typer.Option(
            metavar="gpus=N|procs=N", help="With --on: this many ranks on each host, with torchrun's variables."
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|none",
            help="With --on: the uv.lock or requirements.txt to bring; none for the cluster's packages.",
        ),
    ] = None,
    container: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Refused: images are the workers'.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="With --on: do not follow it.")] = False,
    token: Annotated[
        str | None, typer.Option(help="With --on: the token. Default: LOOM_TOKEN, else that of the context.")
    ] = None,
    ca: Annotated[
        str | None, typer.Option("--ca", envvar="LOOM_CA", metavar="FILE", help="With --on: your own authority.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="LOOM_INSECURE", help="With --on: go without TLS.")
    ] = False,
) -> None:
    """Run a command such as python or torchrun: each process of it that trains can be watched and changed.

    Its processes that train are the replicas NAME_0, NAME_1, … of the group NAME. They report to LOOM_WEAVER, or to
    the weaver of the gateway that LOOM_URL, the current context or a running `loom up` names, or of the only one in
    Slurm; without one the command runs all the same. Input, output, signals and the exit code are the command's.

    With --on it runs on a cluster. This folder is synced, and the packages of its uv.lock or requirements.txt are
    installed there. Its output and its exit code are shown here; Ctrl-C leaves it running.
    """
    group = _checked(default_name(command) if name is None else name)
    if container is not None:
        raise WrongArguments(
            f"--container {container}: Loom starts no containers. Start the workers in the image (their pods, or "
            f"`docker run {container} loom serve worker`), and run there with --on"
        )
    if on is not None:
        from loom.cli.run_on import OnCluster, run_on

        to = OnCluster(on, hosts, per_host, env, detach, token, ca, insecure)
        raise typer.Exit(run_on(to, command, group, read_start(os.environ.get(START_VARIABLE, "")) or new_start()))
    for option, value in (("--hosts", hosts > 1), ("--per-host", per_host), ("--env", env), ("--detach", detach)):
        if value:
            raise WrongArguments(f"{option} needs --on URL or --on CONTEXT: without it, the command runs here")
    until = monotonic() + STARTS_WITHIN
    given = bool(os.environ.get(ADDRESS_VARIABLE))
    if (weaver := find_weaver(until)) is not None:
        if weaver and _is_first(command):
            check_free(weaver, group, until)
        os.environ.update(environment(os.environ, weaver, group))
        os.environ.update(start(os.environ, command))
        os.environ[LAUNCHER_VARIABLE] = f"{os.getpid()} {os.getcwd()}"
        if weaver and not given:
            os.environ[FOUND_VARIABLE] = "1"
    become(command)


def find_weaver(until: float) -> str | None:
    """Return the address of the weaver to report to; None if there is none, "" if it is not known yet.

    Both are said on standard error.

    Args:
        until: when nothing is waited for any more, on the monotonic clock.

    Raises:
        InvalidAddress: ``LOOM_WEAVER`` is no address.
    """
    if text := os.environ.get(ADDRESS_VARIABLE):
        parse_weaver_address(text)
        return text
    from loom_proxy.contexts import find_gateway

    to = None
    try:
        to = _by(until, find_gateway)
        if to is None and "SLURM_JOB_ID" in os.environ:
            to = _by(until, _find_in_slurm)
        if to is not None:
            return _by(until, partial(to.weaver_address, STARTS_WITHIN))
        _say(NOWHERE)
    except Exception as error:  # noqa: BLE001 - wherever it would report to, the command runs
        _say(f"it cannot report{f' to {to}' if to else ''}: {error}")
        if isinstance(error, Unavailable | TimeoutError):
            return ""
    return None


def _find_in_slurm() -> GatewayChoice | None:
    """Return the gateway of the user's only allocation of Slurm, which ``LOOM_URL`` names from now on.

    Raises:
        WrongArguments: there are several.
    """
    from loom.slurm.allocation import gateways_here
    from loom_proxy.contexts import find_gateway

    addresses = [f"slurm://{name}" for name in gateways_here()]
    if len(addresses) > 1:
        raise WrongArguments(
            f"you have {len(addresses)} gateways in Slurm, {' and '.join(addresses)}: name one, such as by "
            f"`export LOOM_URL={addresses[0]}` in the batch script"
        )
    for address in addresses:
        os.environ["LOOM_URL"] = address
    return find_gateway()


def _by(until: float, work: Callable[[], T]) -> T:
    from loom.process.threads import within

    if (left := until - monotonic()) <= 0:
        raise TimeoutError(f"no answer within {STARTS_WITHIN:g} s")
    return within(left, work)


def check_free(weaver: str, group: str, until: float) -> None:
    """Check that no replica of a group lives, as far as the weaver answers.

    Raises:
        Conflict: replicas of the group live.
    """
    try:
        refusal = _by(until, lambda: _ask_for(weaver, group))
    except Exception:  # noqa: BLE001 - the weaver is away, or none: the ranks report when it is back
        return
    if refusal is not None:
        raise Conflict(f"{refusal}: choose another name with --name, or stop it", code="replica_taken")


def _ask_for(weaver: str, group: str) -> str | None:
    """Return the weaver's words on the replicas of a group that live; None if none does."""
    from loom.control.frame import MAX_FRAME, pack, unpack
    from loom.control.handshake import Refusal, group_question
    from loom.wire.length_prefix import FrameSplitter

    address = parse_weaver_address(weaver)
    with socket.create_connection((address.host, address.port), STARTS_WITHIN) as sock:
        sock.sendall(pack(group_question(address.key, group).to_body()))
        splitter, frames = FrameSplitter(MAX_FRAME), list[bytes]()
        while not frames and (data := sock.recv(1 << 16)):
            frames += splitter.feed(data)
    answer = unpack(frames[0]) if frames else []
    refused = bool(answer) and answer[0] == Refusal.KIND
    return refusal.text if refused and (refusal := Refusal.from_body(answer)).code == "replica_taken" else None


def environment(given: Mapping[str, str], weaver: str, group: str) -> dict[str, str]:
    """Return the variables that a command needs so that its processes take part."""
    before = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path != str(SITE)]
    path = os.pathsep.join([str(SITE), *before]) if any(before) else str(SITE)
    reports = {ADDRESS_VARIABLE: weaver} if weaver else {AUTO_VARIABLE: "1"}  # in which case they ask by themselves
    return {**reports, NAME_VARIABLE: group, "PYTHONPATH": path}


def start(given: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """Return the variables that tell the processes of a command to which start they belong.

    A step of Slurm names its start by itself, alike on all nodes.
    """
    told = json.dumps(list(command))
    named = START_VARIABLE in given or start_of_slurm(given) is not None
    ids = {} if named else {START_VARIABLE: new_start()}
    return {**ids, COMMAND_VARIABLE: told} if len(told) <= MAX_COMMAND else ids


def new_start() -> str:
    """Return an id for a start."""
    return uuid.uuid4().hex[:12]


def become(command: Sequence[str]) -> None:
    """Let a command take this process's place. Exit as a shell does if it cannot be started."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and the command would inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # which a program has that was started with the stream closed
            stream.flush()
    try:
        os.execvp(command[0], list(command))
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENOEXEC:  # a script without `#!`, which shells run by themselves
            os.execv("/bin/sh", ["sh", shutil.which(command[0]) or command[0], *command[1:]])
        _say(f"cannot run {command[0]}: {getattr(error, 'strerror', error)}")
        missing = isinstance(error, FileNotFoundError | ValueError)
        raise typer.Exit(NOT_FOUND if missing else NOT_EXECUTABLE) from None


def default_name(command: Sequence[str]) -> str:
    """Return the stem of the command's script, of its module, or of its program."""
    for before, argument in zip(["", *command], command, strict=False):
        if before in ("-m", "--module") and argument not in _LAUNCHERS:
            parts = argument.removesuffix(".__main__").split(".")
            return as_run_name(parts[-1])
        if argument.endswith((".py", ".sh")):
            return as_run_name(PurePath(argument).stem)
    return as_run_name(PurePath(command[0]).stem)


def _checked(name: str) -> str:
    if not 0 < len(name) <= MAX_RUN_NAME or not name.isprintable() or re.search(r"[\s*?\[\]/]", name):
        raise WrongArguments(
            f"--name: {name!r:.80} is no name: give 1 to {MAX_RUN_NAME} characters without blanks and any of "
            "* ? [ ] /"
        )
    return name


def _is_first(command: Sequence[str]) -> bool:
    """Return whether no other process of the same job may have been started before this one."""
    given = {name: value for name in RANK_VARIABLES if (value := os.environ.get(name))}
    nodes, met = os.environ.get("PET_NNODES", "1"), os.environ.get("PET_RDZV_ENDPOINT")
    for before, argument in zip(["", *command], command, strict=False):
        option, equals, value = argument.partition("=")
        if not equals:
            option, value = before, argument
        match option.replace("_", "-"):
            case "--node-rank" | "--machine-rank":
                given[option] = value
            case "--nnodes":
                nodes = value
            case "--rdzv-endpoint":
                met = value
    if met and not given and nodes not in ("1", "1:1"):
        return False  # the nodes of a rendezvous have no numbers, and may come again while others train
    return all(rank == "0" for rank in given.values())


def _say(text: str) -> None:
    say(f"loom run: {text}", err=True)


OPTIONS = {"allow_interspersed_args": False}
"""Settings of the command's parser: what follows the first word of the command is the command's."""

app = typer.Typer(name="loom", add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings=OPTIONS)(run)
app.callback()(lambda: None)  # so that `run` is the name of a command
