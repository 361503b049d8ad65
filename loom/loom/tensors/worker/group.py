"""The processes of a mesh as a group of torch's, over which tensors are spread."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import DeviceMesh, ProcessGroupGloo, TCPStore

from loom.control.address import own_address
from loom.process.listen import open_store

PATIENCE = 300.0
"""Seconds that a process waits for the others in an operation on tensors that are spread."""

_GLOO = "loom_gloo"

_OURS = "another group's lazy tensors, or a program's own torch.distributed, have these processes"


class Group:
    """This process's part in the group of its mesh. Until `join` it takes no part, and why is its ``problem``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: TCPStore | None = None
        self._made: set[str] = set()
        """The sockets that this process got when it joined. If one is of something else, that connects again."""
        self.mesh: DeviceMesh | None = None
        self.problem = "these processes have not become a group, over which tensors are spread"

    def meet(self) -> tuple[str, int]:
        """Return where the processes find each other: a store at this host's address, which this process keeps."""
        address = own_address()
        if self._store is None:
            self._store = open_store(address)
        return address, self._store.port

    def join(self, store: tuple[str, int], rank: int, sizes: Mapping[str, int]) -> None:
        """Take part, once. An error is the ``problem``.

        Args:
            store: what `meet` has returned in the first process.
            rank: of this process.
            sizes: the processes in each dimension of the mesh, of more than one.
        """
        if self.mesh is not None:
            return
        before = set(_sockets())
        try:
            self.mesh = self._joined(store, rank, sizes)
        except Exception as error:  # noqa: BLE001 - whoever needs the group is told
            self.problem = f"the processes did not become a group: {error}"
        self._made = set(_sockets()) - before

    def leave(self, why: str) -> None:
        """Take no part any more, so that no other process waits for this one."""
        if self.mesh is None:
            return
        self.mesh, self._store = None, None
        self.problem = f"the processes are no group any more: {why}"
        if self._device.type == "cuda":
            distributed.distributed_c10d._abort_process_group()
        else:
            distributed.destroy_process_group()
        # Gloo cannot be told to close its connections, and closes them when nothing of torch refers to it any more.
        for name, number in _sockets().items():
            if name in self._made:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        connection.shutdown(socket.SHUT_RDWR)

    def _joined(self, store: tuple[str, int], rank: int, sizes: Mapping[str, int]) -> DeviceMesh:
        if distributed.is_initialized():
            raise RuntimeError(f"{_OURS}: spawn others for tensors with placements")
        if _GLOO not in distributed.Backend.backend_list:
            distributed.Backend.register_backend(_GLOO, _gloo, devices=["cpu"])
        cuda = self._device.type == "cuda"
        meeting = self._store or TCPStore(*store, is_master=False, wait_for_workers=False)
        size = math.prod(sizes.values())
        if cuda:
            torch.cuda.set_device(self._device)
            meeting.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(self._device).uuid))
            check_gpus([meeting.get(f"gpu/{other}").decode() for other in range(size)])
        distributed.init_process_group(
            f"cpu:{_GLOO},cuda:nccl" if cuda else f"cpu:{_GLOO}",
            store=meeting,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=PATIENCE),
        )
        return distributed.init_device_mesh(self._device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def check_gpus(uuids: Sequence[str]) -> None:
    """Check that each process has a GPU of its own, as NCCL wants it; gloo has no operations for tensors on GPUs.

    Raises:
        RuntimeError: two have the same.
    """
    for rank, uuid in enumerate(uuids):
        if uuid in uuids[:rank]:
            raise RuntimeError(
                f"processes {uuids.index(uuid)} and {rank} share the GPU {uuid}, and NCCL spreads tensors over "
                "processes with a GPU each: spawn no more than there are GPUs, or use loom.tensors.on(procs, "
                'device="cpu")'
            )


def _sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets by what the kernel calls these."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if (link := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                found[link] = int(name)
    return found


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupGloo:
    """Return gloo at this host's address towards the weaver; its own choice is whatever the host's name means."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=own_address())]
    options._timeout = timeout
    options._threads = 2
    return ProcessGroupGloo(store, rank, size, options)
