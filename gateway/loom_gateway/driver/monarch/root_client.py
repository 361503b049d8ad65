"""Attaching to the workers as a Monarch root client."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from loom.errors import WorkerUnreachable, catch_monarchs
from loom.process import listen
from loom.wire.by_value import repair_cloudpickle, share_with_children
from loom_gateway.workers.monarch_env import service_address
from loom_gateway.workers.sources import WorkerAddress, parse_worker_address

if TYPE_CHECKING:
    from monarch.actor import HostMesh


PROBE_TIMEOUT = 3.0  # seconds that a worker has to accept a TCP connection

UNDELIVERABLE_AFTER = "3650d"
"""The duration for which a message to a silent host is kept.

Monarch's default is 30 s. After that it gives up the connection to the host and makes no other in this process, so
a host that comes back later would stay unreachable (torchmonarch 0.7: ``hyperactor::mailbox`` forgets a connection
only when the restarted host refuses it). Callers learn of a lost host from `liveness` instead.
"""


def probe(workers: Sequence[str]) -> None:
    """Check that every worker accepts connections. All are tried at once. Monarch itself would wait silently.

    Raises:
        WorkerUnreachable: names every address that did not answer within `PROBE_TIMEOUT` seconds.
    """
    if not workers:
        raise WorkerUnreachable("this gateway has no workers: start it with --worker tcp://HOST:PORT")
    silent = [f"{worker} ({error})" for worker, error in unreachable(workers).items()]
    if silent:
        raise WorkerUnreachable(
            f"{len(silent)} of {len(workers)} workers cannot be reached: {', '.join(silent)}. Start them with "
            f"`loom serve worker --address …`, or start the gateway with the addresses that they listen on."
        )


def unreachable(workers: Sequence[str]) -> dict[str, str]:
    """Return the workers that accept no connections, with the reasons. All are tried at once."""
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        errors = pool.map(_try, map(parse_worker_address, workers))
        return {worker: error for worker, error in zip(workers, errors, strict=True) if error is not None}


def _try(address: WorkerAddress) -> str | None:
    try:
        socket.create_connection((address.host, address.port), PROBE_TIMEOUT).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


def address_towards(workers: Sequence[str]) -> str:
    """Return an address of this machine that the workers can reach."""
    first = parse_worker_address(workers[0])
    return listen.address_towards(first.host, first.port)


_SPAWNS = ("actor_spawn_max_idle", "mesh_proc_spawn_max_idle")
"""Monarch's timeouts for a spawn. Its answer is lost if its host was silent for more than 20 s meanwhile, although
it is carried out later (torchmonarch 0.7). So it fails after the patience."""

SPAWN_LEAST = 30.0  # the least seconds that a spawn may take, Monarch's default

_WATCHES = ("channel_reconnect_timeout", "host_spawn_ready_timeout")
"""Monarch's own timeouts for a silent host. They have to be longer than the patience, after which
`loom_gateway.driver.process_link` fails the calls."""

_STATES = (
    "get_actor_state_max_idle",
    "get_proc_state_max_idle",
    "mesh_orphan_timeout",
    "supervision_watchdog_timeout",
)
"""Monarch's timeouts for the state of processes and actors, for which the controllers of a mesh ask, never end:
process links tell which process has ended. An answer is lost if its host was silent for more than 20 s, though the
host is back (torchmonarch 0.7). Monarch would then stop the actors there ("no status received from process").
While it waits it keeps nothing alive, so no mesh counts as an orphan either.

A process that dies when it is asked answers nothing, and Monarch waits on: then
`loom_gateway.driver.monarch.native_calls` fails the calls."""


def _use_transport(here: str, port: int, patience: float) -> None:
    """Make Monarch listen on ``port``, or any if it is 0 or taken. Call it before any other use of Monarch."""
    from monarch.actor import enable_transport
    from monarch.config import configure

    configure(
        message_delivery_timeout=UNDELIVERABLE_AFTER,
        **dict.fromkeys(_WATCHES, f"{2 * patience + 30:g}s"),
        **dict.fromkeys(_STATES, UNDELIVERABLE_AFTER),
        **dict.fromkeys(_SPAWNS, f"{max(patience, SPAWN_LEAST):g}s"),
    )
    enable_transport(f"tcp://{listen.bracketed(here)}:{port if _is_free(here, port) else 0}")


def _is_free(here: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in here else socket.AF_INET) as sock:
        # The gateway keeps the port bound for its drivers; see `loom_gateway.sessions.manager`.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((here, port))
        except OSError:
            return False
    return True


def prepare(workers: Sequence[str], port: int, patience: float) -> None:
    """Do what a spare driver can do before it has a session: import Monarch and start the root client.

    From then on Loom's exceptions are the bases of Monarch's, for the functions of `Job.run`, and their calls fail
    when a process that they wait for is gone.

    ``patience``: seconds for which a silent host does not count as lost.
    """
    import monarch.actor

    from loom_gateway.driver.monarch import debugger
    from loom_gateway.driver.monarch.endpoint_errors import answer_what_is_raised
    from loom_gateway.driver.monarch.native_calls import track_calls
    from loom_gateway.driver.monarch.torch_pickling import wait_for_torch
    from loom_gateway.driver.monarch.traced_calls import trace_calls

    debugger.take_the_place_of_monarchs()
    _use_transport(address_towards(workers), port, patience)
    level = logging.root.level
    monarch.actor.context()
    logging.root.setLevel(level)  # Monarch 0.8 sets INFO, but the root logger is the user's
    catch_monarchs()
    track_calls()
    trace_calls()
    wait_for_torch()
    answer_what_is_raised()
    _keep_source_loaders_out()
    repair_cloudpickle()
    share_with_children()


def _keep_source_loaders_out() -> None:
    """Undo Monarch's patch that makes functions pickled by value ask their root client for their source.

    The source is on the laptop, so the driver could not answer. The answer would also break an actor's import of
    torch if it arrived during it (torchmonarch 0.7: ``partially initialized module 'torch'``).
    """
    import cloudpickle
    from monarch._src.actor import pickle as monarch_pickle

    original = getattr(monarch_pickle, "_orig_function_getstate", None)
    if original is not None:
        cloudpickle.cloudpickle._function_getstate = original


def spawn_weaver_mesh() -> None:
    """Spawn the actor mesh ``weaver`` in this process, before user code could take its name. Do not wait for it."""
    from monarch.actor import get_or_spawn_controller

    from loom.weaver.server.actor import WEAVER_MESH, WeaverActor

    get_or_spawn_controller(WEAVER_MESH, WeaverActor)


def attach(workers: Sequence[str], name: str) -> HostMesh:
    """Attach to the workers. Return a host mesh with the one dimension ``hosts``, in the order of ``workers``."""
    from monarch.actor import attach_to_workers

    # With one name in several root clients, two clients on one worker would share the host mesh.
    addresses = [service_address(worker) for worker in workers]
    return attach_to_workers(ca="trust_all_connections", workers=addresses, name=f"{name}_{os.getpid()}")
