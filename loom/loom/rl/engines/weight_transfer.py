"""`WeightTransfer`: tensors of a trainer straight into the workers of a vLLM server, by its weight transfer engine.

The trainer and the workers form a group, in which the trainer is rank 0: by NCCL, vLLM's backend ``nccl``, or on
CPUs by gloo, which a server has by Loom's plugin. The order is ``/init_weight_transfer_engine`` for a new group,
``/start_weight_update``, ``/update_weights`` with names, types and shapes while the trainer broadcasts the tensors,
and ``/finish_weight_update``. They travel in chunks, as in vLLM's packed transfers.

A server that has weights of this process gets only the elements that differ, if these are few and its backend takes
patches: ``gloo`` takes tensors and patches, ``nccl`` only tensors, and ``sparse_nccl`` only patches.

The backends ``nccl`` and ``sparse_nccl`` have never run on a GPU here: none was at hand.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from loom import tracing
from loom.control.address import own_address
from loom.errors import LoomError, OperationFailed, Unavailable, WrongArguments
from loom.process.listen import open_store
from loom.rl.engines import model_folder
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.server_routes import ServerRoutes, ms_since
from loom.rl.engines.sparse_patches import LARGEST, Comparisons, Patches, all_of
from loom.rl.engines.vllm_client import VllmClient, label_of
from loom.rl.generation.interruptible_calls import begin
from loom.rl.generation.weight_client import UpdateAnswer, own_client

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroupGloo

CHUNK = 256 << 20
"""Bytes after which a chunk ends, with the tensor that exceeds them."""
PATIENCE = 120.0
"""Seconds that a group by gloo waits for its members, at its beginning and in each broadcast."""
WORTH = 0.5
"""Patches are sent if they have no more than this share of the bytes of all tensors."""
STUCK = 60.0
"""Seconds without an answer after which a server is lost. By NCCL, it waits for a dead trainer for ever."""
REASON = 3.0
"""Seconds in which a server says why a broadcast to its workers has failed."""
OPERATION = "transfer_weights"


class TransferBackend(str, Enum):
    """vLLM's names of the transfer engines that Loom's trainers know."""

    NCCL = "nccl"
    SPARSE_NCCL = "sparse_nccl"
    GLOO = "gloo"


@dataclass(frozen=True)
class TransferTarget:
    """A vLLM server whose workers get tensors."""

    url: str
    """The URL with its token."""
    pause: PauseMode
    """What happens to completions that are under way."""


class TensorGroup(Protocol):
    """A group of this process, which is rank 0, and a server's workers."""

    def init_info(self) -> Mapping[str, object]:
        """Return what workers need to join, besides the size of chunks."""

    def join(self) -> None:
        """Join the group; return when all have."""

    def send(self, tensor: Tensor) -> None:
        """Broadcast a flat tensor, which is in the CPU's memory; return when it is sent."""

    def close(self) -> None:
        """Leave the group, so that nobody waits for this process any more."""


class GlooBroadcast:
    """A group over TCP. Its end waits for a broadcast that is under way, so the broadcast's thread ends it."""

    def __init__(self, workers: int) -> None:
        self._address = own_address()
        self._store = open_store(self._address)
        self._size = workers + 1
        self._lock = threading.Lock()
        self._group: ProcessGroupGloo | None = None
        self._busy = self._closed = False

    def init_info(self) -> Mapping[str, object]:
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": self._size,
            "timeout_seconds": PATIENCE,
        }

    def join(self) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = timedelta(seconds=PATIENCE)
        with self._at_work():
            self._group = ProcessGroupGloo(self._store, 0, self._size, options)

    def send(self, tensor: Tensor) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        root = BroadcastOptions()
        root.rootRank = 0
        with self._at_work():
            if self._group is None:
                raise OperationFailed("the group has ended")
            self._group.broadcast([tensor.view(torch.uint8)], root).wait()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            self._busy = True
        try:
            yield
        finally:
            with self._lock:
                self._busy = False
                self._group = None if self._closed else self._group

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._group = self._group if self._busy else None


class NcclBroadcast:
    """A group of GPUs: of this process's current one, and those of the workers.

    torch never frees a communicator, so a group is kept for as long as its server has the weights of this process.
    """

    def __init__(self, workers: int) -> None:
        import torch
        from torch.cuda import nccl

        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)  # or training would wait for the workers
        self._size = workers + 1
        self._id: bytes = nccl.unique_id()

    def init_info(self) -> Mapping[str, object]:
        return {
            "nccl_unique_id_b64": base64.b64encode(self._id).decode(),
            "rank_offset": 1,
            "world_size": self._size,
            "packed": True,
        }

    def join(self) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.stream(self._stream):
            self._communicator = nccl.init_rank(self._size, self._id, 0)
            # Each worker's first operation is this one, too.
            nccl.all_reduce([torch.zeros(1, device=self._device)], comms=[self._communicator])
            self._stream.synchronize()

    def send(self, tensor: Tensor) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.stream(self._stream):
            nccl.broadcast([tensor.to(self._device)], comms=[self._communicator])
            self._stream.synchronize()

    def close(self) -> None:
        self._communicator = None  # torch has nothing that ends it


