"""The typer application with all commands of ``loom``.

Each group of commands is a module of its own, which this one alone imports, so that `loom.cli` starts without any.
"""

from __future__ import annotations

from typing import Annotated

import typer

from loom._version import __version__
from loom.cli import (
    alerts,
    analyze,
    branch,
    bridge,
    context,
    dashboard,
    demo,
    inject,
    logs,
    query_and_export,
    remote_exec,
    run,
    runs,
    serve,
    sessions,
    slurm,
    status,
    token,
    trace,
    tune,
    weaver,
)
from loom.cli.output import say

app = typer.Typer(
    name="loom",
    help="Drive a Monarch actor mesh inside a cluster from outside it.",
    no_args_is_help=True,
    add_completion=False,
    # Print plain tracebacks: typer's own are long and show the values of variables, tokens included.
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"loom {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(serve.up)
app.command(context_settings=run.OPTIONS)(run.run)
app.command()(branch.branch)
app.add_typer(demo.app, name="demo")
app.add_typer(serve.app, name="serve")
app.add_typer(slurm.app, name="slurm")
app.command()(status.status)
app.command()(logs.logs)
app.command()(sessions.meshes)
app.command("exec")(remote_exec.exec_)
app.command()(remote_exec.shell)
app.command()(remote_exec.cp)
app.command()(remote_exec.forward)
app.command()(trace.trace)
app.command()(remote_exec.debug)
app.command()(dashboard.dashboard)
app.add_typer(sessions.app, name="sessions")
app.add_typer(token.app, name="token")
app.add_typer(context.app, name="context")
app.add_typer(runs.app, name="runs")
app.add_typer(alerts.app, name="alerts")
app.command()(weaver.watch)
app.add_typer(weaver.config_app, name="config")
for command in weaver.COMMANDS:
    app.command()(command)
app.command()(weaver.weaver)
app.command()(weaver.events)
app.command()(weaver.metrics)
app.command()(query_and_export.query)
app.command("export")(query_and_export.export)
app.command()(weaver.stacks)
app.command()(weaver.profile)
app.command()(weaver.devices)
app.command("fail-device")(weaver.fail_device)
app.command()(weaver.deactivate)
app.command()(weaver.reactivate)
app.command()(weaver.policy)
app.add_typer(inject.app, name="inject")
app.command()(bridge.bridge)
app.command()(analyze.analyze)
app.command()(tune.tune)
