"""Workers of a stand-in for a vLLM server. They receive tensors by gloo, packed as vLLM packs them, or patches."""

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
        if self._group is None:
            raise RuntimeError("the worker has left the group")
        kinds = [getattr(torch, kind) for kind in info["dtype_names"]]
        if "num_updates_list" in info:
            for name, dtype, shape in zip(info["names"], kinds, info["shapes"], strict=True):
                self.tensors.setdefault(name, torch.zeros(shape, dtype=dtype))
            self._receive_patches(info["names"], kinds, info["num_updates_list"])
            return
        chunk: list[tuple[str, torch.dtype, list[int], int]] = []
        for name, dtype, shape in zip(info["names"], kinds, info["shapes"], strict=True):
            chunk.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
            if sum(one[-1] for one in chunk) > self._chunk:
                self._receive_chunk(chunk)
                chunk = []
        if chunk:
            self._receive_chunk(chunk)

    def _receive_patches(self, names: list[str], kinds: list[torch.dtype], counts: list[int]) -> None:
        for name, dtype, count in zip(names, kinds, counts, strict=True):
            indices, values = self._receive(count, torch.int32), self._receive(count, dtype)
            self.tensors[name].view(-1)[indices.long()] = values

    def _receive_chunk(self, chunk: list[tuple[str, torch.dtype, list[int], int]]) -> None:
        sizes = [one[-1] for one in chunk]
        packed = self._receive(sum(sizes), torch.uint8)
        for (name, dtype, shape, _), one in zip(chunk, packed.split(sizes), strict=True):
            self.tensors[name] = one.clone().view(dtype).reshape(shape)

    def _receive(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        received = torch.empty(count, dtype=dtype)
        root = BroadcastOptions()
        root.rootRank = 0
        self._group.broadcast([received.view(torch.uint8)], root).wait()
        return received
