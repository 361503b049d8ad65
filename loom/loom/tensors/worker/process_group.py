"""The processes of a mesh as a process group of torch's, and the tensors that are spread over it.

A spread tensor is torch's `DTensor`, of which each process has a part. Each process has a plain tensor whole.
"""

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
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from loom.control.address import own_address
from loom.process.listen import open_store
from loom.tensors.layouts import contiguous_strides
from loom.tensors.placements import WHOLE

SENT = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""The types that gloo sends; NCCL sends more."""


def whole(value: Any) -> Any:
    """Return all of a tensor, with the strides that it would have in one process."""
    if not isinstance(value, DTensor):
        return value
    if value.dtype.is_complex:
        return torch.view_as_complex(whole(of_parts(value, torch.view_as_real(own_part(value).resolve_conj()), 2)))
    if value.dtype not in SENT:
        return whole(of_parts(value, own_part(value).to(torch.int64))).to(value.dtype)
    if torch.is_grad_enabled() and value.requires_grad:
        return _Whole.apply(value)
    return _as_strided(value.redistribute(placements=[Replicate()] * value.device_mesh.ndim))


class _Whole(torch.autograd.Function):  # type: ignore[misc]
    """All of a tensor. Its gradient may be missing, for which `DTensor.redistribute` fails (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, value: DTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.placements = value.device_mesh, value.placements
        plain: torch.Tensor = whole(value.detach())
        return plain.data  # no view, in place of which torch would let nothing change

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> DTensor | None:
        if grad is None:
            return None
        return cut(grad, ctx.mesh, [Replicate() if each.is_partial() else each for each in ctx.placements])


def of_parts(like: DTensor, part: torch.Tensor, *more: int) -> DTensor:
    """Return a tensor that is spread as another, of this process's part; it may have one more dimension."""
    shape = (*like.shape, *more)
    strides = contiguous_strides(shape) if more else like.stride()
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def as_torch(packed: Sequence[int]) -> list[Placement]:
    """Return placements that have travelled as torch's."""
    return [Replicate() if each == WHOLE else Shard(each) for each in packed]


def in_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in row-major order, with the strides of that also where the size is 1, or 0."""
    made = tensor.contiguous()
    strides = contiguous_strides(tuple(made.shape))
    if made.stride() == strides:
        return made
    if not isinstance(made, DTensor):
        return made.clone(memory_format=torch.contiguous_format)
    part, how = own_part(made), (made.device_mesh, made.placements)
    return DTensor.from_local(part, *how, run_check=False, shape=made.shape, stride=strides)


def cut(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return the parts of a tensor that every process has whole; nothing is sent, but for gradients."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: DTensor = _Cut.apply(tensor, mesh, placements)
        return found
    return distribute_tensor(tensor.detach(), mesh, placements, src_data_rank=None)


class _Cut(torch.autograd.Function):  # type: ignore[misc]
    """The parts of a tensor. Gradients of its gradients get lost in `DTensor.redistribute` (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
        ctx.set_materialize_grads(False)
        whole_everywhere = all(isinstance(each, Replicate) for each in placements)
        found: DTensor = everywhere(tensor, mesh) if whole_everywhere else cut(tensor, mesh, placements)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        return whole(grad), None, None


def everywhere(value: Any, mesh: DeviceMesh) -> Any:
    """Return a plain tensor as one that each process has whole."""
    if isinstance(value, DTensor) or not isinstance(value, torch.Tensor):
        return value
    if torch.is_grad_enabled() and value.requires_grad:
        return _Cut.apply(value, mesh, [Replicate()] * mesh.ndim)
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_spread(value: Any) -> bool:
    """Whether some dimension of the mesh cuts a tensor."""
    return isinstance(value, DTensor) and not all(isinstance(each, Replicate) for each in value.placements)


def has_empty_part(value: Any) -> bool:
    """Whether a process has no element of a tensor.

    There calls may fail that go well elsewhere; `DTensor` may never return from a view (torch 2.13: `view_groups`).
    """
    if isinstance(value, torch.Tensor) and 0 in value.shape:
        return True
    if not isinstance(value, DTensor):
        return False
    processes: dict[int, int] = {}
    for size, placement in zip(value.device_mesh.shape, value.placements, strict=True):
        if isinstance(placement, Shard):
            processes[placement.dim] = processes.get(placement.dim, 1) * size
    shape = value.shape
    return any(
        -(-shape[dimension] // many) * (many - 1) >= shape[dimension] for dimension, many in processes.items()
    )


def settled(value: Any) -> Any:
    """Add up partial sums, and make what no dimension cuts plain."""
    if isinstance(value, (tuple, list)):
        return tuple(map(settled, value))
    if not isinstance(value, DTensor):
        return value
    placements = [Replicate() if isinstance(each, Partial) else each for each in value.placements]
    if torch.is_grad_enabled() and value.requires_grad and all(isinstance(each, Replicate) for each in placements):
        return whole(value)
    if placements != list(value.placements):
        value = value.redistribute(placements=placements)
    return value if is_spread(value) else _as_strided(value)


def _as_strided(value: DTensor) -> torch.Tensor:
    part: torch.Tensor = own_part(value)
    strides = value.stride()
    if part.stride() == strides:
        return part
    once = part
    for dimension, step in enumerate(strides):
        once = once.narrow(dimension, 0, 1) if step == 0 and part.shape[dimension] > 1 else once
    try:
        return once.new_empty_strided(once.shape, strides).copy_(once).expand(part.shape)
    except RuntimeError:  # elements share memory in another way
        return part


def own_part(value: Any) -> Any:
    """Return this process's part of a tensor; all of a plain one. Gradients pass through it."""
    if not isinstance(value, DTensor):
        return value
    if torch.is_grad_enabled() and value.requires_grad:
        return value.to_local()
    local = value._local_tensor
    return local.wait() if hasattr(local, "wait") else local


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
