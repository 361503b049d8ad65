"""Tensors of this process into the workers of the real vLLM, by the transfer engine that Loom's plugin gives it."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from torch import Tensor

import loom
from loom.errors import Unavailable
from loom.rl.arithmetic import SMALL_SERVER
from loom.rl.engines import weight_transfer
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.server_routes import ServerRoutes
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.engines.weight_transfer import (
    PATIENCE,
    GlooBroadcast,
    NcclBroadcast,
    TransferBackend,
    TransferTarget,
    WeightTransfer,
    chunks,
)
from loom.rl.generation import tensor_files
from loom.rl.generation.completions import Completion, Sampling
from loom.rl.generation.tensor_files import same_bits
from loom.rl.models import causal
from tests.support.real_vllm import FOLDER, needs_vllm
from tests.support.vllm_stand_in import StandInServer, served
from tests.system.rl.drawn import logprobs_of
from tests.system.rl.test_real_vllm import PROMPTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_vllm]

CHUNK = 30_000
"""Bytes of a chunk, so that there are many."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(folder: Path) -> AsyncIterator[VllmEngine]:
    options = VllmOptions.of({**SMALL_SERVER, "transfer": True})
    engine = VllmEngine(str(folder / "model"), options, folder=folder)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transfer(vllm: VllmEngine) -> WeightTransfer:
    return WeightTransfer(TransferTarget(vllm.url, PauseMode.WAIT), CHUNK)


def tensors_of(folder: Path, step: int) -> Mapping[str, Tensor]:
    return tensor_files.copied(causal.weights_of(causal.load(folder / f"model_{step}")))


async def complete(vllm: VllmEngine) -> list[Completion]:
    return await vllm.complete(PROMPTS, 1, Sampling(16, 0.0))


