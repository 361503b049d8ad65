"""The bootstrap of a session's processes, which ties each to its driver, and of those that its code starts.

Monarch's hosts keep the processes of a root client that was killed (torchmonarch 0.7; seen for minutes). So every
process of a session has a link (`loom_gateway.driver.process_link`), and ends when the driver is gone. In the other
direction, the driver learns at once that a process has ended. Monarch reports a process that died while its host
lives. It does not report a lost host, and pending calls would wait forever.

The form of large results that the driver can pass on without unpickling.

Monarch pickles a tensor through ``torch.save``, whole and with two copies. The driver would have to import torch to
unpickle it, only to pickle it again. So arrays and tensors at the top of a result, or in a list, tuple or dict
there, are taken apart (`loom.wire.arrays`). Any other receiver, such as another actor, unpickles them whole.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loom.control.address import ADDRESS_VARIABLE, hold_address
from loom.process.late_environment import add_to_environment
from loom.process.refused_signals import explain_refusals
from loom.wire.arrays import take_apart_near_top
from loom.wire.by_value import repair_cloudpickle, share_with_children
from loom_gateway.driver.code_sync import sys_path
from loom_gateway.driver.code_sync.sys_path import OnPath
from loom_gateway.driver.process_link.link import ProcessLinkAddress
from loom_gateway.workers.end_notice import heed_end_notice

if TYPE_CHECKING:
    from loom_gateway.driver.process_link.join import DriverTie


LARGE = 1 << 20  # bytes from which an array or a byte string in a result is taken apart; a tensor always is

_SMALL = frozenset({type(None), bool, int, float, str})


def send_large_results_apart() -> None:
    """Patch this process's actors to take large parts of their results apart before sending."""
    from monarch._src.actor.actor_mesh import Port

    original = Port._pending_result
    if hasattr(original, "__wrapped__"):
        return

    def pending_result(self: Any, result: Any) -> Any:
        return original(self, result if type(result) in _SMALL else take_apart_near_top(result, LARGE))

    pending_result.__wrapped__ = original  # type: ignore[attr-defined]
    Port._pending_result = pending_result


DELIVERED_LATER = 30.0
"""Seconds after the patience for which a process tries to deliver a message. The process would otherwise inherit
the driver's `UNDELIVERABLE_AFTER`, and an actor that calls another on a dead host would wait forever."""

STATE_WITHIN = "25s"
"""The duration after which a process takes another for dead that does not answer the question for its state.

Such questions are about the meshes that the process's own actors have spawned. A process that dies when it is asked
never answers, and without this limit, which the driver does not have, the actors' calls would wait forever. An
answer that has not come after 20 s of silence does not come (`loom_gateway.driver.monarch.root_client`).
"""


FIRST_NATIVE = 1 << 61
"""The first id of proc meshes that functions and actors start with Monarch's own ``spawn_procs``.

They are chosen at random, as each process chooses them for itself. Those of the clients and of
`loom_gateway.driver.session.local_api` are below."""


class ReplicaPlace(NamedTuple):
    """The default identity of the replicas in a proc mesh, which a training program may override."""

    session: str
    group: str  # proc mesh's name
    marks: Mapping[str, str] = {}  # further environment variables from the client

    def environment(self, procs: int, rank: int) -> dict[str, str]:
        """Return the environment variables of one process, by which its threadlet is named."""
        return {
            "LOOM_SESSION": self.session,
            "LOOM_PROCS": str(procs),
            "LOOM_MESH": self.group,
            "LOOM_GROUP": self.group,
            "LOOM_RANK": str(rank),
            "LOOM_REPLICA": f"{self.group}_{rank}@{self.session}",
        }


