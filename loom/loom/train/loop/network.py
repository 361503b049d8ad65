"""torchft's process groups and transport, with this host's address instead of its name.

torchft gives peers this host's name, which other pods usually cannot resolve.
"""

from __future__ import annotations

import json
import warnings
from datetime import timedelta
from typing import Any

import torch
import torchft.process_group
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torchft.checkpointing.http_transport import HTTPTransport

# torch warns that the state of a peer is read-only, but nothing writes to it.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


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
            self._rendezvous_store = TCPStore(self.own_address, 0, is_master=True, wait_for_workers=False)
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


class PeerTransport(HTTPTransport[dict[str, Any]]):  # type: ignore[misc]
    """The transport of the state from a training group to a joining one."""

    def __init__(self, own_address: str, timeout: float) -> None:
        self.own_address = own_address
        super().__init__(timedelta(seconds=timeout), num_chunks=0)
        # It would write a line to stderr for each request.
        self._server.RequestHandlerClass.log_message = lambda *_: None

    def address(self) -> str:
        """Return the URL of the state."""
        port = self._server.socket.getsockname()[1]
        return f"http://{self.own_address}:{port}/checkpoint/"
