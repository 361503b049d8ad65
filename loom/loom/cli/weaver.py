"""The commands for replicas and devices: watching them, and commanding them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from loom.cli.options import (
    Json,
    Since,
    Timeout,
    Until,
    UserAccess,
    acknowledgements,
    asking,
    read_assignments,
    read_moment,
    weaver_clock,
)
from loom.cli.output import counted, print_json, print_table, say, say_lines, show
from loom.control.arguments import MOST_EVENTS
from loom.errors import WrongArguments
from loom.process.error_exit import FAILURE

if TYPE_CHECKING:
    from loom.control.commands import Acknowledgement
    from loom_proxy.weaver.command import CommandProxy


FIRST_WAIT = 1.0
"""Seconds that the request which gives a command waits for acknowledgements; most come in that time."""

config_app = typer.Typer(help="The configuration that training processes run with.", no_args_is_help=True)

Replicas = Annotated[
    str, typer.Option("--replica", metavar="NAME", help="A replica, a group, or a glob over both; * for all.")
]
Replica = Annotated[str, typer.Argument(help="Id of the replica.")]


@asking
def watch(
    access: UserAccess,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each change.")] = False,
) -> None:
    """Show every replica and device as they change, until Ctrl-C."""
    from loom.cli.weaver_display import json_line, live

    proxy = access.weaver()
    with suppress(KeyboardInterrupt):
        if as_json:
            for update in proxy.watch():
                say(json_line(update))
        else:
            live(proxy.watch(), lambda: (proxy.replicas(), proxy.devices()), str(access.chosen))


@config_app.command("set")
@asking
def config_set(
    access: UserAccess,
    values: Annotated[list[str], typer.Argument(metavar="KEY=VALUE", help="Values are JSON, or else text.")],
    replica: Replicas = "*",
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Change the configuration of replicas while they train, and show at which step each took it.

    Exits with 1 unless every replica did.
    """
    config = read_assignments(values, "KEY=VALUE, such as learning_rate=0.002")
    command = access.weaver().command("update_config", config, replica, wait=min(timeout, FIRST_WAIT))
    _report(command, replica, timeout, as_json)


