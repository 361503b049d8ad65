"""Writes the pages of the command line, from its own help: ``python -m tests.support.cli_page``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from loom.cli.app import app
from tests.support.paths import ROOT

__all__ = ["PAGES", "commands", "page"]

OF_TRAINING = frozenset(
    (
        *("watch", "pause", "resume", "stop", "drain", "save", "evaluate", "config"),
        *("run", "bridge", "demo"),
    )
)
"""First words of the commands that have the page about training."""

OF_HISTORY = frozenset(("query", "export", "events", "metrics"))
"""First words of the commands that have the page about the history of replicas."""

OF_RUNS = frozenset(("runs", "alerts"))
"""First words of the commands that have the page about the runs of trainings."""

OF_ACCESS = frozenset(("context", "token"))
"""First words of the commands that have the page about contexts and tokens."""

OF_SERVERS = frozenset(("serve", "up"))
"""First words of the commands that have the page about a cluster's processes."""

OF_SLURM = frozenset(("slurm",))
"""First words of the commands that have the page about Slurm."""

OF_FAULTS = frozenset(("inject",))
"""First words of the commands that have the page about failures on purpose."""

OF_DEVICES = frozenset(
    (
        "devices",
        "fail-device",
        "deactivate",
        "reactivate",
        "policy",
        "meshes",
        "stacks",
        "profile",
        "debug",
        "exec",
        "shell",
        "cp",
        "forward",
    )
)
"""First words of the commands that have the page about devices, meshes and processes."""

OF_TIMING = frozenset(("analyze", "trace", "tune"))
"""First words of the commands that have the page about where time goes."""

CLUSTER = """\
# The command line

This page has the commands for sessions; there are others about [a cluster's processes](cli-serve.md),
[contexts and tokens](cli-access.md),
[Slurm](cli-slurm.md), [training](cli-training.md), [runs and alerts](cli-runs.md), [histories](cli-history.md),
[failures on purpose](cli-faults.md), [devices, meshes and processes](cli-devices.md) and
[where time goes](cli-timing.md). `loom --help` and `loom COMMAND --help` print the same, `loom --version` the
version. Every command has the same [exit codes](exit-codes.md). A table folds what is too wide for the terminal; in
a file or a pipe, each row is one line. `tests/support/cli_page.py` writes these pages.
"""

SERVERS = """\
# The command line for a cluster's processes

These commands run [workers and gateways](../deploy/cluster.md), [session hosts](../deploy/session-hosts.md) and
weavers, until Ctrl-C ends them. [The gateway's options](gateway.md) are there by subject, too.
"""

ACCESS = """\
# The command line for contexts and tokens

These commands name the gateways that you use, and make the tokens that a gateway takes. See also
[contexts](../guide/connections.md#contexts) and [tokens and limits](../deploy/tokens.md).
"""

TRAINING = """\
# The command line for training

These commands watch and steer a training, and show one. [The page about failures](cli-faults.md) has those that
break it, and [that about clusters](cli.md) those for clusters and sessions, and the options of every
command that asks a gateway: `--url`, `--token` and `--ca`.
"""

HISTORY = """\
# The command line for histories

These commands show the history of replicas, and give it to [other programs](../guide/trackers.md).
[The page about clusters](cli.md) has the options of every command that asks a gateway: `--url`, `--token` and
`--ca`.
"""

RUNS = """\
# The command line for runs

These commands list and compare the [runs of trainings](../guide/training_runs.md), and set
[alerts](../guide/alerts.md).
[The page about clusters](cli.md) has the options of every command that asks a gateway: `--url`, `--token` and
`--ca`.
"""

SLURM = """\
# The command line for Slurm

These commands run Loom in [allocations of Slurm](../deploy/slurm.md). [The page about clusters](cli.md) has those
for clusters and sessions.
"""

FAULTS = """\
# The command line for failures

These commands break a training on purpose: see [failure injection](../guide/failure-injection.md).
[The page about clusters](cli.md) has the options of every command that asks a gateway: `--url`, `--token` and
`--ca`.
"""

DEVICES = """\
# The command line for devices, meshes and processes

These commands show the GPUs and CPUs that a training runs on, take them out of use, show meshes, look into
processes, and [run commands on ranks](../guide/rank.md). [The page about clusters](cli.md) has the options of every
command that asks a gateway: `--url`, `--token` and `--ca`. See also
[when a device fails](../guide/weaver.md#when-a-device-fails).
"""

TIMING = """\
# The command line for timing

These commands say where the time of calls and runs goes. [The page about clusters](cli.md) has the options of every
command that asks a gateway: `--url`, `--token` and `--ca`. See also [what the analysis says](../guide/analyze.md).
"""

