"""`Membership`: a process's membership among all groups, by torchft's manager.

torchft's process groups, manager and stores at this host's address.

torchft gives peers this host's name, which other pods usually cannot resolve, and listens on every address. None of
its servers asks for a key, nor does torch's store.
"""

from __future__ import annotations

import concurrent.futures.thread
import functools
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torchft.manager
import torchft.process_group
from torch.distributed import ProcessGroup, ProcessGroupGloo, ReduceOp, Store, TCPStore
from torchft.manager import Manager

from loom.errors import FaultRefused
from loom.process.listen import address_towards, bracketed, open_store
from loom.process.threads import DaemonExecutor
from loom.train.loop.peer_transport import PeerTransport
from loom.train.loop.training_state import TrainingState, local

_ManagerServer = torchft.manager.ManagerServer


def _manager_at(*, hostname: str, bind: str, **options: Any) -> Any:
    """Return torchft's manager server, which would listen on every address of this machine, on its own address."""
    return _ManagerServer(hostname=hostname, bind=f"{bracketed(hostname)}:{bind.rpartition(':')[2]}", **options)


torchft.manager.ManagerServer = _manager_at


class _Addressed:
    """A base class, before torchft's own, for a group whose store is found by an address."""

    _rendezvous_store: Any
    _global_rank: Any
    _handle_id: Any

    def __init__(self, own_address: str, timeout: float) -> None:
        super().__init__(timedelta(seconds=timeout))  # type: ignore[call-arg]
        self.own_address = own_address

    def get_reconfigure_handle(self) -> str:
        """Return the handle by which peers find this member: torchft's own, with the address for the name."""
        if self._rendezvous_store is None:
            self._rendezvous_store = open_store(self.own_address)
        store = f"{self.own_address}:{self._rendezvous_store.port}"
        return json.dumps({"id": self._handle_id(), "store": store, "global_rank": self._global_rank})


class GlooGroup(_Addressed, torchft.process_group.ProcessGroupGloo):  # type: ignore[misc]
    """The processes of all groups with the same rank, over TCP."""

    def _create_pg(self, store: Store, rank: int, world_size: int) -> ProcessGroup:
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self.own_address)]
        options._timeout = self._timeout
        options._threads = 2
        backend = ProcessGroupGloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        group = ProcessGroup(store, rank, world_size)
        group._set_default_backend(ProcessGroup.BackendType.GLOO)
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        for device in devices:
            group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
        return group


class NcclGroup(_Addressed, torchft.process_group.ProcessGroupNCCL):  # type: ignore[misc]
    """The processes of all groups with the same rank, over NCCL."""


_log = logging.getLogger("loom")

RETRY_EVERY = 0.2  # seconds between two attempts to join a quorum


def process_ends() -> bool:
    """Return whether this process ends in order, so that no thread can begin anything any more."""
    # Executors end first, and then the main thread counts as dead.
    return concurrent.futures.thread._shutdown or not threading.main_thread().is_alive()


class _Moved(Exception):
    """The lighthouse is another one now."""


class _Manager(Manager):  # type: ignore[misc]
    """torchft's manager, whose wait for a quorum ends when the lighthouse has moved.

    A lighthouse that was lost with its host refuses nothing: the wait would last for `Timeouts.quorum`, and whoever
    waits would be taken for stuck.
    """

    def __init__(self, moved: Future[None], **options: Any) -> None:
        super().__init__(**options)
        self._moved = moved
        self._executor = DaemonExecutor("quorum")  # the process's end does not wait for its threads

    def wait_quorum(self) -> None:
        found: Future[None] | None = self._quorum_future  # type: ignore[has-type]
        if found is not None and not found.done():
            done, _ = concurrent.futures.wait((found, self._moved), return_when=FIRST_COMPLETED)
            if found not in done:
                self._quorum_future = None
                raise _Moved
        super().wait_quorum()