class TorchrunPlace(NamedTuple):
    """The place of a proc mesh's processes in the terms of ``torchrun``: https://docs.pytorch.org/docs/stable/elastic/run.html."""

    per_host: int  # processes on each host
    hosts: int

    def environment(self, rank: int, master: tuple[str, str] | None) -> dict[str, str]:
        """Return the variables by which ``torch.distributed`` and libraries on top find the processes.

        Args:
            rank: of the process in its mesh, in which the processes of a host are next to each other.
            master: host and port where the processes may meet.
        """
        found = {} if master is None else {"MASTER_ADDR": master[0], "MASTER_PORT": master[1]}
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.per_host),
            "WORLD_SIZE": str(self.per_host * self.hosts),
            "LOCAL_WORLD_SIZE": str(self.per_host),
            **found,
        }


Bootstrap = Callable[[], None] | Callable[[], Awaitable[None]]


def bootstrap_on(
    address: ProcessLinkAddress,
    procs: int,
    bootstrap: Bootstrap | None,
    on_path: OnPath | None,
    replica: ReplicaPlace,
    torchrun: TorchrunPlace,
) -> Callable[[], Any]:
    """Return a bootstrap function for ``spawn_procs`` that ties a process to its driver, then runs the user's own.

    Each process has the variables of `TorchrunPlace` that are not set already.

    Arguments are unpickled in their order, so ``on_path`` completes the path before ``bootstrap`` is unpickled.
    """
    if bootstrap is not None and inspect.iscoroutinefunction(bootstrap):
        return functools.partial(_hold_on_async, address, procs, on_path, replica, torchrun, bootstrap)
    return functools.partial(_hold_on, address, procs, on_path, replica, torchrun, bootstrap)  # type: ignore[arg-type]


