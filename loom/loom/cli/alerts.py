"""``loom alerts``: the rules that tell a person, a test of one, and what was sent."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from loom.cli.options import Json, UserAccess, asking
from loom.cli.output import counted, print_json, say, say_lines, show, when
from loom.errors import LoomError
from loom.weaver.alert_views import Alert, AlertKind, AlertRule, DeliveryState

app = typer.Typer(
    help="Rules that tell you of your runs, by a webhook, an e-mail and on the page.", no_args_is_help=True
)

RuleId = Annotated[str, typer.Argument(metavar="ID", help="Id of a rule, or the beginning of it.")]

_OPTIONS = ("metric", "factor", "window", "seconds", "steps", "below", "above")


@app.command("list")
@asking
def list_(access: UserAccess, as_json: Json = False) -> None:
    """List the rules."""
    found = access.weaver().alerts()
    show(
        as_json,
        {"alerts": [one.to_body() for one in found]},
        counted(len(found), "rule"),
        ["id", "rule", "about", "options", "to", "by"],
        [
            [
                f"{one.user}/{one.id}" if access.user == "*" else one.id,
                one.rule.value,
                _about(one),
                _shown_options(one),
            ]
            + [", ".join(_receivers(one)), one.by]
            for one in found
        ],
    )


@app.command()
@asking
def add(
    access: UserAccess,
    rule: Annotated[AlertKind, typer.Argument(help="The condition.")],
    run: Annotated[str | None, typer.Option(help="Id or name of runs, or a glob. Default: all runs.")] = None,
    group: Annotated[str | None, typer.Option(help="Group of runs, or a glob.")] = None,
    webhook: Annotated[
        str | None, typer.Option(metavar="URL", help="Address to post to; - reads it from standard input.")
    ] = None,
    form: Annotated[str | None, typer.Option(help="json, or slack.")] = None,
    email: Annotated[list[str] | None, typer.Option(metavar="ADDRESS", help="Once for each receiver.")] = None,
    metric: Annotated[str | None, typer.Option(help="not_a_number, diverged: the metric, or a glob.")] = None,
    factor: Annotated[float | None, typer.Option(help="diverged: times the best value. Default: 3.")] = None,
    window: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="diverged (60), goodput (600): how long it has to be so."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="no_progress: without a step. Default: 600.")] = None,
    steps: Annotated[float | None, typer.Option(help="no_progress: median step times without a step.")] = None,
    below: Annotated[float | None, typer.Option(help="goodput: its bound, from 0 to 1. Default: 0.5.")] = None,
    above: Annotated[float | None, typer.Option(help="disk: the used part, from 0 to 1. Default: 0.9.")] = None,
    rearm: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Time in order before it fires again. Default: 60.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no notice on the page.")] = False,
    id: Annotated[str | None, typer.Option(help="The rule to replace, or an id for a new one.")] = None,
    as_json: Json = False,
) -> None:
    """Add a rule, or replace one."""
    options = {"metric": metric, "factor": factor, "window": window, "seconds": seconds, "steps": steps}
    made = access.weaver().alerts().add(
        rule.value,
        run=run,
        group=group,
        webhook=sys.stdin.readline().strip() if webhook == "-" else webhook,
        form=form,
        email=email or (),
        quiet=quiet,
        id=id,
        **options,
        below=below,
        above=above,
        rearm=rearm,
    )  # fmt: skip
    if as_json:
        print_json(made.to_body())
    else:
        say(f"{made.id}: {made.rule.value} about {_about(made)}, to {', '.join(_receivers(made)) or 'nobody'}")


@app.command()
@asking
def rm(access: UserAccess, rules: Annotated[list[str], typer.Argument(metavar="ID…")]) -> None:
    """Remove rules. What of them is not delivered is given up."""
    found = access.weaver().alerts()
    for one in rules:
        found.remove(one)
        say(f"{one} is removed")


@app.command("test")
@asking
def try_(
    access: UserAccess,
    rule: RuleId,
    wait: Annotated[float, typer.Option(metavar="SECONDS", min=0, max=300)] = 15.0,
    as_json: Json = False,
) -> None:
    """Send a test alert, and say what became of it."""
    alert = access.weaver().alerts().test(rule, wait)
    if as_json:
        print_json(alert.to_body())
    else:
        outcomes = (f"{one.to}: {_outcome(alert, one.to)}" for one in alert.deliveries)
        say_lines("\n".join([f"{alert.id} on the page", *outcomes]))
    if any(one.state is not DeliveryState.SENT for one in alert.deliveries):
        raise LoomError("the test was not delivered everywhere")


@app.command()
@asking
def log(
    access: UserAccess,
    rule: Annotated[str | None, typer.Option(metavar="ID", help="Only those of this rule.")] = None,
    run: Annotated[str | None, typer.Option(help="Only those about the run with this id or name.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500)] = 100,
    as_json: Json = False,
) -> None:
    """List the last alerts, the latest first, with what became of them."""
    found = access.weaver().alerts().log(rule, run, limit)
    show(
        as_json,
        {"alerts": [one.to_body() for one in found]},
        counted(len(found), "alert"),
        ["time", "rule", "message", "sent"],
        [
            [when(one.time), f"{one.rule.value}{' (test)' if one.test else ''}", one.message]
            + ["; ".join(f"{to.to}: {_outcome(one, to.to)}" for to in one.deliveries) or "on the page"]
            for one in found
        ],
    )


def _about(rule: AlertRule) -> str:
    parts = [rule.run and f"run {rule.run}", rule.group and f"group {rule.group}"]
    return ", ".join(filter(None, parts)) or "all"


def _shown_options(rule: AlertRule) -> str:
    return ", ".join(f"{name} {value}" for name in _OPTIONS if (value := getattr(rule, name)) is not None)


def _receivers(rule: AlertRule) -> list[str]:
    page = [] if rule.quiet else ["the page"]
    return [*page, *([] if rule.webhook is None else [rule.webhook]), *rule.email]


def _outcome(alert: Alert, to: str) -> str:
    one = next(one for one in alert.deliveries if one.to == to)
    if one.state is DeliveryState.SENT:
        return f"sent{f', HTTP {one.status}' if one.status else ''}"
    tries = f" after {one.attempts} attempt{'' if one.attempts == 1 else 's'}" if one.attempts else ""
    return f"{one.state.value}{tries}{f': {one.error}' if one.error else ''}"