_BROADCASTS: Mapping[TransferBackend, Callable[[int], TensorGroup]] = {
    TransferBackend.NCCL: NcclBroadcast,
    TransferBackend.SPARSE_NCCL: NcclBroadcast,
    TransferBackend.GLOO: GlooBroadcast,
}


def backend_of(config: Mapping[str, Any], server: str) -> TransferBackend:
    """Return the backend by which a server's workers take tensors.

    Args:
        config: the server's ``vllm_config``.
        server: its URL, for errors.

    Raises:
        WrongArguments: they take none, or only in ways that Loom has not.
    """
    name = (config.get("weight_transfer_config") or {}).get("backend")
    on_cpus = (config.get("device_config") or {}).get("device") == "cpu"
    wanted = TransferBackend.GLOO if on_cpus else TransferBackend.NCCL
    if name not in ([TransferBackend.GLOO] if on_cpus else list(TransferBackend)):
        has = "takes no weights by transfer" if name is None else f"takes weights by {name!r}"
        raise WrongArguments(f"{server} {has}: start it with {' '.join(arguments_of(wanted))}, or weights='files'")
    return TransferBackend(name)


def arguments_of(backend: TransferBackend) -> list[str]:
    """Return the arguments of ``vllm serve`` with which workers take tensors by a backend."""
    extension = ["--worker-extension-cls", "loom_gloo.WithGloo"] if backend is TransferBackend.GLOO else []
    return [*extension, "--weight-transfer-config", json.dumps({"backend": backend.value})]


def has_gpu() -> bool:
    """Return whether this process sees a GPU of NVIDIA's."""
    import torch

    return bool(torch.cuda.is_available())


