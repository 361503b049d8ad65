"""``loom run --on``: runs a command on a cluster, with this folder and its environment, and follows it."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from loom.cli.output import say_lines
from loom.control.run_start import MAX_COMMAND
from loom.errors import Conflict, LoomError, Unavailable, WaitTimeout, WrongArguments
from loom.weaver.states import ReplicaState

if TYPE_CHECKING:
    from loom.launch.project import PackageList
    from loom_proxy.job import Job
    from loom_proxy.logs import LogLine
    from loom_proxy.runs import RunHandle

INTERRUPTED = 130
"""The exit code of a shell for a command that Ctrl-C has ended."""

LAST_LINES = 5.0
"""Seconds to wait for the last lines of a command that has ended."""


@dataclass(frozen=True)
class OnCluster:
    """The options of ``loom run`` that say where a command runs."""

    on: str
    hosts: int = 1
    per_host: str | None = None
    env: str | None = None
    detach: bool = False
    token: str | None = None
    ca: str | None = None
    insecure: bool = False


def run_on(to: OnCluster, command: Sequence[str], group: str, run: str) -> int:
    """Run a command on a cluster and follow it; return its exit status.

    Args:
        group: the name of the run.
        run: its id.

    Raises:
        WrongArguments: the options fit neither each other nor the cluster.
        Conflict: a training of the name lives.
        EnvironmentFailed: a host cannot make the environment.
    """
    per_host = read_per_host(to.per_host)
    packages = read_packages(Path.cwd(), to.env)
    from loom_proxy.contexts import named_gateway
    from loom_proxy.environment import check_launches
    from loom_proxy.session.open import connect

    chosen = named_gateway(to.on, to.token, to.ca, to.insecure)
    with chosen.explained():
        job = connect(chosen.url, chosen.token, ca=chosen.ca, insecure=chosen.insecure)
    job.print_logs = False
    with _one_interrupt():
        try:
            check_launches(job._calls)
            check_hosts(to.hosts, len(job.hosts))
            check_free(job, group)
            handle = _start(job, command, group, run, per_host, packages, to.hosts)
        except BaseException as error:
            away = job._connection.away
            with contextlib.suppress(LoomError):
                job.close()
            if isinstance(error, KeyboardInterrupt):
                left = f"; `loom sessions end {job.session}` ends its processes" if away else ""
                _say(f"interrupted before it began: the command does not run{left}")
                raise typer.Exit(INTERRUPTED) from None
            raise
        return _follow(job, handle, group, run, to.detach)


def read_per_host(text: str | None) -> dict[str, int]:
    """Return the processes on each host by the name of their dimension: ``gpus=8``, or ``procs=2``.

    Raises:
        WrongArguments: the text has another form.
    """
    if text is None:
        return {"procs": 1}
    found = re.fullmatch(r"(gpus|procs)=([1-9]\d{0,5})", text)
    if found is None:
        raise WrongArguments(f"--per-host {text!r:.80}: write gpus=8 or procs=2, a process for each")
    return {found[1]: int(found[2])}


def read_packages(folder: Path, env: str | None) -> PackageList | None:
    """Return the packages of a folder, or of the file of ``--env``; None with ``--env none``, or without a file."""
    from loom.launch.project import find_packages

    if env == "none":
        return None
    found = find_packages(folder, None if env is None else folder / env)
    if found is None and (folder / "pyproject.toml").is_file():
        _say("pyproject.toml has no uv.lock, so the cluster's packages are used: `uv lock` brings yours")
    return found


def check_hosts(wanted: int, there: int) -> None:
    """Raise `WrongArguments` if the cluster has too few hosts."""
    if wanted > there:
        raise WrongArguments(f"--hosts {wanted}: the cluster has {there} host{'s' * (there != 1)}")


def check_free(job: Job, group: str) -> None:
    """Raise `Conflict` if a replica of the group lives, as far as the weaver answers."""
    try:
        found = job.weaver.replicas().values()
    except Unavailable:
        return  # the weaver is away: the ranks report when it is back
    if living := [one.id for one in found if one.group == group and one.state not in _ENDED]:
        raise Conflict(
            f"a training named {group!r} lives ({living[0]!r}): choose another name with --name, or stop it",
            code="replica_taken",
        )


_ENDED = (ReplicaState.FAILED, ReplicaState.FINISHED)


def _start(
    job: Job,
    command: Sequence[str],
    group: str,
    run: str,
    per_host: dict[str, int],
    packages: PackageList | None,
    hosts: int,
) -> RunHandle:
    """Sync this folder, spawn the ranks and start the command in them; return the driver's run."""
    from loom.launch.ranks import Launch, LaunchedRank, run_ranks
    from loom.threadlet.start_facts import code_of, without_secrets

    folder = Path.cwd()
    synced = job.sync(folder)
    _say(f"synced {folder}: {synced.files} files, {synced.sent_files} sent")
    for warning in synced.warnings:
        _say(warning)
    if packages is not None:
        _say(f"the hosts make the environment of {packages.main}, unless they have it")
    launch = Launch(
        run=run,
        name=group,
        command=tuple(command),
        shown=tuple(without_secrets(command)) if sum(map(len, command)) < MAX_COMMAND else (),
        tree=synced.digest,
        inside=folder.name if (folder / "__init__.py").is_file() else "",
        packages=packages,
        code=code_of(str(folder)),
        alone=per_host == {"procs": 1},
    )
    procs = job.hosts.slice(hosts=slice(0, hosts)).spawn_procs(per_host, name=group)
    procs.logging_option(stream_to_client=True)
    job.on_log(_Lines(group, several=len(procs) > 1))
    ranks = procs.spawn(group, LaunchedRank, launch)
    handle: RunHandle = job.run(run_ranks, procs, ranks, detach=True, name=group)
    job.runs()  # so that the driver has it when this program says so
    return handle