def assert_drawn_by(found: list[Completion], folder: Path, step: int) -> None:
    for one in found:
        assert one.weights_step == step
        assert one.logprobs == pytest.approx(logprobs_of(folder / f"model_{step}", one, 1.0), abs=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_tensors_give_the_log_probabilities_that_files_give(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path
) -> None:
    with pytest.raises(Unavailable, match="was given no weights"):
        await complete(vllm)

    by_transfer, by_files = {}, {}
    for step in (1, 2):
        answer = await transfer.send(step, tensors_of(folder, step))
        print(answer)
        by_transfer[step] = await complete(vllm)
    for step in (1, 2):
        await vllm.update_weights(step)
        by_files[step] = await complete(vllm)

    assert answer["phases"].keys() == {"check_ms", "pause_ms", "transfer_ms", "load_ms", "resume_ms"}
    for step in (1, 2):
        assert_drawn_by(by_transfer[step], folder, step)
        for one, other in zip(by_transfer[step], by_files[step], strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert by_transfer[1][0].logprobs != pytest.approx(by_transfer[2][0].logprobs, abs=1e-2)


def send_some(transfer: WeightTransfer, group: Any, tensors: Iterable[Tensor]) -> None:
    for number, one in enumerate(tensors):
        if number == 3:
            raise RuntimeError("no memory")
        group.send(one)


def changed(folder: Path, share: int) -> Mapping[str, Tensor]:
    """Return the tensors of step 1 with other elements at every so-manieth place."""
    tensors = {name: one.clone() for name, one in tensors_of(folder, 1).items()}
    for one in tensors.values():
        one.view(-1)[::share] *= -1.5
    return tensors


async def checksums(vllm: VllmEngine) -> Any:
    """Return those of all parameters, as far as vLLM on CPUs still has them."""
    assert vllm._client is not None
    return (await vllm._client.server.post("/weight_checker", {"action": "checksum"}))["checksums"]


@pytest.mark.asyncio(loop_scope="module")
async def test_patches_give_what_whole_tensors_give(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(one.nbytes for one in tensors_of(folder, 1).values())
    by_patches, by_tensors = [], []
    await transfer.send(1, tensors_of(folder, 1))
    first = await complete(vllm)
    for step, share in ((2, 9), (3, 50)):
        await transfer.send(step, changed(folder, share))
        assert 0 < transfer.sent < whole / 2
        by_patches.append((await complete(vllm), await checksums(vllm)))
    with monkeypatch.context() as patched:
        patched.setattr(WeightTransfer, "_broadcast", send_some)
        with pytest.raises(Unavailable, match="did not load the weights of step 4"):
            await transfer.send(4, changed(folder, 70))
    with pytest.raises(Unavailable, match="has weights with the label 'loom-broken'"):
        await vllm.step()
    for step, share in ((2, 9), (3, 50)):
        other = WeightTransfer(TransferTarget(vllm.url, PauseMode.WAIT), CHUNK)
        await other.send(step, changed(folder, share))
        assert other.sent == whole
        by_tensors.append((await complete(vllm), await checksums(vllm)))

    for (patched_, sums), (given, others) in zip(by_patches, by_tensors, strict=True):
        assert sums == others
        assert [one.tokens for one in patched_] == [one.tokens for one in given]
        assert [one.logprobs for one in patched_] == [one.logprobs for one in given]
        assert given[0].logprobs != pytest.approx(first[0].logprobs, abs=1e-2)
    await transfer.send(1, tensors_of(folder, 1))
    assert_drawn_by(await complete(vllm), folder, 1)


TRAINER = """
import asyncio, os, sys
from pathlib import Path
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.weight_transfer import TransferTarget, WeightTransfer
from tests.system.rl.test_real_vllm_transfer import CHUNK, tensors_of

def dies(transfer, group, tensors):
    for number, one in enumerate(tensors):
        if number == 3:
            os.kill(os.getpid(), int(sys.argv[3]))
        group.send(one)

WeightTransfer._broadcast = dies
transfer = WeightTransfer(TransferTarget(sys.argv[1], PauseMode.WAIT), CHUNK)
asyncio.run(transfer.send(1, tensors_of(Path(sys.argv[2]), 1)))
"""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.guarantees(
    "rl serving", "A trainer that is killed while it broadcasts leaves a server that takes weights"
)
async def test_a_trainer_that_is_killed_while_it_broadcasts_is_noticed(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path
) -> None:
    died = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, vllm.url, str(folder), str(int(signal.SIGKILL))
    )
    assert await asyncio.wait_for(died.wait(), 120) == -signal.SIGKILL

    await asyncio.wait_for(transfer.send(2, tensors_of(folder, 2)), PATIENCE / 2)
    assert_drawn_by(await complete(vllm), folder, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_workers_that_wait_for_a_trainer_that_stands_still_are_named(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a trainer does that has lost its network, or, by NCCL, one that has died."""
    stopped = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, vllm.url, str(folder), str(int(signal.SIGSTOP))
    )
    while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
        assert stopped.returncode is None
        await asyncio.sleep(0.1)
    monkeypatch.setattr(weight_transfer, "STUCK", 10.0)
    with pytest.raises(Unavailable, match="wait in a broadcast of a trainer that has died"):
        await asyncio.wait_for(transfer.send(2, tensors_of(folder, 2)), PATIENCE / 2)

    stopped.kill()
    await stopped.wait()
    await transfer.send(2, tensors_of(folder, 2))
    assert_drawn_by(await complete(vllm), folder, 2)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.guarantees(
    "rl serving", "A server that got a part of the tensors draws nothing until it has all of them"
)
async def test_a_failure_in_the_middle_is_mended_by_the_next_weights(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(WeightTransfer, "_broadcast", send_some)
        with pytest.raises(Unavailable, match="did not load the weights of step 1"):
            await transfer.send(1, tensors_of(folder, 1))
    with pytest.raises(Unavailable, match="has weights with the label 'loom-broken'"):
        await vllm.step()

    await transfer.send(2, tensors_of(folder, 2))
    assert_drawn_by(await complete(vllm), folder, 2)


@pytest.mark.asyncio(loop_scope="module")
async def test_tensors_of_another_model_change_nothing(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path
) -> None:
    await transfer.send(1, tensors_of(folder, 1))
    other = WeightTransfer(TransferTarget(vllm.url, PauseMode.WAIT), CHUNK)
    tensors = {name: one for name, one in tensors_of(folder, 2).items() if "norm" not in name}
    with pytest.raises(loom.WrongArguments, match=r"are not this model's: missing \['model.layers.0.input"):
        await other.send(2, tensors)
    assert_drawn_by(await complete(vllm), folder, 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_slept_draws_nothing_before_it_has_weights_again(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path
) -> None:
    """On CPUs vLLM frees no memory. Its routes are those of GPUs."""
    await transfer.send(1, tensors_of(folder, 1))
    await vllm.sleep()
    await vllm.wake()
    with pytest.raises(Unavailable, match="has weights with the label 'loom-broken'"):
        await vllm.step()
    await vllm.update_weights(2)
    assert_drawn_by(await complete(vllm), folder, 2)


VLLMS_OWN = """
import json, sys, torch
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors
asked = json.load(sys.stdin)
info = NCCLWeightTransferInitInfo(**asked["init_info"])
NCCLWeightTransferUpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[1]])
tensors = iter([(str(n), torch.arange(n, dtype=torch.float32)) for n in asked["sizes"]])
found = []
while (chunk := pack_tensors(tensors, lambda item: item[1], info.packed_buffer_size_bytes)) is not None:
    found.append(bytes(chunk.packed_tensor.tolist()).hex())
print("found", json.dumps([len(info.nccl_unique_id_bytes), info.packed, info.rank_offset, info.world_size, found]))
"""


def test_vllms_engine_for_nccl_understands_what_it_is_told_and_packs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as CPUs go: no NCCL is here."""
    monkeypatch.setattr("torch.cuda.nccl.unique_id", lambda: bytes(range(128)))
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: None)
    sizes, limit = [3, 5, 2, 11, 1, 8, 0, 4], 32
    info = {**NcclBroadcast(2).init_info(), "packed_buffer_size_bytes": limit}

    asked = json.dumps({"init_info": info, "sizes": sizes})
    command = [str(FOLDER / "bin" / "python"), "-c", VLLMS_OWN]
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=True, timeout=300).stdout
    (line,) = (one for one in said.splitlines() if one.startswith("found "))

    tensors = [torch.arange(one, dtype=torch.float32) for one in sizes]
    packed = [bytes(one.tolist()).hex() for one in chunks(tensors, limit)]
    assert json.loads(line.removeprefix("found ")) == [128, True, 1, 3, packed]