@config_app.command("back")
@asking
def config_back(
    access: UserAccess,
    command: Annotated[
        str | None,
        typer.Argument(metavar="[COMMAND]", help="Id of the change. Default: the last one of the replicas."),
    ] = None,
    replica: Replicas = "*",
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Take a change back: replicas get the values that they had before it, or the schedule that set them.

    Exits with 1 unless every replica did.
    """
    for given in access.weaver().take_back(replica, command):
        _report(given, replica, timeout, as_json)


def _command(kind: str, text: str) -> Callable[..., None]:
    """Return a command of the command line for a command to replicas without parameters."""

    def give(access: UserAccess, replica: Replicas = "*", timeout: Timeout = 30.0, as_json: Json = False) -> None:
        command = access.weaver().command(kind, target=replica, wait=min(timeout, FIRST_WAIT))
        _report(command, replica, timeout, as_json)

    give.__name__, give.__doc__ = kind, text
    return asking(give)


COMMANDS = (
    _command("pause", "Pause replicas at their next step boundary."),
    _command("resume", "Resume paused replicas."),
    _command("stop", "Stop the training of replicas at their next step boundary."),
    _command("drain", "Let replicas make one more step, and leave."),
    _command("save", "Let replicas save a checkpoint now, and wait until it is saved."),
    _command("evaluate", "Let replicas evaluate their model now, and wait until they have."),
)
"""``loom pause``, ``resume``, ``stop``, ``drain``, ``save`` and ``evaluate``."""


@asking
def weaver(access: UserAccess) -> None:
    """Print LOOM_WEAVER=…, with which a training script that Loom does not spawn finds the weaver.

    The address contains the key of the weaver: keep it secret, as you keep a token.
    """
    say(f"LOOM_WEAVER={access.weaver().address()}")


@asking
def devices(access: UserAccess, as_json: Json = False) -> None:
    """List the devices, and the replicas on them."""
    found = access.weaver().devices()
    from loom.cli.weaver_display import DEVICE_COLUMNS, device_row

    answer = {"devices": [asdict(device) for device in found.values()]}
    show(as_json, answer, counted(len(found), "device"), DEVICE_COLUMNS, map(device_row, found.values()))


@asking
def fail_device(
    access: UserAccess,
    device: Annotated[str, typer.Argument(metavar="UUID", help="The device, as `loom devices` names it.")],
    reason: Annotated[str, typer.Option(help="Why it has failed.")] = "",
    as_json: Json = False,
) -> None:
    """Report that a device has failed: its replicas are notified, and their groups' policies are carried out."""
    event = access.weaver().report_device_failure(device, reason)
    chain = event.data.get("replicas") or []
    show(
        as_json,
        event.to_body(),
        f"device {device} has failed (event {event.id}); {counted(len(chain), 'replica')} on it",
        ["replica", "group", "state", "done"],
        [[one["replica"], one["group"], one["state"], one["action"] or "nothing: it has ended"] for one in chain],
    )


Device = Annotated[
    str | None, typer.Option("--device", metavar="UUID", help="The device, as `loom devices` names it.")
]
Group = Annotated[
    str | None, typer.Option("--group", metavar="NAME", help="A group or a replica: all devices that it uses.")
]


@asking
def deactivate(
    access: UserAccess,
    device: Device = None,
    group: Group = None,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Take a device, or all devices of a group, out of use: `loom.train` moves its groups off, others are told."""
    command = access.weaver().deactivate(device, group)
    _report_use(command, f"{device or f'the devices of {group}'} deactivated", timeout, as_json)


@asking
def reactivate(
    access: UserAccess,
    device: Device = None,
    group: Group = None,
    timeout: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Put a device into use again, or all that a group was on when they failed or were deactivated."""
    command = access.weaver().reactivate(device, group)
    _report_use(command, f"{device or f'the devices of {group}'} reactivated", timeout, as_json)


@asking
def policy(
    access: UserAccess,
    group: Annotated[str | None, typer.Argument(help="A group, or a glob; * for all.")] = None,
    action: Annotated[str | None, typer.Argument(help="notify, pause, stop or respawn.")] = None,
    as_json: Json = False,
) -> None:
    """Choose the action for a group's replicas when a device of theirs fails; without arguments, show them."""
    proxy = access.weaver()
    if (group is None) != (action is None):
        raise WrongArguments("give a group and an action, or neither")
    found = proxy.policies() if group is None or action is None else proxy.set_policy(group, action)
    title = "when a device fails; others are notified"
    show(as_json, {"policies": found}, title, ["group", "action"], found.items())


@asking
def events(
    access: UserAccess,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    after: Annotated[int | None, typer.Option(min=0, help="Begin after the event with this id.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_EVENTS, help="How many of the newest, without --after. [default: 100, all with --since]"
        ),
    ] = None,
    since: Since = None,
    until: Until = None,
    kind: Annotated[str | None, typer.Option(help="Only those of this kind.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only those about this replica.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each event.")] = False,
) -> None:
    """Show the events of your replicas and devices, the oldest first.

    `loom inject from-events` makes a plan of faults from what `--json` prints.
    """
    from loom.cli.weaver_display import event_line

    if follow and until is not None:
        raise WrongArguments("--follow goes on for ever: leave --until out")
    limit = limit or (100 if since is None else MOST_EVENTS)
    weaver = access.weaver()
    begin, end = (
        None if moment is None else read_moment(moment, weaver_clock(weaver)) for moment in (since, until)
    )
    found = weaver.events(after, follow, limit=limit, kind=kind, replica=replica, since=begin, until=end)
    shown = 0
    with suppress(KeyboardInterrupt):
        for event in found:
            shown += 1
            say(json.dumps(event.to_body()) if as_json else event_line(event))
    if since is not None and after is None and not follow and shown == limit:
        say(f"these are the newest {limit}; earlier ones may be missing", err=True)


@asking
def stacks(access: UserAccess, replica: Replica) -> None:
    """Show the stacks of a replica's threads."""
    say_lines(access.weaver().stacks(replica))


@asking
def profile(
    access: UserAccess,
    replica: Replica,
    seconds: Annotated[float, typer.Option(min=1, max=30, help="How long to look at it.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Show where a replica's time goes: the stacks of its busy threads, with how often each was seen.

    Programs that draw flame graphs read what it prints.
    """
    found = access.weaver().profile(replica, seconds)
    if as_json:
        say_lines(json.dumps(asdict(found)))
    elif found.folded:
        say_lines(found.folded.rstrip("\n"))
    else:
        say(f"no thread of {replica} was busy: `loom stacks {replica}` shows what each waits for", err=True)
    say(f"{found.samples} samples by {found.sampler}, {found.left_out} left out", err=True)


@asking
def metrics(
    access: UserAccess,
    replica: Replica,
    metric: Annotated[str | None, typer.Argument(help="Its name; without one, all names are listed.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw it.")] = False,
    last: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Only the points since then.")
    ] = None,
    points: Annotated[int, typer.Option(min=1, max=20_000, help="The most to show; more are averaged.")] = 500,
    as_json: Json = False,
) -> None:
    """Show the history of a metric of a replica, or the names of its metrics."""
    proxy = access.weaver()
    if metric is None:
        newest = proxy.replica(replica).metrics
        known = {name: newest.get(name) for name in proxy.metrics(replica)}
        rows = [[name, "" if value is None else f"{value:.6g}"] for name, value in known.items()]
        show(as_json, {"metrics": known}, f"metrics of {replica}", ["name", "newest"], rows)
        return
    since = None if last is None else weaver_clock(proxy)() - last
    history = proxy.history(replica, metric, since=since, points=points)
    if as_json:
        print_json({"replica": replica, "metric": metric, "points": history})
    elif plot:
        from loom.cli.weaver_display import plot_lines

        for line in plot_lines(f"{metric} of {replica}", [(one.step, one.time, one.value) for one in history]):
            say(line)
    else:
        columns = ["time", "step", "value"]
        print_table(
            f"{metric} of {replica}", columns, ([_clock(one.time), one.step, f"{one.value:.6g}"] for one in history)
        )


def _report(command: CommandProxy, target: str, timeout: float, as_json: bool) -> None:
    """Wait for the acknowledgements and show them; exit with 1 unless every replica has applied the command."""
    outcomes = acknowledgements(command, timeout)
    well = bool(outcomes) and all(one.ok for one in outcomes.values())
    if as_json:
        print_json({"id": command.id, "outcomes": {id: _told(one) for id, one in outcomes.items()}})
    elif not outcomes:
        say(f"error: no replica that lives is named by {target!r}; `loom status` lists them", err=True)
    else:
        rows = [_row(id, outcomes[id]) for id in sorted(outcomes)]
        print_table(f"command {command.id}", ["replica", "outcome", "step", "changes"], rows)
    if not well:
        raise typer.Exit(FAILURE)


def _told(one: Acknowledgement) -> dict[str, object]:
    return {**asdict(one), "changes": {key: [change.old, change.new] for key, change in one.changes.items()}}


def _report_use(command: CommandProxy, done: str, timeout: float, as_json: bool) -> None:
    """Show who was told of a device's change. It holds in any case: a replica that refuses goes on as it likes."""
    outcomes = acknowledgements(command, timeout)
    answer = {"id": command.id, "outcomes": {id: _told(one) for id, one in outcomes.items()}}
    rows = [_row(id, outcomes[id])[:3] for id in sorted(outcomes)]
    show(as_json, answer, f"{done}; {counted(len(rows), 'replica')} told", ["replica", "outcome", "step"], rows)


def _row(id: str, one: Acknowledgement) -> list[object]:
    changes = ", ".join(f"{key}: {change.old} → {change.new}" for key, change in one.changes.items())
    if one.ok:
        outcome = "applied" if len(one.taken) < max(1, len(one.changes)) else "taken by the program"
        if one.taken and outcome == "applied":
            outcome += f"; taken by the program: {', '.join(one.taken)}"
    else:
        outcome = ("waiting: " if one.waiting else "refused: ") + (one.reason or "")
    return [id, outcome, one.step, changes]


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
