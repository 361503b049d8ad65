"""The facts of a run's start: how a process was started, with which code, and where.

A thread of its own gathers them once the weaver asks. It imports nothing that the program has not imported, and
starts no program but git. What it cannot find out in some seconds is left out.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from loom._version import __version__
from loom.control.frame import Frame, pack_value
from loom.control.run_start import (
    CODE_VARIABLE,
    COMMAND_VARIABLE,
    MAX_ARGUMENTS,
    MAX_FACT,
    MAX_FACTS,
    START_VARIABLE,
    StartFacts,
    read_start,
    start_of_slurm,
)

GIT_WITHIN = 5.0
"""Seconds that each question to git may take."""

HIDDEN = "***"

_PACKAGES = ("torch", "numpy", "transformers", "trl", "accelerate", "lightning", "torchtitan", "torchft", "monarch")
_SECRET = re.compile(
    r"(?i)secret|passw(or)?d|pwd|credentials?|(api|access|private|account|wandb|auth).?key|(token|auth)$"
)
"""Names of options and variables whose values are secrets."""
_OF_TOKENIZER = re.compile(r"(?i)(pad|eos|bos|unk|sep|cls|mask|stop|image|special)[-_.]?token$")
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_KNOWN_SECRET = re.compile(r"\b(?:hf_|ghp_|gho_|github_pat_|sk-|xox[abp]-|AKIA|eyJ)[A-Za-z0-9_.\-]{8,}")

_OF_SESSIONS = frozenset(("loom_gateway.driver", "monarch._src.actor.bootstrap_main"))
"""The modules that a session's own processes run."""

_TREE = re.compile(r"/trees/([0-9a-f]{64})(?=/|$)")
"""The hash of a synced folder's tree, in its path on a host."""

_log = logging.getLogger("loom")


def own_start() -> str | None:
    """Return the id of the start that this process belongs to; None if nothing has given one."""
    return read_start(os.environ.get(START_VARIABLE, "")) or start_of_slurm(os.environ)


def tell(send: Callable[[Frame], object], host: str, gpus: Sequence[str]) -> None:
    """Gather the facts on a thread of its own, and send them."""

    def work() -> None:
        try:
            send(StartFacts(bounded(gather(host, gpus))))
        except Exception:  # noqa: BLE001 - logged; the training goes on
            _log.warning("the start of this run cannot be described", exc_info=True)

    threading.Thread(target=work, name="loom-start", daemon=True).start()


def gather(host: str, gpus: Sequence[str]) -> dict[str, Any]:
    """Return the facts, as `StartFacts` describes them."""
    facts: dict[str, Any] = {
        "command": _command(),
        "host": host,
        "gpus": list(gpus),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), "loom": __version__, **_versions()},
        "tree": next((found[1] for one in sys.path if (found := _TREE.search(one))), None),
        "cluster_job": os.environ.get("SLURM_JOB_ID"),
    }
    with suppress(OSError):
        facts["folder"] = str(Path.cwd())
    with suppress(Exception):  # a user id without a name
        facts["user"] = getpass.getuser()
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    facts |= _brought() or code_of(str(Path(file).resolve().parent) if file else facts.get("folder", "."))
    return {name: value for name, value in facts.items() if value is not None}


def bounded(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts that `StartFacts` takes: long texts are cut, and what is too large altogether is left out."""
    kept: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, list):
            value = [one[:MAX_FACT] for one in value[:MAX_ARGUMENTS]]
        elif isinstance(value, str):
            value = value[:MAX_FACT]
        if len(pack_value({**kept, name: value})) <= MAX_FACTS:
            kept[name] = value
    return kept


def without_secrets(command: Sequence[str]) -> list[str]:
    """Return a command line in which values that look like secrets are `HIDDEN`."""
    shown, hides = [], False
    for argument in command:
        name, equals, _ = argument.partition("=")
        is_option = argument.startswith("-")
        if hides and not is_option:
            shown.append(HIDDEN)
        elif equals and _is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(_KNOWN_SECRET.sub(HIDDEN, _IN_ADDRESS.sub(HIDDEN, argument)))
        hides = is_option and not equals and _is_secret(name)
    return shown


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None and _OF_TOKENIZER.search(name) is None


def _command() -> list[str] | None:
    """Return the command line; None in a session's process, whose command is not its user's."""
    with suppress(ValueError, TypeError, KeyError):
        given = json.loads(os.environ[COMMAND_VARIABLE])
        if isinstance(given, list):
            return without_secrets([str(one) for one in given])
    return None if _OF_SESSIONS & set(sys.orig_argv) else without_secrets(sys.orig_argv)


def _versions() -> dict[str, str]:
    """Return the versions of the packages that the program has imported."""
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    return {name: str(one) for name, one in {**found, "cuda": cuda}.items() if one is not None}


def _brought() -> dict[str, Any]:
    """Return the facts of code that was brought from another machine, where git knows it."""
    with suppress(ValueError, TypeError, KeyError):
        told = json.loads(os.environ[CODE_VARIABLE])
        if isinstance(told, dict):
            return {name: told[name] for name in ("commit", "branch", "clean", "tree") if name in told}
    return {}


def code_of(folder: str) -> dict[str, Any]:
    """Return git's commit and branch of a folder, and whether its tracked files are those of the commit."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    clean = None if changed is None else not changed
    return {"commit": commit, "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), "clean": clean}


def _git(folder: str, *question: str) -> str | None:
    """Return the answer of git; None if there is none."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    # No hook, monitor or pager of a repository runs, and no signal of the terminal reaches it.
    command = ["git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C", folder, *question]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=GIT_WITHIN,
            env=environment,
            start_new_session=True,
            check=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
