"""``loom run``: starts a command here so that every process in it which trains takes part by itself.

The command takes this process's place, so that its input, output, signals and exit code are its own. This module is
imported without the other commands, because they take longer than what it does.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated

import typer

from loom.cli.output import say
from loom.control.address import ADDRESS_VARIABLE, parse_weaver_address
from loom.errors import Conflict, LoomError, WrongArguments
from loom.instrument.training import NAME_VARIABLE

SITE = Path(__file__).parents[1] / "instrument" / "site"
"""The folder with the `sitecustomize` that Python runs at its start."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit codes of a shell for a command that it cannot start."""

MAX_NAME = 200

ANSWER_WITHIN = 5.0
"""Seconds that a gateway or a weaver has to answer before the command starts without it."""

RANK_VARIABLES = ("RANK", "GROUP_RANK", "NODE_RANK", "PET_NODE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
"""Variables by which launchers number the processes, or the nodes, of one job."""

_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments, after --.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run. Default: that of the script.")
    ] = None,
) -> None:
    """Run a command here, such as python or torchrun: each process of it that trains can be watched and changed.

    Its processes that train are the replicas NAME_0, NAME_1, … of the group NAME. They report to LOOM_WEAVER, or to
    the weaver of the gateway that LOOM_URL, the current context or a running `loom up` names; without one the
    command runs all the same. Input, output, signals and the exit code are the command's.
    """
    group = _checked(default_name(command) if name is None else name)
    if (weaver := find_weaver()) is not None:
        if _is_first(command):
            check_free(weaver, group)
        os.environ.update(environment(os.environ, weaver, group))
    become(command)


def find_weaver() -> str | None:
    """Return the address of the weaver to report to; None if there is none, which is said on standard error."""
    if text := os.environ.get(ADDRESS_VARIABLE):
        parse_weaver_address(text)
        return text
    from loom_proxy.contexts.file import find_gateway

    if (to := find_gateway()) is None:
        _say("nothing to report to: no LOOM_WEAVER, no LOOM_URL, no current context and no running `loom up`")
        return None
    try:
        return to.weaver_address(ANSWER_WITHIN)
    except LoomError as error:
        _say(f"it cannot report to {to}: {error}")
        return None


def check_free(weaver: str, group: str) -> None:
    """Check that no replica of a group lives, as far as the weaver answers.

    Raises:
        Conflict: replicas of the group live.
    """
    from loom.control.frame import MAX_FRAME, pack, unpack
    from loom.control.introduction import Refusal, group_question
    from loom.wire.framing import FrameSplitter

    address = parse_weaver_address(weaver)
    with contextlib.suppress(OSError):  # the weaver is away: the ranks report when it is back
        with socket.create_connection((address.host, address.port), ANSWER_WITHIN) as sock:
            sock.sendall(pack(group_question(address.key, group).to_body()))
            splitter, frames = FrameSplitter(MAX_FRAME), list[bytes]()
            while not frames and (data := sock.recv(1 << 16)):
                frames += splitter.feed(data)
            answer = unpack(frames[0]) if frames else []
        if answer and answer[0] == Refusal.KIND and (refusal := Refusal.from_body(answer)).code == "replica_taken":
            raise Conflict(f"{refusal.text}: choose another name with --name, or stop it", code="replica_taken")


def environment(given: Mapping[str, str], weaver: str, group: str) -> dict[str, str]:
    """Return the variables that a command needs so that its processes take part."""
    before = [path for path in given.get("PYTHONPATH", "").split(os.pathsep) if path != str(SITE)]
    path = os.pathsep.join([str(SITE), *before]) if any(before) else str(SITE)
    return {ADDRESS_VARIABLE: weaver, NAME_VARIABLE: group, "PYTHONPATH": path}


def become(command: Sequence[str]) -> None:
    """Let a command take this process's place. Exit as a shell does if it cannot be started."""
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and the command would inherit that
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        _say(f"cannot run {command[0]}: {error.strerror}")
        raise typer.Exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE) from None


def default_name(command: Sequence[str]) -> str:
    """Return the stem of the command's script, of its module, or of its program."""
    for before, argument in zip(["", *command], command, strict=False):
        if before in ("-m", "--module") and argument not in _LAUNCHERS:
            parts = argument.removesuffix(".__main__").split(".")
            return _as_name(parts[-1])
        if argument.endswith((".py", ".sh")):
            return _as_name(PurePath(argument).stem)
    return _as_name(PurePath(command[0]).stem)


def _as_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)[:MAX_NAME] or "train"


def _checked(name: str) -> str:
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or re.search(r"[\s*?\[\]/]", name):
        raise WrongArguments(
            f"--name: {name!r:.80} is no name: give 1 to {MAX_NAME} characters without blanks and any of * ? [ ] /"
        )
    return name


def _is_first(command: Sequence[str]) -> bool:
    """Return whether no other process of the same job may have been started before this one."""
    ranks = [os.environ.get(variable, "0") for variable in RANK_VARIABLES]
    for before, argument in zip(["", *command], command, strict=False):
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") in ("--node-rank", "--machine-rank") and equals:
            ranks.append(value)
        elif before.replace("_", "-") in ("--node-rank", "--machine-rank"):
            ranks.append(argument)
    return all(rank in ("", "0") for rank in ranks)


def _say(text: str) -> None:
    say(f"loom run: {text}", err=True)


OPTIONS = {"allow_interspersed_args": False}
"""Settings of the command's parser: what follows the first word of the command is the command's."""

app = typer.Typer(name="loom", add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings=OPTIONS)(run)
app.callback()(lambda: None)  # so that `run` is the name of a command
