"""The bootstrap of a session's processes, which ties each to its driver.

Monarch's hosts keep the processes of a root client that was killed (torchmonarch 0.7; seen for minutes). So every
process of a session has a lifeline (`loom_gateway.driver.lifeline`), and ends when the driver is gone. In the other
direction, the driver learns at once that a process has ended. Monarch reports a process that died while its host
lives. It does not report a lost host, and pending calls would wait forever.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from loom.control.address import ADDRESS_VARIABLE, hold_address
from loom_gateway.driver.code_sync.sys_path import OnPath
from loom_gateway.driver.lifeline.line import LifelineAddress
from loom_gateway.driver.monarch.results import send_large_results_apart
from loom_gateway.workers.end_notice import heed_end_notice

if TYPE_CHECKING:
    from loom_gateway.driver.lifeline.tie import Lifeline

DELIVERED_LATER = 30.0
"""Seconds after the patience for which a process tries to deliver a message. The process would otherwise inherit
the driver's `UNDELIVERABLE_AFTER`, and an actor that calls another on a dead host would wait forever."""

STATE_WITHIN = "25s"
"""The duration after which a process takes another for dead that does not answer the question for its state.

Such questions are about the meshes that the process's own actors have spawned. A process that dies when it is asked
never answers, and without this limit, which the driver does not have, the actors' calls would wait forever. An
answer that has not come after 20 s of silence does not come (`loom_gateway.driver.monarch.root_client`).
"""


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
    address: LifelineAddress,
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


def tied_procs(bootstrap: object) -> int | None:
    """Return the id of the proc mesh that a bootstrap function of `bootstrap_on` is for; None for any other one."""
    if isinstance(bootstrap, functools.partial) and bootstrap.func in (_hold_on, _hold_on_async):
        procs: int = bootstrap.args[1]
        return procs
    return None


def ties(bootstrap: object) -> bool:
    """Return whether a bootstrap function of this module ties its process to the driver."""
    return isinstance(bootstrap, functools.partial) and bootstrap.func in _TIES


def hold_on(address: LifelineAddress, procs: int) -> None:
    """Tie this process to the driver at ``address``, without its output."""
    _tie(address, procs, output=False, meets=False)


def bare_bootstrap_on(address: LifelineAddress, procs: int, bootstrap: Bootstrap | None) -> Callable[[], Any]:
    """Return a bootstrap function that ties a process to its driver, without its output, and runs the user's own.

    It is for processes that a function in the driver starts itself, which has the rest in its own hands.
    """
    if bootstrap is not None and inspect.iscoroutinefunction(bootstrap):
        return functools.partial(_hold_on_barely_async, address, procs, bootstrap)
    return functools.partial(_hold_on_barely, address, procs, bootstrap)  # type: ignore[arg-type]


def _hold_on_barely(address: LifelineAddress, procs: int, bootstrap: Callable[[], None] | None) -> None:
    hold_on(address, procs)
    if bootstrap is not None:
        bootstrap()


async def _hold_on_barely_async(
    address: LifelineAddress, procs: int, bootstrap: Callable[[], Awaitable[None]]
) -> None:
    hold_on(address, procs)
    await bootstrap()


def _tie(address: LifelineAddress, procs: int, output: bool, meets: bool) -> tuple[int, Lifeline]:
    """Tie this process to the driver at ``address``; return its rank and its lifeline."""
    from monarch.actor import current_rank

    from loom_gateway.driver.lifeline.tie import Lifeline

    rank: int = current_rank().rank
    return rank, Lifeline(address, procs, rank, output, meets)


def _hold_on(
    address: LifelineAddress,
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
    os.environ.update(replica.marks)
    if line.weaver:
        os.environ.pop(ADDRESS_VARIABLE, None)  # a worker's own would be of another weaver
        os.environ.update(replica.environment(procs, rank))
        hold_address(line.weaver)
    _limit_waits(address.patience)
    send_large_results_apart()
    if on_path is not None:
        on_path.check()
    if bootstrap is not None:
        bootstrap()


def _limit_waits(patience: float) -> None:
    """End the waits of this process's actors that the driver leaves open, unless the user has set the limit."""
    from monarch.config import configure

    limits = {
        "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": {"message_delivery_timeout": f"{patience + DELIVERED_LATER:g}s"},
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": {"get_actor_state_max_idle": STATE_WITHIN},
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": {"get_proc_state_max_idle": STATE_WITHIN},
    }
    for variable, limit in limits.items():
        if variable not in os.environ:
            configure(**limit)


async def _hold_on_async(
    address: LifelineAddress,
    procs: int,
    on_path: OnPath | None,
    replica: ReplicaPlace,
    torchrun: TorchrunPlace,
    bootstrap: Callable[[], Awaitable[None]],
) -> None:
    _hold_on(address, procs, on_path, replica, torchrun, None)
    await bootstrap()


_TIES = (hold_on, _hold_on, _hold_on_async, _hold_on_barely, _hold_on_barely_async)