SHARED = ("url", "token", "ca")
"""Parameters of every command that asks a gateway; one table has them all."""

SHARED_HELP = """\
## Options of every command that asks a gateway

| option | default | meaning |
| --- | --- | --- |
| `--url ADDRESS` | `LOOM_URL`, else the current [context](../guide/connections.md#contexts) | the gateway |
| `--token TEXT` | `LOOM_TOKEN`, else the token of the context | token to show |
| `--ca FILE` | `LOOM_CA`, else that of the context | certificate of your own authority, for `wss://` |

Addresses are those of [`loom.connect`](../guide/connections.md#addresses). With `kube://` and `slurm://` a port is
forwarded until the command ends.
"""


@cache
def commands() -> dict[str, Any]:
    """Every command that does something, by its words: Typer's objects, whose base class is not always click's."""
    return dict(_leaves(typer.main.get_command(app), ("loom",)))


def _leaves(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if getattr(command, "invoke_without_command", False):
        yield " ".join(words), command
    if hasattr(command, "commands"):
        for name, sub in command.commands.items():
            yield from _leaves(sub, (*words, name))
    else:
        yield " ".join(words), command


def page(begins: str) -> str:
    """The page that begins with one of the texts of `PAGES`."""
    sections = [_section(name, command) for name, command in commands().items() if _begins(name) == begins]
    return "\n".join([begins, *([SHARED_HELP] if begins == CLUSTER else []), *sections])


def _begins(name: str) -> str:
    """The beginning of the page that has a command."""
    word = name.split()[1]
    pages = {
        SERVERS: OF_SERVERS,
        ACCESS: OF_ACCESS,
        TRAINING: OF_TRAINING,
        RUNS: OF_RUNS,
        HISTORY: OF_HISTORY,
        SLURM: OF_SLURM,
        FAULTS: OF_FAULTS,
        DEVICES: OF_DEVICES,
        TIMING: OF_TIMING,
    }
    return next((begins for begins, words in pages.items() if word in words), CLUSTER)


PAGES = {
    ROOT / "docs" / "reference" / "cli.md": CLUSTER,
    ROOT / "docs" / "reference" / "cli-serve.md": SERVERS,
    ROOT / "docs" / "reference" / "cli-access.md": ACCESS,
    ROOT / "docs" / "reference" / "cli-training.md": TRAINING,
    ROOT / "docs" / "reference" / "cli-runs.md": RUNS,
    ROOT / "docs" / "reference" / "cli-history.md": HISTORY,
    ROOT / "docs" / "reference" / "cli-slurm.md": SLURM,
    ROOT / "docs" / "reference" / "cli-faults.md": FAULTS,
    ROOT / "docs" / "reference" / "cli-devices.md": DEVICES,
    ROOT / "docs" / "reference" / "cli-timing.md": TIMING,
}
"""Each page, and how it begins."""


def _section(name: str, command: Any) -> str:
    asks = {parameter.name for parameter in command.params} >= {"url"}
    shown = [parameter for parameter in command.params if not (asks and parameter.name in SHARED)]
    usage = [f"{name} [OPTIONS]" if command.params else name]
    usage += [_argument(parameter) for parameter in shown if _is_argument(parameter)]
    lines = [f"## {name}", "", f"`{' '.join(usage)}`", "", inspect.cleandoc(command.help or "")]
    if asks:
        lines[-1] += " Asks a gateway."
    rows = [_row(parameter) for parameter in shown]
    if rows:
        lines += ["", "| option | default | meaning |", "| --- | --- | --- |", *rows]
    return "\n".join([*lines, ""])


def _is_argument(parameter: Any) -> bool:
    return not any(name.startswith("-") for name in parameter.opts)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or (parameter.name or "").upper()
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    if _is_argument(parameter):
        name = _argument(parameter)
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        name = names if parameter.is_flag else f"{names} {parameter.metavar or (parameter.name or '').upper()}"
    text = getattr(parameter, "help", None) or ""
    if getattr(parameter, "envvar", None):
        text = f"{text} Environment: `{parameter.envvar}`.".strip()
    return f"| `{name}` | {_default(parameter)} | {text.replace('|', chr(92) + '|')} |"


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "needed"
    if value is None or value is False or callable(value) or value in ([], ()):
        return ""
    if value is True:
        return "on"
    return f"`{getattr(value, 'value', value)}`"


if __name__ == "__main__":
    for path, begins in PAGES.items():
        path.write_text(page(begins))
