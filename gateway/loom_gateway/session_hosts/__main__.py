"""``python -m loom_gateway.session_hosts``: a session host's process. `loom serve sessions` runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import uvloop

from loom.errors import WrongArguments
from loom.process.error_exit import FAILURE
from loom.process.hidden_secrets import keep_memory_private
from loom.process.listen import announce, bracketed, host_and_port, listen
from loom.process.parent_pipe import when_parent_ends
from loom.token_file import ADMIN
from loom_gateway.session_hosts.host import SessionHost
from loom_gateway.session_hosts.line import read_key
from loom_gateway.session_hosts.moves import Moves
from loom_gateway.sessions.driver_ids import DriverIds, give_up_other_rights, hold_folder_of_logs
from loom_gateway.sessions.manager import SessionManager
from loom_gateway.settings import SessionHostSettings, run_process
from loom_gateway.starting import manager_of, own_weaver, remote_weaver, state_folder, workers_of
from loom_gateway.weaver_process import GatewayWeaver
from loom_gateway.workers.sources import WorkerHosts, parse_source


def main() -> None:
    """Run the session host until a signal ends it."""
    keep_memory_private()  # drivers of the host before may run already, with user code and this process's user id
    run_process(_serve, SessionHostSettings, "sessions")


def _serve(settings: SessionHostSettings) -> None:
    """Run sessions for gateways. Prints one line of JSON when ready."""
    workers = workers_of(settings, "a session host")
    if settings.host_key is None:
        raise WrongArguments("a session host needs --host-key, the file that its gateways have, too")
    key, elsewhere = read_key(settings.host_key), remote_weaver(settings)
    ids = DriverIds.of(settings.driver_uids) if settings.driver_uids else None
    host, port = host_and_port(settings.listen, "where gateways connect: write --listen HOST:PORT")
    listener = listen(host, port, "choose another with --listen (port 0 picks one)")
    if ids is not None:
        give_up_other_rights()
        hold_folder_of_logs()
    manager = manager_of(settings, workers, state_folder(settings, listener.getsockname()[1]), ids)
    weaver = elsewhere or own_weaver(settings, manager)
    manager.use(weaver.place, weaver.keys)
    moves = None
    if settings.peer:
        if elsewhere is None:
            raise WrongArguments("--peer needs --weaver, a weaver elsewhere, which says who has a session")
        moves = Moves(manager, weaver.client, key, WorkerHosts([parse_source(given) for given in settings.peer]))
    uvloop.run(_run(settings, SessionHost(manager, key, moves), manager, weaver, listener))


async def _run(
    settings: SessionHostSettings,
    host: SessionHost,
    manager: SessionManager,
    weaver: GatewayWeaver,
    listener: socket.socket,
) -> None:
    if settings.exit_with_parent:
        when_parent_ends(lambda: _abandon(manager, weaver))
    stopping = _signals(manager, settings.drain)
    await manager.adopt(lambda owner: ADMIN)
    manager.prepare_spare()
    weaver.start()
    await host.start(listener)
    address, port = listener.getsockname()[:2]
    announce(address=f"tcp://{bracketed(address)}:{port}")
    await stopping.get()
    host.draining = True
    if settings.drain and not manager.end_sessions:
        await _drain(manager, settings.drain, stopping)
    await manager.end_all()
    await host.close()
    await weaver.close(manager.end_sessions)
    await manager.close()


def _signals(manager: SessionManager, drain: float) -> asyncio.Queue[int]:
    """Return a queue of the signals that tell the host to stop. Ctrl-C comes from a user who is done."""
    stopping = asyncio.Queue[int]()

    def stop(number: int) -> None:
        manager.end_sessions |= number == signal.SIGINT
        stopping.put_nowait(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return stopping


async def _drain(manager: SessionManager, seconds: float, stopping: asyncio.Queue[int]) -> None:
    """Wait until no session is left, for so long at most, or until a second signal."""
    again = asyncio.ensure_future(stopping.get())
    until = asyncio.get_running_loop().time() + seconds
    try:
        while sessions := manager.sessions():
            over = asyncio.ensure_future(sessions[0].over.wait())
            left = until - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait((over, again), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if over not in done:
                over.cancel()
                return
    finally:
        again.cancel()


def _abandon(manager: SessionManager, weaver: GatewayWeaver) -> None:
    """End at once. The drivers end with this process, and the sessions' processes with them."""
    weaver.abandon()
    manager.abandon()
    os._exit(FAILURE)


if __name__ == "__main__":
    main()
