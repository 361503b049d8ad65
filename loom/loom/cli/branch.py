"""``loom branch``: starts a run's command again from one of its checkpoints, with other values."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.branches.branch import Branch
from loom.branches.command import BranchStart, branch_start, checkpoint_folders, completed
from loom.branches.launch import branch_name, start_detached, why_ended
from loom.branches.values import check_changes, kept_at, times
from loom.cli.options import Access, Json, acknowledgements, asking, read_assignments
from loom.cli.output import print_json, say
from loom.cli.run import become, environment
from loom.cli.runs import RunName
from loom.control.address import ADDRESS_VARIABLE
from loom.control.run_start import LAUNCHER_VARIABLE, START_VARIABLE
from loom.errors import BranchRefused, NotFound, WrongArguments
from loom.instrument.training import FOUND_VARIABLE
from loom.threadlet.start_facts import code_of, without_secrets

if TYPE_CHECKING:
    from loom.weaver.run_views import RunDetails
    from loom.weaver.views import WeaverEvent
    from loom_proxy.weaver.client import WeaverProxy

STARTS_WITHIN = 300.0
"""Seconds that a branch in the background has to register."""

_ENDED = ("failed", "finished")


@asking
def branch(
    access: Access,
    run: RunName,
    step: Annotated[
        int | None, typer.Option(min=0, help="Begin with the last checkpoint at or before it. Default: the last.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value to change; 0.5x is half of what it was there."),
    ] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARGUMENT",
            help="An argument to change or add, as '--lr=0.1'; {checkpoint}, {step} and {folder} are filled in.",
        ),
    ] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="A command in place of the run's.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the branch. Default: NAME-at-STEP.")
    ] = None,
    checkpoints: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="The folder of the run's checkpoints.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="In the run's place: it saves, and is stopped first.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse if the code is not that with which the run began.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="In the background, until it has registered.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="With --replace: how long the run may take to end.")
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """Start a run's command again from one of its checkpoints, beside it or in its place, with other values.

    It starts here, in the run's folder and with this shell's environment, as `loom run` starts a command. It loads
    the checkpoint and writes into a folder of its own, though the script says neither.
    """
    weaver = access.weaver()
    parent = weaver.run(run).details()
    changes = read_assignments(values or (), "KEY=VALUE, such as learning_rate=0.5x")
    _check_keys(weaver, parent, changes)
    if parent.session is not None and not command:
        if argument or name or checkpoints or strict or detach or dry_run:
            raise WrongArguments(
                f"run {parent.id!r} is of the session {parent.session!r}, which starts the branch itself: give "
                "--step and --set only; or its program again, after --"
            )
        return _begin_in_session(weaver, parent, step, changes, replace, as_json)
    start = _plan(parent, step, changes, list(argument or ()), list(command or ()), checkpoints)
    start = _named(weaver, parent, start, name, replace)
    differences = _code_differences(parent, start)
    if parent.max_step is not None and start.branch.step >= parent.max_step:
        _say(f"step {start.branch.step:,} is the run's last one: without more steps nothing is left to train")
    if strict and differences:
        raise BranchRefused("; ".join(differences))
    for one in differences:
        _say(f"{one}; it begins all the same (--strict refuses)")
    if dry_run:
        return _show(parent, start, changes, replace, as_json)
    start = start.prepare()
    if replace:
        _end(weaver, parent, timeout)
    variables = _variables(access, start)
    if not detach:
        os.chdir(start.folder)
        os.environ.update(variables)
        return become(start.command)
    _begin(weaver, start, variables, as_json)


def _plan(
    parent: RunDetails,
    step: int | None,
    changes: Mapping[str, Any],
    arguments: list[str],
    command: list[str],
    checkpoints: str | None,
) -> BranchStart:
    """Return what starts the run's command again, without its name."""
    facts = parent.start
    folder = facts.get("folder")
    told = [str(one) for one in facts.get("command", ())]
    if parent.session is not None:
        folder = os.getcwd()  # its processes do not know where the program was started
    if not command and (not told or "--multiprocessing-fork" in told):
        raise BranchRefused(f"run {parent.id!r} has told no command to start again: give it after --")
    if folder is None or not os.path.isdir(folder):
        raise BranchRefused(
            f"run {parent.id!r} was started on {facts.get('host')!r} in {folder!r}, which is not here "
            f"({socket.gethostname()!r}): call `loom branch {parent.id}` there"
        )
    whole = completed(command or told, arguments, os.environ)
    folders = [os.path.abspath(checkpoints)] if checkpoints else checkpoint_folders(parent.config, whole, folder)
    given = os.environ.get(START_VARIABLE)
    id = given if given and given != parent.id else uuid.uuid4().hex[:12]
    unplaced = Branch(parent.id, 0, "", "", "", changes=changes)
    start = branch_start(unplaced, whole, folder, "", id, step, folders)
    kept = kept_at(parent.timeline, start.branch.step)
    return start.with_values(kept, {**parent.config, **kept})


