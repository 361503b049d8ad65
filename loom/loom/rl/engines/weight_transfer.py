"""`WeightTransfer`: tensors of a trainer straight into the workers of a vLLM server, by its weight transfer engine.

The trainer and the workers form a group, in which the trainer is rank 0: by NCCL, vLLM's backend ``nccl``, or on
CPUs by gloo, which a server has by Loom's plugin. The order is ``/init_weight_transfer_engine`` for a new group,
``/start_weight_update``, ``/update_weights`` with names, types and shapes while the trainer broadcasts the tensors,
and ``/finish_weight_update``. They travel in chunks, as in vLLM's packed transfers.

The backend ``nccl`` has never run on a GPU here: none was at hand.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from loom import tracing
from loom.control.address import own_address
from loom.errors import LoomError, OperationFailed, WrongArguments
from loom.process.listen import open_store
from loom.rl.engines import model_folder
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.server_routes import ServerRoutes, ms_since
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
REASON = 3.0
"""Seconds in which a server says why a broadcast to its workers has failed."""
OPERATION = "transfer_weights"


class TransferBackend(str, Enum):
    """vLLM's names of the transfer engines that Loom's trainers know."""

    NCCL = "nccl"
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

    def send(self, packed: Tensor) -> None:
        """Broadcast bytes, which are in the CPU's memory; return when they are sent."""

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

    def send(self, packed: Tensor) -> None:
        from torch.distributed import BroadcastOptions

        root = BroadcastOptions()
        root.rootRank = 0
        with self._at_work():
            if self._group is None:
                raise OperationFailed("the group has ended")
            self._group.broadcast([packed], root).wait()

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

    def send(self, packed: Tensor) -> None:
        import torch
        from torch.cuda import nccl

        with torch.cuda.stream(self._stream):
            nccl.broadcast([packed.to(self._device)], comms=[self._communicator])
            self._stream.synchronize()

    def close(self) -> None:
        self._communicator = None  # torch has nothing that ends it


_BROADCASTS: Mapping[TransferBackend, Callable[[int], TensorGroup]] = {
    TransferBackend.NCCL: NcclBroadcast,
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
    if name not in [wanted.value, TransferBackend.GLOO.value]:
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

    async def send(self, step: int, tensors: Mapping[str, Tensor]) -> UpdateAnswer:
        """Give the server the weights of a step; return how long each phase took.

        Args:
            step: the step of the weights.
            tensors: whole ones, under the names of the model's files.

        Raises:
            WrongArguments: the tensors are not of the server's model, or it takes none by transfer. It has not
                paused, and keeps its weights.
            Unavailable: the server may have loaded them in part, and stays paused with the label of broken weights.
        """
        tracing.event("weights.rpc.start", op=OPERATION)
        check = functools.partial(self._check, tensors)
        answer = await self._client.update(step, check, functools.partial(self._load, step, tensors))
        tracing.event("weights.rpc.done", op=OPERATION, rpc_ms=answer["rpc_ms"], phases=answer["phases"])
        return answer

    async def _check(self, tensors: Mapping[str, Tensor]) -> None:
        """Look whether the server can take the tensors, and whether it is still in this process's group."""
        server = self._client.server
        label = (await server.get("/weight_info"))["weight_version"]
        if label == self._label:
            return
        self._leave()
        config = (await server.get("/server_info?config_format=json"))["vllm_config"]
        self._backend = backend_of(config, server.shown)
        if self._backend is TransferBackend.NCCL and not has_gpu():
            raise WrongArguments(
                f"{server.shown} takes weights by NCCL, and this process has no GPU: Trainers(gpus=True), or "
                "weights='files'"
            )
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
            update = {
                "names": list(tensors),
                "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
                "shapes": [list(one.shape) for one in tensors.values()],
            }
            broadcast = functools.partial(_broadcast, self._group, tensors.values(), self._chunk)
            await _both(server.post("/update_weights", {"update_info": update}), broadcast)
            transfer_ms = ms_since(began)
            _, load_ms = await server.post_timed("/finish_weight_update")
        except BaseException:
            self._leave()
            raise
        self._label = label_of(step)
        return {"transfer_ms": transfer_ms, "load_ms": load_ms}

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


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


def _broadcast(group: TensorGroup, tensors: Iterable[Tensor], chunk: int) -> None:
    for packed in chunks(tensors, chunk):
        group.send(packed)


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