def _follow(job: Job, handle: RunHandle, group: str, run: str, detach: bool) -> int:
    _say(f"run {run} ({group}) in session {job.session}: {job._gateway().page_url}#/runs/{run}")
    if detach:
        job.detach()
        _say(come_back(job.session, run, group))
        return 0
    try:
        for text in handle.follow():
            say_lines(text, err=True, nl=False)
        end = handle.result()
    except KeyboardInterrupt:
        _say(f"left running.\n{come_back(job.session, run, group)}")
        job.detach()
        raise typer.Exit(INTERRUPTED) from None
    except LoomError:
        with contextlib.suppress(LoomError):
            job.close()
        raise
    with contextlib.suppress(WaitTimeout, LoomError):
        job.flush_logs(LAST_LINES)
    job.close()
    if end.status:
        _say(f"rank {end.rank} ended with {end.status}")
    return int(end.status)


def come_back(session: str, run: str, group: str) -> str:
    """Return the commands by which a user comes back to a run."""
    return (
        f"  loom runs show {run}\n"
        f"  loom logs --session {session} --mesh {group} --follow\n"
        f"  loom stop --replica {group}        stop the training at its next step\n"
        f"  loom sessions end {session}    end its processes"
    )


@contextlib.contextmanager
def _one_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C raise `KeyboardInterrupt`, and the further ones do nothing."""

    def interrupt(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Lines:
    """Prints the lines of the ranks, behind their rank if there are several."""

    def __init__(self, mesh: str, several: bool) -> None:
        self._mesh = mesh
        self._several = several

    def __call__(self, line: LogLine) -> None:
        if line.mesh == self._mesh:
            rank = f"[{','.join(map(str, line.ranks))}] " if self._several else ""
            text = f"{rank}{line.text}\n"
            stream = sys.stderr if line.stream == "stderr" else sys.stdout
            for _ in range(line.count):
                stream.write(text)
            stream.flush()


def _say(text: str) -> None:
    say_lines(f"loom run: {text}", err=True)