def _named(
    weaver: WeaverProxy, parent: RunDetails, start: BranchStart, name: str | None, replaces: bool
) -> BranchStart:
    """Return a start with the name of the branch, which no run has that is not replaced."""
    if replaces and name is None:
        return start.with_name(parent.name)
    if name is None and os.environ.get(START_VARIABLE) == start.id:
        with contextlib.suppress(NotFound):  # another host has begun it
            return start.with_name(weaver.run(start.id).info.name)
    if name is None:
        taken = {one.info.name for one in weaver.runs(f"{parent.name}-at-*", limit=1000)}
        return start.with_name(branch_name(parent.name, start.branch.step, taken))
    living = {one.info.name for one in weaver.runs(state="running", limit=1000)}
    if name in living and not (replaces and name == parent.name):
        raise BranchRefused(f"a run named {name!r:.80} lives: choose another name with --name, or stop it")
    return start.with_name(name)


def _check_keys(weaver: WeaverProxy, parent: RunDetails, changes: Mapping[str, Any]) -> None:
    """Raise `WrongArguments` for a key that nothing in the run has had, such as a misspelt one, or its value."""
    known: dict[str, Any] = {}
    replicas = weaver.replicas()
    for member in parent.members:
        known |= getattr(replicas.get(member["replica"]), "handlers", {})
    for mark in parent.timeline:
        known |= {key: change.get("new") for key, change in mark.get("changes", {}).items()}
    check_changes(changes, parent.id, {**known, **parent.config})


def _code_differences(parent: RunDetails, start: BranchStart) -> list[str]:
    """Return how the code differs from that with which the run began, as far as git tells."""
    before = parent.start.get("commit")
    if before is None or parent.session is not None:  # whose driver was elsewhere than its program
        return []
    script = next((one for one in start.command if one.endswith(".py")), "")
    now = code_of(str(Path(start.folder, script).resolve().parent if script else start.folder))
    found = []
    if now.get("commit") != before:
        found.append(f"the code is at commit {str(now.get('commit'))[:12]}, and was at {before[:12]}")
    if parent.start.get("clean") is False:
        found.append("the run began with changes that no commit has")
    if now.get("clean") is False:
        found.append("files differ from the commit now")
    return found


def _end(weaver: WeaverProxy, parent: RunDetails, timeout: float) -> None:
    """Let a run save a checkpoint, stop it, and wait until it has ended."""
    living = [one["replica"] for one in parent.members if one["state"] not in _ENDED]
    if not living:
        return
    until = time.monotonic() + timeout
    after = int(weaver.status()["event"])
    for kind in ("save", "stop"):
        answers = acknowledgements(weaver.command(kind, target=living), max(0.0, until - time.monotonic()))
        refused = [f"{id}: {one.reason}" for id, one in answers.items() if not one.ok]
        if refused and kind == "save":
            _say(f"{parent.name} saves no checkpoint before it stops: {refused[0]}")
    if (state := weaver.run(parent.id).info.state) == "running":
        event = _event_of(weaver, "run_ended", parent.id, after, until - time.monotonic())
        if event is None:
            why = f" ({refused[0]})" if refused else ""
            raise BranchRefused(f"run {parent.id!r} has not ended in {timeout:g} s{why}: nothing was started")
        state = event.data["state"]
    _say(f"{parent.name} {parent.id} has ended: {state}")