class WeightTransfer:
    """The way of tensors from this process to one server, for one event loop.

    Args:
        target: the server.
        chunk: see `CHUNK`.
    """

    def __init__(self, target: TransferTarget, chunk: int = CHUNK) -> None:
        self._client = VllmClient(own_client(), target.url, mode=target.pause)
        self._chunk = chunk
        self._group: TensorGroup | None = None
        self._backend = TransferBackend.GLOO
        self._label = ""
        """The label of the weights that the server had from this process last."""
        self._base: Mapping[str, Tensor] | None = None
        """These weights, if patches can be sent for them."""
        self._patches: Patches | None = None
        """Those that are sent now; None for all tensors."""
        self.sent = 0
        """The bytes that were sent last, to each worker."""

    async def send(
        self, step: int, tensors: Mapping[str, Tensor], comparisons: Comparisons | None = None
    ) -> UpdateAnswer:
        """Give the server the weights of a step; return how long each phase took.

        Args:
            step: the step of the weights.
            tensors: whole and contiguous ones in the CPU's memory, under the names of the model's files. They do
                not change until other ones were sent.
            comparisons: those of the order, which servers share.

        Raises:
            WrongArguments: the tensors are not of the server's model, or it takes none by transfer. It has not
                paused, and keeps its weights.
            Unavailable: the server may have loaded them in part, and stays paused with the label of broken weights.
        """
        tracing.event("weights.rpc.start", op=OPERATION)
        self._patches = None
        check = functools.partial(self._check, tensors, comparisons or Comparisons())
        answer = await self._client.update(step, check, functools.partial(self._load, step, tensors))
        tracing.event(
            "weights.rpc.done", op=OPERATION, rpc_ms=answer["rpc_ms"], phases=answer["phases"], bytes=self.sent
        )
        return answer

    async def _check(self, tensors: Mapping[str, Tensor], comparisons: Comparisons) -> None:
        """Look whether the server can take the tensors, and whether it is still in this process's group."""
        server = self._client.server
        try:
            label = (await server.get("/weight_info", STUCK))["weight_version"]
        except Unavailable as error:
            raise Unavailable(
                f"{error}: it is gone, or its workers wait in a broadcast of a trainer that has died"
            ) from error
        if label == self._label:
            if self._base is not None:
                whole = sum(one.nbytes for one in tensors.values())
                most = math.inf if self._backend is TransferBackend.SPARSE_NCCL else WORTH * whole
                self._patches = await comparisons.changes_of(self._base, tensors, most)
            return
        self._leave()
        config = (await server.get("/server_info?config_format=json"))["vllm_config"]
        self._backend = backend_of(config, server.shown)
        if self._backend is TransferBackend.NCCL and not has_gpu():
            raise WrongArguments(
                f"{server.shown} takes weights by NCCL, and this process has no GPU: Trainers(gpus=True), or "
                "weights='files'"
            )
        if self._backend is TransferBackend.SPARSE_NCCL:
            _check_for_patches(tensors, server.shown)
        model = str(config["model_config"]["model"])
        if model_folder.is_folder(model):
            shapes = {name: tuple(one.shape) for name, one in tensors.items()}
            await asyncio.to_thread(model_folder.check_same_tensors, model, shapes, "the trainer's weights")

    async def _load(
        self, step: int, tensors: Mapping[str, Tensor], server: ServerRoutes, workers: int, interrupted: bool
    ) -> Mapping[str, float]:
        """Let the server's workers load the tensors; return the milliseconds of each phase."""
        self._label, began = "", time.monotonic()
        try:
            if interrupted:  # only the end of an update puts layers in order that are there in part
                with contextlib.suppress(LoomError):
                    await server.post("/start_weight_update")
                await server.post("/finish_weight_update")
            if self._group is None:
                self._group = _BROADCASTS[self._backend](workers)
                await server.post("/shutdown_weight_transfer_engine")
                init = {**self._group.init_info(), "packed_buffer_size_bytes": self._chunk}
                await _both(server.post("/init_weight_transfer_engine", {"init_info": init}), self._group.join)
            await server.post("/start_weight_update")
            patches = None if interrupted else self._patches
            if patches is None and self._backend is TransferBackend.SPARSE_NCCL:
                patches = all_of(tensors)
            parts = list(tensors if patches is None else patches)
            update: dict[str, object] = {
                "names": parts,
                "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in parts],
                "shapes": [list(tensors[name].shape) for name in parts],
            }
            if patches is None:
                packed = chunks(tensors.values(), self._chunk)
            else:
                update["num_updates_list"] = [len(one.values) for one in patches.values()]
                packed = itertools.chain.from_iterable(one.parts() for one in patches.values())
            self.sent = 0
            if parts:
                broadcast = functools.partial(self._broadcast, self._group, packed)
                await _both(server.post("/update_weights", {"update_info": update}), broadcast)
            transfer_ms = ms_since(began)
            _, load_ms = await server.post_timed("/finish_weight_update")
        except BaseException:
            self._leave()
            raise
        self._label, self._base = label_of(step), None if self._backend is TransferBackend.NCCL else tensors
        return {"transfer_ms": transfer_ms, "load_ms": load_ms}

    def forget_other(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep no other tensors than these: the server is not asked any more, or gets all when it is."""
        if self._base is not tensors:
            self._base = None

    def _broadcast(self, group: TensorGroup, tensors: Iterable[Tensor]) -> None:
        for one in tensors:
            group.send(one)
            self.sent += one.nbytes

    def _leave(self) -> None:
        self._base = None
        if self._group is not None:
            self._group.close()
            self._group = None


def _check_for_patches(tensors: Mapping[str, Tensor], server: str) -> None:
    """Raise `WrongArguments` if vLLM's sparse engine does not write tensors, or not all that was made of them."""
    for name, one in tensors.items():
        if "kv_b_proj" in name:
            why = "is of latent attention (MLA), which would keep matrices computed of the old weights"
        elif not one.is_floating_point() or one.numel() > LARGEST:
            why = f"has {one.numel()} elements of {one.dtype}, and it takes up to {LARGEST} floating-point numbers"
        else:
            continue
        raise WrongArguments(f"not for sparse_nccl: {name} {why}; start {server} with the backend nccl")


async def _both(request: Awaitable[object], work: Callable[[], None]) -> None:
    """Do blocking work while a server does its part; return when both are done.

    Raises:
        LoomError: the server's reason if it gives one, also if the work fails first.
    """
    asked = asyncio.ensure_future(request)
    working = asyncio.wrap_future(begin(work))
    working.add_done_callback(_retrieve)  # it may fail later than the request, when nobody waits for it
    try:
        await asyncio.wait([asked, working], return_when=asyncio.FIRST_EXCEPTION)
        if working.done() and (error := working.exception()) is not None:
            await asyncio.wait([asked], timeout=REASON)
            if asked.done():
                await asked
            if isinstance(error, LoomError):
                raise error
            raise OperationFailed(f"the tensors did not reach its workers: {error}") from error
        await asked
    finally:
        asked.cancel()


def _retrieve(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def chunks(tensors: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Give the bytes of tensors in the CPU's memory, packed as vLLM expects them.

    A chunk ends with the tensor by which it has more than ``size`` bytes.
    """
    import torch

    parts: list[Tensor] = []
    found = 0
    for tensor in tensors:
        parts.append(tensor.contiguous().reshape(-1).view(torch.uint8))
        found += parts[-1].numel()
        if found > size:
            yield torch.cat(parts)
            parts, found = [], 0
    if parts:
        yield torch.cat(parts)
