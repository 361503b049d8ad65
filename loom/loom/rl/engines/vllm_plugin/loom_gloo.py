"""A weight transfer engine for vLLM's workers on CPUs: tensors come from a trainer by gloo.

vLLM's own transfer engines need GPUs. A worker imports this file as its extension, which registers the engine::

    PYTHONPATH=FOLDER_OF_THIS_FILE vllm serve MODEL --worker-extension-cls loom_gloo.WithGloo \
        --weight-transfer-config '{"backend": "gloo"}'

The protocol is that of vLLM's packed transfers by NCCL, with a store of torch's to meet at. Elements that have
changed come as in vLLM's sparse transfers, which write them into the parameters. On CPUs vLLM has these in other
forms, so a worker keeps the trainer's tensors, changes them, and loads them again.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The place where the workers meet the trainer, which is rank 0."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed_buffer_size_bytes: int
    timeout_seconds: float


@dataclass
class GlooUpdateInfo(NCCLWeightTransferUpdateInfo):  # type: ignore[misc]
    """Tensors that come whole, or in patches."""

    num_updates_list: list[int] | None = None
    """The number of elements in the patch of each tensor."""


class GlooTransferEngine(NCCLWeightTransferEngine):  # type: ignore[misc]
    """vLLM's engine for NCCL, with gloo in its place."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tensors: dict[str, torch.Tensor] = {}  # those of the trainer, by name

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group."""
        self.shutdown()
        timeout = timedelta(seconds=init_info.timeout_seconds)
        place = init_info.master_address, init_info.master_port
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timeout)
        with socket.create_connection(place, init_info.timeout_seconds) as route:
            own_address = route.getsockname()[0]
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timeout
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.model_update_group = ProcessGroupGloo(store, rank, init_info.world_size, options)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive tensors, where vLLM's own method waits for a GPU. A worker that fails leaves the group."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self.shutdown()  # or the trainer would wait until its time is over
            raise

    def receive_weights(self, update_info: Any) -> None:
        """Receive tensors or patches, and let the model load them."""
        if self.model_update_group is None:
            raise RuntimeError("no trainer has formed a group with this worker")
        with disable_mtp_completeness_check():
            if update_info.num_updates_list is None:
                self._receive_tensors(update_info)
            else:
                self._receive_patches(update_info)

    def _receive_tensors(self, update_info: Any) -> None:
        """Receive tensors chunk by chunk, and let the model load each chunk."""
        chunk: list[tuple[str, list[int], torch.dtype, int]] = []
        size = 0
        for name, kind, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            dtype = getattr(torch, kind)
            chunk.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
            size += chunk[-1][-1]
            if size > self.packed_buffer_size_bytes:
                self._receive_chunk(chunk, size)
                chunk, size = [], 0
        if chunk:
            self._receive_chunk(chunk, size)

    def _receive_chunk(self, chunk: list[tuple[str, list[int], torch.dtype, int]], size: int) -> None:
        packed = self._receive(size, torch.uint8)
        names, shapes, dtypes, sizes = map(list, zip(*chunk, strict=True))
        tensors = unpack_tensor(packed, names, shapes, dtypes, sizes)
        self._tensors.update(tensors)
        self.model.load_weights(tensors)

    def _receive_patches(self, update_info: Any) -> None:
        """Receive all patches, and let the model load all tensors with them."""
        kinds = [getattr(torch, kind) for kind in update_info.dtype_names]
        parts = zip(update_info.names, kinds, update_info.num_updates_list, strict=True)
        received = [(name, self._receive(n, torch.int32), self._receive(n, kind)) for name, kind, n in parts]
        for name, indices, values in received:
            self._tensors[name].view(-1).index_copy_(0, indices.long(), values)
        self.model.load_weights(self._tensors.items())

    def _receive(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return as many elements, which the trainer broadcasts."""
        received = torch.empty(count, dtype=dtype)
        root = BroadcastOptions()
        root.rootRank = 0
        self.model_update_group.broadcast([received.view(torch.uint8)], root).wait()
        return received

    def shutdown(self) -> None:
        """Leave the group, and forget what came from it."""
        self.model_update_group, self._tensors = None, {}


class WithGloo:
    """An extension of workers that adds nothing but this file's engine."""


WeightTransferEngineFactory.register_engine("gloo", GlooTransferEngine)