def tie_native_procs(address: ProcessLinkAddress, spawned: Callable[[Any], None] | None = None) -> None:
    """Have ``spawn_procs`` of every host mesh in this process tie what it starts, unless that is tied already.

    So the driver learns at once that such a process has ended, and it ends when the driver is gone. It has the
    synced folders of this process. Its output goes Monarch's way. ``spawned`` is called with each new proc mesh.
    """
    from monarch.actor import HostMesh

    from loom_gateway.driver.monarch import native_calls

    plain = HostMesh.spawn_procs

    def spawn_procs(
        hosts: HostMesh,
        per_host: Any = None,
        bootstrap: Any = None,
        name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        ident = _tied_procs(bootstrap)
        native = ident is None and not _ties(bootstrap)
        if native:
            ident = FIRST_NATIVE | secrets.randbits(61)
            bootstrap = _bare_bootstrap_on(address, ident, bootstrap)
        procs = None if ident is None else native_calls.track(ident, name or "anon")
        mesh = plain(hosts, per_host, bootstrap, name, *args, **kwargs)
        if procs is not None:
            native_calls.belong(mesh, procs)
        if native and spawned is not None:
            spawned(mesh)
        return mesh

    spawn_procs.__doc__ = plain.__doc__
    HostMesh.spawn_procs = spawn_procs


def _tied_procs(bootstrap: object) -> int | None:
    """Return the id of the proc mesh that a bootstrap function of `bootstrap_on` is for; None for any other one."""
    if isinstance(bootstrap, functools.partial) and bootstrap.func in (_hold_on, _hold_on_async):
        procs: int = bootstrap.args[1]
        return procs
    return None


def _ties(bootstrap: object) -> bool:
    """Return whether a bootstrap function of this module ties its process to the driver."""
    return isinstance(bootstrap, functools.partial) and bootstrap.func in _TIES


def hold_on(address: ProcessLinkAddress, procs: int) -> None:
    """Tie this process to the driver at ``address``, without its output."""
    _tie(address, procs, output=False, meets=False)


def _bare_bootstrap_on(address: ProcessLinkAddress, procs: int, bootstrap: Bootstrap | None) -> Callable[[], Any]:
    """Return a bootstrap function that ties a process to its driver, without its output, and runs the user's own.

    It is for processes that a function or an actor starts itself, which has the rest in its own hands.
    """
    on_path = sys_path.current()
    # Workers of an older Loom do not take folders. These come first: unpickled, they make the bootstrap importable.
    given: Mapping[str, Any] = {} if on_path is None else {"on_path": on_path}
    hold: Any = _hold_on_barely_async if inspect.iscoroutinefunction(bootstrap) else _hold_on_barely
    return functools.partial(hold, address, procs, **given, bootstrap=bootstrap)


def _hold_on_barely(
    address: ProcessLinkAddress, procs: int, bootstrap: Callable[[], None] | None, on_path: OnPath | None = None
) -> None:
    hold_on(address, procs)
    _heed_ends(address)
    if on_path is not None:
        on_path.check()
    if bootstrap is not None:
        bootstrap()


async def _hold_on_barely_async(
    address: ProcessLinkAddress,
    procs: int,
    bootstrap: Callable[[], Awaitable[None]],
    on_path: OnPath | None = None,
) -> None:
    _hold_on_barely(address, procs, None, on_path)
    await bootstrap()


def _tie(address: ProcessLinkAddress, procs: int, output: bool, meets: bool) -> tuple[int, DriverTie]:
    """Tie this process to the driver at ``address``; return its rank and its link."""
    from monarch.actor import current_rank

    from loom_gateway.driver.process_link.join import DriverTie

    rank: int = current_rank().rank
    return rank, DriverTie(address, procs, rank, output, meets)


def _hold_on(
    address: ProcessLinkAddress,
    procs: int,
    on_path: OnPath | None,
    replica: ReplicaPlace,
    torchrun: TorchrunPlace,
    bootstrap: Callable[[], None] | None,
) -> None:
    heed_end_notice()
    rank, line = _tie(address, procs, output=True, meets=True)
    for name, value in torchrun.environment(rank, line.master).items():
        os.environ.setdefault(name, value)  # one that is set is the user's own
    add_to_environment(replica.marks)
    if line.weaver:
        os.environ.pop(ADDRESS_VARIABLE, None)  # a worker's own would be of another weaver
        os.environ.update(replica.environment(procs, rank))
        hold_address(line.weaver)
    _heed_ends(address)
    send_large_results_apart()
    if on_path is not None:
        on_path.check()
    if bootstrap is not None:
        bootstrap()


def _heed_ends(address: ProcessLinkAddress) -> None:
    """Have the calls of this process's actors fail when a process is gone, of which the driver tells.

    Monarch's own waits end too, which the driver leaves open, unless the user has set the limit.
    """
    from monarch.config import configure

    from loom_gateway.driver.monarch import native_calls
    from loom_gateway.driver.monarch.actor_ends import report_ends_of_actors
    from loom_gateway.driver.monarch.endpoint_errors import answer_what_is_raised
    from loom_gateway.driver.monarch.torch_pickling import wait_for_torch
    from loom_gateway.driver.monarch.traced_calls import trace_calls
    from loom_gateway.driver.process_link.deaths import DriverWatch
    from loom_gateway.driver.runs.forked_children import keep_actors_apart

    explain_refusals(
        "an endpoint does not run in its process's main thread: for a time limit, give the work to a process of "
        "its own (multiprocessing, subprocess) or to job.run"
    )
    native_calls.track_calls()
    trace_calls()
    wait_for_torch()
    answer_what_is_raised()
    report_ends_of_actors()
    keep_actors_apart()
    repair_cloudpickle()
    share_with_children()
    native_calls.ask_by(DriverWatch(address, native_calls.lose).watch)
    tie_native_procs(address)
    delivered = f"{address.patience + DELIVERED_LATER:g}s"
    limits = {
        "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": {"message_delivery_timeout": delivered},
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": {"get_actor_state_max_idle": STATE_WITHIN},
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": {"get_proc_state_max_idle": STATE_WITHIN},
    }
    for variable, limit in limits.items():
        if variable not in os.environ:
            configure(**limit)


async def _hold_on_async(
    address: ProcessLinkAddress,
    procs: int,
    on_path: OnPath | None,
    replica: ReplicaPlace,
    torchrun: TorchrunPlace,
    bootstrap: Callable[[], Awaitable[None]],
) -> None:
    _hold_on(address, procs, on_path, replica, torchrun, None)
    await bootstrap()


_TIES = (hold_on, _hold_on, _hold_on_async, _hold_on_barely, _hold_on_barely_async)