def _event_of(
    weaver: WeaverProxy,
    kind: str,
    run: str,
    after: int,
    within: float,
    process: subprocess.Popen[bytes] | None = None,
) -> WeaverEvent | None:
    """Wait for an event about a run, for some seconds; return None if it has not come, or a process ends first.

    Args:
        after: id of an event before it.
    """
    found: queue.SimpleQueue[WeaverEvent | BaseException | None] = queue.SimpleQueue()

    def follow() -> None:
        try:
            events = weaver.events(after, follow=True, kind=kind)
            found.put(next(event for event in events if event.data.get("run") == run))
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            found.put(error)

    def attend(process: subprocess.Popen[bytes]) -> None:
        process.wait()
        found.put(None)

    threading.Thread(target=follow, daemon=True).start()
    if process is not None:
        threading.Thread(target=attend, args=(process,), daemon=True).start()
    try:
        came = found.get(timeout=max(0.0, within))
    except queue.Empty:
        return None
    if isinstance(came, BaseException):
        raise came
    return came


def _variables(access: Access, start: BranchStart) -> dict[str, str]:
    """Return the environment variables of a branch, beside those of this shell."""
    given = os.environ.get(ADDRESS_VARIABLE)
    weaver = given or access.weaver().address()
    made = {**environment(os.environ, weaver, start.name), **start.variables()}
    made[LAUNCHER_VARIABLE] = f"{os.getpid()} {start.folder}"
    return made if given or access.url else {**made, FOUND_VARIABLE: "1"}


def _begin(weaver: WeaverProxy, start: BranchStart, variables: Mapping[str, str], as_json: bool) -> None:
    """Start a branch in the background, and wait until it has registered."""
    after = int(weaver.status()["event"])
    process, path = start_detached(start, {**os.environ, **variables})
    begun = f"{start.id}*"  # it may have begun on another host
    if not weaver.runs(begun) and _event_of(weaver, "run_began", start.id, after, STARTS_WITHIN, process) is None:
        if process.poll() is None:
            raise BranchRefused(f"the branch has not registered in {STARTS_WITHIN:g} s; it goes on: {path}")
        if not weaver.runs(begun):
            raise BranchRefused(why_ended(process, path))
    found = weaver.run(start.id).info
    if as_json:
        print_json({"run": found.id, "name": found.name, "log": str(path), "pid": process.pid})
    else:
        say(f"started {found.name} {found.id}; its output is in {path}")


def _begin_in_session(
    weaver: WeaverProxy,
    parent: RunDetails,
    step: int | None,
    changes: Mapping[str, Any],
    replace: bool,
    as_json: bool,
) -> None:
    """Let the session of a run start a branch in it."""
    made = weaver.run(parent.id).branch(step, changes, replace)
    if as_json:
        print_json({"run": made.id, "name": made.name, "session": parent.session})
    else:
        say(f"started {made.name} {made.id} in the session {parent.session}")


def _show(
    parent: RunDetails, start: BranchStart, changes: Mapping[str, Any], replaces: bool, as_json: bool
) -> None:
    branch = start.branch
    found = {
        "run": parent.id,
        "name": start.name,
        "step": branch.step,
        "checkpoint": branch.checkpoint,
        "folder": branch.own,
        "command": without_secrets(start.command),
        "set": dict(changes),
        "kept": dict(branch.kept),
        "replace": replaces,
    }
    if as_json:
        return print_json(found)
    place = "in its place" if replaces else "beside it"
    say(f"would start {start.name} from step {branch.step:,} of {parent.name} {parent.id}, {place}")
    say(f"  checkpoint {branch.checkpoint}")
    say(f"  folder     {branch.own}")
    say(f"  command    {shlex.join(without_secrets(start.command))}")
    for key, value in branch.config.items():
        how = "" if key in changes else ", as it was set in the run"
        relative = "" if times(value) is None else " of its value there"
        say(f"  {key} = {json.dumps(value)}{relative}{how}")


def _say(text: str) -> None:
    say(f"loom branch: {text}", err=True)