class Membership:
    """The training groups, as one of their processes sees them.

    Each lighthouse has a manager of its own, made when the lighthouse has moved. ``attend`` is called before each
    further attempt to join a quorum; an exception of it ends the training.
    """

    def __init__(self, state: TrainingState, attend: Callable[[], None]) -> None:
        self._state = state
        self._attend = attend
        self._moved: Future[None] = Future()
        """Done when the manager's lighthouse is no longer that of the job."""
        self._lock = threading.Lock()
        self._lighthouse = state.assignment.lighthouse
        self._behind = False  # whether the groups at the lighthouse to move to have a state to take over
        self._generation = 0  # the number of managers so far
        self._alone = False  # whether the last attempt to join a quorum failed
        self._manager = self._join(state.report.step)

    def move(self, lighthouse: str, behind: bool) -> None:
        """Move to another lighthouse before the next step; a wait at this one ends. Any thread may call.

        ``behind``: the groups there have gone on without this one, which takes over their state even if it has made
        more steps meanwhile.
        """
        with self._lock:
            self._behind = behind
            self._lighthouse = lighthouse
            if not self._moved.done():
                self._moved.set_result(None)

    def _join(self, step: int) -> Manager:
        """Return a manager that counts from a step: of two groups, the one ahead gives the other its state."""
        state, assignment, job = self._state, self._state.assignment, self._state.job
        lighthouse = urlsplit(self._lighthouse)
        own_address = address_towards(lighthouse.hostname or "", lighthouse.port or 80)
        timeouts = job.timeouts
        group = (NcclGroup if job.backend == "nccl" else GlooGroup)(own_address, timeouts.collective)
        host, port = assignment.store
        self._generation += 1
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        # The store has the first member's manager under a fixed key, which may still hold the previous manager.
        ready = f"loom/manager/{self._generation}"
        if state.rank > 0:
            # The first member may still wait for gradients, as of a group that was lost with the lighthouse.
            store.wait([ready], timedelta(seconds=timeouts.collective + timeouts.connect))
        manager = _Manager(
            self._moved,
            pg=group,
            load_state_dict=state.take_from_peer,
            state_dict=functools.partial(state.save, local),
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timedelta(seconds=timeouts.collective),
            quorum_timeout=timedelta(seconds=timeouts.quorum),
            connect_timeout=timedelta(seconds=timeouts.connect),
            rank=state.rank,
            world_size=job.members,
            store_addr=host,
            store_port=port,
            lighthouse_addr=self._lighthouse,
            replica_id=assignment.replica,
            hostname=own_address,
            checkpoint_transport=PeerTransport(own_address, assignment.key, timeouts.collective),
        )
        store.set(ready, "")
        manager.load_state_dict({"step": step, "batches_committed": 0})
        return manager

    @property
    def place(self) -> tuple[int, int]:
        """(number of this group, count of groups) among the participants of this step."""
        return self._manager.participating_rank() or 0, max(1, self._manager.num_participants())

    def gather(self) -> None:
        """Wait for the other groups; a group that is behind takes over their state."""
        step = self._manager.current_step()  # a quorum that is left behind may still change it
        while True:
            if self._alone:
                self._attend()
            if self._moved.done():
                with self._lock:
                    self._moved = Future()
                    step = 0 if self._behind else step
                self._manager.shutdown(wait=False)
                self._manager = self._join(step)
            try:
                self._manager.start_quorum()
            except _Moved:
                continue
            except (RuntimeError, TimeoutError) as error:  # the lighthouse is away, or no group comes
                if process_ends():
                    raise SystemExit from None  # ends this thread, without a word
                # Otherwise the manager raises this failure for ever (torchft-nightly 2026.10: ``start_quorum``).
                self._manager._quorum_future = None
                if not self._alone:
                    self._alone = True
                    _log.warning("%s has no quorum, and tries again: %s", self._state.assignment.replica, error)
                time.sleep(RETRY_EVERY)
                continue
            self._alone = False
            return

    def average(self, flat: torch.Tensor, row: list[float]) -> list[list[float]]:
        """Replace a tensor by the mean of all groups; return all rows. Both count only if `commit` is true."""
        place, of = self.place
        rows = torch.zeros(of, len(row), dtype=torch.float64, device=flat.device)
        rows[place] = torch.tensor(row, dtype=torch.float64)
        works = [self._manager.allreduce(rows, reduce_op=ReduceOp.SUM), self._manager.allreduce(flat)]
        for work in works:
            work.wait()
        exchanged: list[list[float]] = rows.tolist()
        return exchanged

    def commit(self) -> bool:
        """Return whether all members of this group are able to apply the step."""
        return bool(self._manager.should_commit())

    def abort(self) -> None:
        """Break the connections with the other groups, as an injected fault.

        Raises:
            FaultRefused: there are no others.
        """
        if not self.break_off():
            raise FaultRefused("no other group is connected with this one")

    def break_off(self) -> bool:
        """Break the connections with the other groups; return whether there were any. Any thread may call.

        Waits for another group fail at once, and the next quorum is of the groups that come to it.
        """
        from loom.chaos.training_faults import abort

        group = self._manager._pg._pg
        if group is None or group.size() < 2:
            return False
        abort(group)
        return True

    def leave(self) -> None:
        self._manager.shutdown(wait=False)
