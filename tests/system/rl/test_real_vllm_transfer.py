"""Tensors of this process into the workers of the real vLLM, by the transfer engine that Loom's plugin gives it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

import loom
from loom.errors import Unavailable
from loom.rl.arithmetic import SMALL_SERVER
from loom.rl.engines import weight_transfer
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.engines.weight_transfer import NcclBroadcast, TransferTarget, WeightTransfer, chunks
from loom.rl.generation import tensor_files
from loom.rl.generation.completions import Completion, Sampling
from loom.rl.models import causal
from tests.support.real_vllm import FOLDER, needs_vllm
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


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.guarantees(
    "rl serving", "A server that got a part of the tensors draws nothing until it has all of them"
)
async def test_a_failure_in_the_middle_is_mended_by_the_next_weights(
    vllm: VllmEngine, transfer: WeightTransfer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_some(group: Any, tensors: Iterable[Tensor], chunk: int) -> None:
        for number, packed in enumerate(chunks(tensors, chunk)):
            if number == 3:
                raise RuntimeError("no memory")
            group.send(packed)

    with monkeypatch.context() as patched:
        patched.setattr(weight_transfer, "_broadcast", send_some)
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
