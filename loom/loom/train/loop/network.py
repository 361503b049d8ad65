"""torchft's process groups, manager and stores at this host's address.

torchft gives peers this host's name, which other pods usually cannot resolve, and listens on every address. None of
its servers asks for a key, nor does torch's store.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torchft.manager
import torchft.process_group
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store

from loom.process.listen import bracketed
from loom.process.rendezvous import open_store

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
