"""The commands of the command line that ask a gateway, and arguments with which each can be tried."""

from __future__ import annotations

from pathlib import Path

from tests.support.cli_page import commands

__all__ = ["ARGUMENTS", "UNTIL_CTRL_C", "arguments", "commands_that_ask"]

ARGUMENTS = {
    "status": "",
    "logs": "",
    "meshes": "",
    "trace": "--for 100ms --no-kernels --out {folder}/trace.json",
    "debug": "--list",
    "exec": "--mesh none -- true",
    "shell": "--mesh none",
    "cp": "{folder}/plan.yaml 0:/tmp --mesh none",
    "forward": "6006 --mesh none",
    "dashboard": "--no-browser",
    "watch": "--json",
    "pause": "--timeout 1",
    "save": "--timeout 1",
    "evaluate": "--timeout 1",
    "resume": "--timeout 1",
    "stop": "--timeout 1",
    "drain": "--timeout 1",
    "weaver": "",
    "events": "",
    "metrics": "none",
    "export": "--to tensorboard --once --folder {folder} --state {folder}/state",
    "query": "select(1)",
    "stacks": "none",
    "profile": "none",
    "devices": "",
    "fail-device": "none",
    "deactivate": "--device none",
    "reactivate": "--device none",
    "policy": "",
    "branch": "none",
    "bridge": "nats://127.0.0.1:9",
    "analyze": "--session {session} --out {folder}",
    "tune": "--session {session} --out {folder}",
    "sessions list": "",
    "sessions end": "none",
    "sessions share": "none ann",
    "sessions unshare": "none ann",
    "alerts list": "",
    "alerts add": "crashed",
    "alerts rm": "none",
    "alerts test": "none",
    "alerts log": "",
    "runs list": "",
    "runs show": "none",
    "runs compare": "none none",
    "runs note": "none text",
    "runs tag": "none best",
    "runs archive": "none",
    "runs rm": "none",
    "config set": "lr=1 --timeout 1",
    "config back": "",
    "inject check": "{folder}/plan.yaml",
    "inject run": "{folder}/plan.yaml --report {folder}/report",
    "inject from-events": "--since 1m",
    "inject once": "sigkill --replica none",
    "inject remove": "none",
}
"""Arguments of each command that asks a gateway, which has one session and no replicas. They change nothing."""

UNTIL_CTRL_C = ("dashboard", "watch")
"""Commands that run until Ctrl-C with these arguments and a ``kube://`` address."""

_PLAN = """\
name: nothing
seed: 1
faults:
  - fault: sigkill
    when: {time: 1 s}
    target: {replica: none}
"""


def commands_that_ask() -> list[str]:
    """Every command of Typer's application with the option ``--url``, by its words after ``loom``."""
    asking = [name for name, command in commands().items() if any("--url" in one.opts for one in command.params)]
    return [name.removeprefix("loom ") for name in asking]


def arguments(command: str, folder: Path, session: str) -> list[str]:
    """The arguments with which a command can be tried; a file that it reads is written into the folder."""
    if "plan.yaml" in ARGUMENTS[command]:
        (folder / "plan.yaml").write_text(_PLAN)
    return ARGUMENTS[command].format(folder=folder, session=session).split()
