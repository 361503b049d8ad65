"""The start of a manager of sessions, from the settings of a gateway or a session host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from loom.errors import WrongArguments
from loom.process.listen import host_and_port
from loom.weaver.keys import secret_in
from loom.wire.mux import MAX_MESSAGE
from loom_gateway.sessions.driver_ids import DriverIds
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.sessions.state_dir import StateFolder, default_path
from loom_gateway.settings import SessionSettings
from loom_gateway.weaver_process import RemoteWeaver, WeaverSupervisor
from loom_gateway.workers.sources import WorkerHosts, parse_source
from loom_gateway.workers.watcher import WorkerLeases

SHARE = 4
"""The largest message is this part of the memory: its bytes and what they are unpickled to are there at once."""

_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63


def largest_message() -> int:
    """Return the largest message that this container's memory allows, `MAX_MESSAGE` at most."""
    limit = memory_limit()
    return MAX_MESSAGE if limit is None else min(MAX_MESSAGE, limit // SHARE)


def memory_limit(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the smallest limit of this process's control groups (version 1 or 2); None if there is none.

    Within a container, the paths in ``groups`` may be those outside of it, where its own group is at ``root``.
    """
    limits = []
    for hierarchy, names, path in _groups(groups):
        if hierarchy == "0":
            limits += _limits(root, path, "memory.max")
        elif "memory" in names.split(","):
            limits += _limits(root / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _groups(groups: Path) -> list[list[str]]:
    try:
        return [line.split(":", 2) for line in groups.read_text().splitlines() if line.count(":") >= 2]
    except OSError:  # another system than Linux
        return []


def _limits(mount: Path, path: str, name: str) -> list[int]:
    group = mount / path.strip("/")
    found = []
    for folder in (group, *group.parents):
        if folder == mount or mount in folder.parents:
            try:
                limit = int((folder / name).read_text())
            except (OSError, ValueError):  # another namespace's path, the root, or "max"
                continue
            if limit < _UNLIMITED:
                found.append(limit)
    return found


def workers_of(settings: SessionSettings, who: str) -> WorkerHosts:
    """Return the workers that settings name. Raise `WrongArguments` if they name none."""
    if not settings.worker and not settings.workers:
        raise WrongArguments(f"{who} needs workers: give --worker tcp://HOST:PORT, or --workers; see --help")
    return WorkerHosts([parse_source(given) for given in settings.worker + settings.workers])


def state_folder(settings: SessionSettings, port: int) -> StateFolder | None:
    """Return the state folder for drivers that outlive this process; None if none should."""
    # Only Linux can tell reliably whether a process is the one that was started.
    separate = settings.driver_uids is not None
    if sys.platform != "linux" or (settings.exit_with_parent and settings.state_dir is None and not separate):
        return None
    return StateFolder.open(settings.state_dir or default_path(port, separate), separate)


def manager_of(
    settings: SessionSettings, hosts: WorkerHosts, folder: StateFolder | None, ids: DriverIds | None
) -> SessionManager:
    """Return a manager of sessions, which starts nothing yet."""
    max_message = largest_message() if settings.max_message is None else settings.max_message
    manager = SessionManager(
        hosts,
        settings.session_linger,
        folder,
        settings.exit_with_parent,
        [
            *("--max-message", str(max_message or MAX_MESSAGE)),
            *("--max-in-flight", str(settings.max_in_flight)),
            *("--worker-patience", str(settings.worker_patience)),
            *("--most", str(settings.session_max)),
            *("--idle", str(settings.session_idle)),
            *("--keep-results", str(settings.keep_results)),
        ],
        settings.workers_timeout,
        ids,
        WorkerLeases(settings.workers_per_user) if settings.workers_per_user else None,
    )
    manager.end_sessions |= settings.end_sessions
    return manager


def own_weaver(
    settings: SessionSettings, manager: SessionManager, prepare: Callable[[Path], object] = lambda folder: None
) -> WeaverSupervisor:
    """Return the weaver of a manager's own; see `WeaverSupervisor`."""
    return WeaverSupervisor(
        manager.folder.weaver,
        manager.worker_watch.there,
        settings.weaver_listen,
        settings.weaver_advertise,
        manager.exit_with_gateway,
        settings.session_linger,
        settings.driver_uids is not None,
        prepare,
    )


def remote_weaver(settings: SessionSettings) -> RemoteWeaver | None:
    """Return the weaver elsewhere that the settings name; None if there is none."""
    if settings.weaver is None:
        if settings.weaver_secret is not None:
            raise WrongArguments("--weaver-secret needs --weaver, the address of the weaver that it belongs to")
        return None
    for name in ("weaver_listen", "weaver_advertise", "alert_mail", "alert_network", "alert_page"):
        if getattr(settings, name, None):
            word, theirs = name.replace("_", "-"), name.removeprefix("weaver_").replace("_", "-")
            raise WrongArguments(f"--{word} is of the gateway's own weaver: give --{theirs} to `loom serve weaver`")
    if settings.weaver_secret is None:
        raise WrongArguments("--weaver needs --weaver-secret, the file that `loom serve weaver` has, too")
    host_and_port(settings.weaver, "the address of a weaver for --weaver: write HOST:PORT")
    return RemoteWeaver(settings.weaver, secret_in(settings.weaver_secret))
