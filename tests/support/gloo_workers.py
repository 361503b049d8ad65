"""Workers of a stand-in for a vLLM server. They receive tensors by gloo, packed as vLLM packs them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore


class GlooWorker:
    """A worker, which blocks while it joins and receives."""

    def __init__(self, number: int) -> None:
        self._number = number
        self.tensors: dict[str, torch.Tensor] = {}

    def join(self, info: Mapping[str, Any]) -> None:
        timeout = timedelta(seconds=info["timeout_seconds"])
        place = info["master_address"], info["master_port"]
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timeout)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=info["master_address"])]
        options._timeout = timeout
        rank = info["rank_offset"] + self._number
        self._group: Any = ProcessGroupGloo(store, rank, info["world_size"], options)
        self._chunk = info["packed_buffer_size_bytes"]

    def leave(self) -> None:
        self._group = None

    def receive(self, info: Mapping[str, Any]) -> None:
        parts = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        chunk: list[tuple[str, torch.dtype, list[int], int]] = []
        for name, kind, shape in parts:
            dtype = getattr(torch, kind)
            chunk.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
            if sum(one[-1] for one in chunk) > self._chunk:
                self._receive(chunk)
                chunk = []
        if chunk:
            self._receive(chunk)

    def _receive(self, chunk: list[tuple[str, torch.dtype, list[int], int]]) -> None:
        if self._group is None:
            raise RuntimeError("the worker has left the group")
        packed = torch.empty(sum(one[-1] for one in chunk), dtype=torch.uint8)
        root = BroadcastOptions()
        root.rootRank = 0
        self._group.broadcast([packed], root).wait()
        for (name, dtype, shape, _), one in zip(chunk, packed.split([one[-1] for one in chunk]), strict=True):
            self.tensors[name] = one.clone().view(dtype).reshape(shape)