VLLMS_SPARSE = """
import contextlib, sys, torch
from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLWeightTransferEngine
held, updates, sent = torch.load(sys.argv[1])
class Group:
    device = torch.device("cpu")
    def broadcast(self, tensor, src, stream):
        came = sent.pop(0)
        assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(came)
class Model(torch.nn.Module):
    def load_weights(self, weights):
        for name, one in weights:
            held[name].copy_(one)
torch.accelerator.device_index = lambda index: contextlib.nullcontext()
torch.cuda.current_stream = lambda device=None: None
engine = object.__new__(SparseNCCLWeightTransferEngine)
engine.model, engine.model_update_group = Model(), Group()
for update in updates:
    engine.receive_weights(engine.parse_update_info(update))
torch.save(held, sys.argv[1])
"""


@pytest.mark.asyncio(loop_scope="module")
async def test_vllms_engine_for_sparse_transfers_makes_the_same_tensors_of_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as CPUs go: what is sent to a stand-in is given to vLLM's own engine, in the place of NCCL."""
    sent: list[Tensor] = []
    updates: list[Any] = []

    class Recorded(GlooBroadcast):
        def send(self, tensor: Tensor) -> None:
            sent.append(tensor.clone())
            super().send(tensor)

    async def post(routes: ServerRoutes, path: str, body: Any = None) -> dict[str, Any]:
        updates.extend([body["update_info"]] if path == "/update_weights" else [])
        return await plain(routes, path, body)

    plain = ServerRoutes.post
    monkeypatch.setattr(ServerRoutes, "post", post)
    monkeypatch.setitem(weight_transfer._BROADCASTS, TransferBackend.SPARSE_NCCL, Recorded)
    monkeypatch.setattr(weight_transfer, "has_gpu", lambda: True)
    first = {"wide": torch.randn(7, 30).bfloat16(), "scale": torch.tensor(2.0), "still": torch.ones(3)}
    second = {**first, "wide": first["wide"].clone(), "scale": torch.tensor(-0.0)}
    second["wide"][3, ::4] = 0.25
    with served(StandInServer(model="small", backend="sparse_nccl", device="cuda")) as url:
        transfer = WeightTransfer(TransferTarget(url, PauseMode.WAIT))
        await transfer.send(1, first)
        await transfer.send(2, second)

    assert [one["num_updates_list"] for one in updates] == [[210, 1, 3], [8, 1]]
    file = tmp_path / "sent"
    torch.save(({name: torch.zeros_like(one) for name, one in first.items()}, updates, sent), file)
    await asyncio.to_thread(
        subprocess.run, [str(FOLDER / "bin" / "python"), "-c", VLLMS_SPARSE, str(file)], check=True, timeout=300
    )
    for name, one in torch.load(file).items():
        assert same_bits(one, second[name]), name
