"""Tensors from this process into the workers of a vLLM server: of a stand-in, whose workers take them by gloo."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

import loom
from loom import tracing
from loom.errors import Unavailable
from loom.rl.arithmetic import Characters
from loom.rl.engines import sparse_patches, weight_transfer
from loom.rl.engines.engine import PauseMode
from loom.rl.engines.sparse_patches import Comparisons
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.engines.vllm_client import BROKEN
from loom.rl.engines.weight_transfer import (
    GlooBroadcast,
    NcclBroadcast,
    TransferBackend,
    TransferTarget,
    WeightTransfer,
    chunks,
)
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Sampling
from loom.rl.settings import TrainerRun, Trainers, Weights
from loom.rl.trainer import Trainer, _sent
from tests.support.vllm_stand_in import StandInServer, served

GREEDY = Sampling(4, temperature=0.0)
CHUNK = 40
"""Bytes of a chunk: some tensors are in one with others, and some are larger."""
SHAPES = {"head": (4, 5), "layer.0": (2, 3), "layer.1": (1, 2), "scale": ()}


def tensors_of(step: int, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {"step": torch.full((2,), float(step)), **made, "half": torch.ones(3, dtype=torch.bfloat16), **others}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return weights.save(tensors_of(0), {"model_type": "small", "vocab_size": 300}, tmp_path / "models", 0)


@pytest.fixture
def server(model: Path) -> StandInServer:
    return StandInServer(model=str(model), key="secret", backend="gloo", workers=2)


@pytest.fixture
def url(server: StandInServer) -> Iterator[str]:
    with served(server) as made:
        yield made


@pytest.fixture
def transfer(url: str) -> WeightTransfer:
    return WeightTransfer(TransferTarget(url, PauseMode.WAIT), CHUNK)


@contextlib.asynccontextmanager
async def engine_of(url: str, model: Path) -> Any:
    engine = VllmEngine(str(model), VllmOptions.of({"url": url, "transfer": True}))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loom.rl.engines.vllm.find_spec", lambda name: None)


def assert_has(server: StandInServer, tensors: dict[str, torch.Tensor]) -> None:
    """All workers have the tensors, bit by bit."""
    assert len(server.receivers) == server.workers
    for one in server.receivers:
        assert one.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(one.tensors[name], tensor), name


async def test_all_workers_get_all_tensors_between_a_pause_and_their_label(
    server: StandInServer, url: str, model: Path, transfer: WeightTransfer
) -> None:
    async with engine_of(url, model) as engine:
        with pytest.raises(Unavailable, match="was given no weights"):
            await engine.complete([[1]], 1, GREEDY)
        server.calls.clear()

        answer = await transfer.send(7, tensors_of(7))

        assert [one for one in server.calls if one not in ("/get_world_size", "/weight_info", "/server_info")] == [
            "/pause",
            "/update_weight_version",
            "/shutdown_weight_transfer_engine",
            "/init_weight_transfer_engine",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/update_weight_version",
            "/resume",
        ]
        assert_has(server, tensors_of(7))
        assert (answer["status"], answer["step"]) == ("ok", 7)
        assert set(answer["phases"]) == {"check_ms", "pause_ms", "transfer_ms", "load_ms", "resume_ms"}
        assert sum(answer["phases"].values()) == pytest.approx(answer["rpc_ms"], abs=0.01)
        (one,) = await engine.complete([[1]], 1, GREEDY)
        assert (one.weights_step, one.logprobs) == (7, [-7.0] * 4)
        assert (await engine.state()).step == 7


async def test_the_next_weights_go_over_the_same_group(server: StandInServer, transfer: WeightTransfer) -> None:
    await transfer.send(1, tensors_of(1))
    await transfer.send(2, tensors_of(2))

    assert_has(server, tensors_of(2))
    assert server.label == "step_2"
    assert server.calls.count("/init_weight_transfer_engine") == 1


WIDE = torch.arange(1000, dtype=torch.bfloat16).reshape(10, 100)
"""A tensor of which some elements change."""


def wide(step: int, changed: Mapping[int, float] = MappingProxyType({}), **others: torch.Tensor) -> Any:
    """Return tensors of a step that differ from those of another one by its number, and in these places."""
    tensor = WIDE.clone()
    for place, value in changed.items():
        tensor.view(-1)[place] = value
    return {"step": torch.full((2,), float(step)), "wide": tensor, "still": torch.ones(3), **others}


@pytest.fixture
def wide_model(server: StandInServer, tmp_path: Path) -> None:
    folder = weights.save(wide(0), {"model_type": "small", "vocab_size": 300}, tmp_path / "wide", 0)
    server.model = str(folder)


@pytest.mark.usefixtures("wide_model")
async def test_only_elements_that_differ_are_sent_to_a_server_that_has_the_others(
    server: StandInServer, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setattr(tracing, "event", lambda name, **fields: events.append((name, fields.get("bytes"))))
    await transfer.send(1, wide(1, {0: -0.0, 7: 3.5}))
    assert transfer.sent == 2000 + 8 + 12

    changed = {0: 0.0, 7: 3.5, 500: float("nan")}
    await transfer.send(2, wide(2, changed))
    assert transfer.sent == 2 * (4 + 2) + 2 * (4 + 4), "an index and a value of each"
    assert events[1::2] == [("weights.rpc.done", 2020), ("weights.rpc.done", 28)]
    found = [one.tensors["wide"].view(torch.int16) for one in server.receivers]
    assert all(torch.equal(one, wide(2, changed)["wide"].view(torch.int16)) for one in found), "also 0 and -0"

    before = server.calls.count("/update_weights")
    await transfer.send(3, wide(2, changed))
    assert (transfer.sent, server.calls.count("/update_weights"), server.label) == (0, before, "step_3")

    await transfer.send(4, wide(4, dict.fromkeys(range(200), 3.5)))
    assert transfer.sent == 2020, "more than half of the bytes: all tensors"
    assert_has(server, wide(4, dict.fromkeys(range(200), 3.5)))
    assert server.calls.count("/init_weight_transfer_engine") == 1


@pytest.mark.usefixtures("wide_model")
@pytest.mark.parametrize("after", ["a restart", "a failure"])
async def test_all_tensors_are_sent_to_a_server_that_may_have_others(
    server: StandInServer, transfer: WeightTransfer, after: str
) -> None:
    await transfer.send(1, wide(1))
    if after == "a restart":
        server.label, server.receivers = "default", []
    else:
        server.breaks = "/finish_weight_update"
        with pytest.raises(Unavailable, match="did not load the weights of step 2"):
            await transfer.send(2, wide(2, {7: 3.5}))

    await transfer.send(3, wide(3, {7: 3.5}))

    assert transfer.sent == 2020
    assert_has(server, wide(3, {7: 3.5}))


@pytest.mark.usefixtures("wide_model")
async def test_a_server_that_takes_only_patches_gets_one_with_every_element_first(
    server: StandInServer, url: str, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo in the place of NCCL, which is not here."""
    server.backend, server.device = "sparse_nccl", "cuda"
    monkeypatch.setattr(weight_transfer, "has_gpu", lambda: True)
    monkeypatch.setitem(weight_transfer._BROADCASTS, TransferBackend.SPARSE_NCCL, GlooBroadcast)

    await transfer.send(1, wide(1))
    assert transfer.sent == 2020 + 4 * 1005
    await transfer.send(2, wide(2, dict.fromkeys(range(900), 3.5)))
    assert transfer.sent == 900 * 6 + 2 * 8, "more than the tensors, and less than every element"
    assert_has(server, wide(2, dict.fromkeys(range(900), 3.5)))

    other = WeightTransfer(TransferTarget(url, PauseMode.WAIT), CHUNK)
    with pytest.raises(loom.WrongArguments, match=r"count has 2 elements of torch.int64, and it takes up to"):
        await other.send(3, wide(3, count=torch.ones(2, dtype=torch.int64)))
    with pytest.raises(loom.WrongArguments, match=r"layer.kv_b_proj is of latent attention .*the backend nccl"):
        await other.send(3, wide(3, **{"layer.kv_b_proj": torch.ones(2)}))
    assert server.label == "step_2"


async def test_servers_that_have_the_same_weights_share_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(sparse_patches, "changes_of", lambda *args: compared.append(args) or {})
    comparisons, old, new = Comparisons(), wide(1), wide(2)

    found = await asyncio.gather(*(comparisons.changes_of(old, new, 9.0) for _ in range(3)))
    await comparisons.changes_of(wide(1), new, 9.0)

    assert (found, len(compared)) == ([{}] * 3, 2)


@pytest.mark.parametrize("by", ["a restart", "another trainer"])
async def test_a_server_that_has_other_weights_meanwhile_gets_a_new_group(
    server: StandInServer, url: str, transfer: WeightTransfer, by: str
) -> None:
    await transfer.send(1, tensors_of(1))
    if by == "a restart":
        server.label, server.receivers = "default", []
    else:
        await WeightTransfer(TransferTarget(url, PauseMode.WAIT), CHUNK).send(2, tensors_of(2))

    await transfer.send(3, tensors_of(3))

    assert_has(server, tensors_of(3))


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights", "/finish_weight_update"])
async def test_a_failure_in_the_middle_leaves_the_label_broken_and_the_next_weights_mend_it(
    server: StandInServer, url: str, model: Path, transfer: WeightTransfer, path: str
) -> None:
    async with engine_of(url, model) as engine:
        server.breaks = path
        with pytest.raises(Unavailable, match=rf"did not load the weights of step 1: .*{path} with 500"):
            await transfer.send(1, tensors_of(1))

        assert (server.label, server.paused) == (BROKEN, True)
        with pytest.raises(Unavailable, match="has weights with the label 'loom-broken'"):
            await engine.step()
        await transfer.send(2, tensors_of(2))
        assert_has(server, tensors_of(2))
        assert (await engine.complete([[1]], 1, GREEDY))[0].weights_step == 2


@pytest.mark.guarantees("rl serving", "A server that got a part of the tensors keeps the label of broken weights")
async def test_a_worker_that_dies_while_it_receives_fails_the_order_with_the_servers_reason(
    server: StandInServer, transfer: WeightTransfer
) -> None:
    server.leaves = True
    with pytest.raises(Unavailable, match=r"did not load the weights of step 1: .*the worker failed"):
        await transfer.send(1, tensors_of(1))
    assert (server.label, server.paused) == (BROKEN, True)

    server.leaves = False
    await transfer.send(1, tensors_of(1))
    assert_has(server, tensors_of(1))


async def test_a_trainer_that_fails_while_it_sends_frees_the_workers(
    server: StandInServer, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*args: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(WeightTransfer, "_broadcast", dies)
        patched.setattr(weight_transfer, "REASON", 0.0)
        with pytest.raises(Unavailable, match=r"the tensors did not reach its workers: no memory"):
            await transfer.send(1, tensors_of(1))
    await transfer.send(1, tensors_of(1))

    assert_has(server, tensors_of(1))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (tensors_of(1, other=torch.zeros(1)), r"the trainer's weights are not this model's: .*unknown \['other'\]"),
        (tensors_of(1, scale=torch.zeros(3)), r"scale has the shape \[3\], and the model's is \[\]"),
    ],
)
async def test_tensors_of_another_model_change_nothing(
    server: StandInServer, transfer: WeightTransfer, tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(loom.WrongArguments, match=said):
        await transfer.send(1, tensors)
    assert "/pause" not in server.calls
    assert server.label == "default"


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [
        (None, "cpu", "takes no weights by transfer: start it with --worker-extension-cls loom_gloo.WithGloo "),
        ("nccl", "cpu", "takes weights by 'nccl': start it with --worker-extension-cls"),
        (
            None,
            "cuda",
            r"takes no weights by transfer: start it with --weight-transfer-config \{.backend.: .nccl.\}",
        ),
        ("ipc", "cuda", "takes weights by 'ipc': start it with --weight-transfer-config"),
    ],
)
async def test_a_server_that_takes_no_tensors_is_refused_with_what_to_do(
    server: StandInServer, url: str, model: Path, transfer: WeightTransfer, backend: str, device: str, said: str
) -> None:
    server.backend, server.device = backend, device
    with pytest.raises(loom.WrongArguments, match=said):
        async with engine_of(url, model):
            pass
    with pytest.raises(loom.WrongArguments, match=said):
        await transfer.send(1, tensors_of(1))


async def test_nccl_needs_a_gpu_here(
    server: StandInServer, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.backend, server.device = "nccl", "cuda"
    monkeypatch.setattr(weight_transfer, "has_gpu", lambda: False)
    with pytest.raises(loom.WrongArguments, match=r"by NCCL, and this process has no GPU: Trainers\(gpus=True\)"):
        await transfer.send(1, tensors_of(1))
    assert "/pause" not in server.calls


def test_a_group_by_nccl_begins_as_vllms_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for torch's NCCL, which is not here: only the order of the calls is looked at."""
    calls: list[tuple[str, Any]] = []
    nccl = "torch.cuda.nccl."
    monkeypatch.setattr(f"{nccl}unique_id", lambda: b"i" * 128)
    monkeypatch.setattr(f"{nccl}init_rank", lambda *args: calls.append(("init", args)) or "communicator")
    monkeypatch.setattr(f"{nccl}all_reduce", lambda each, comms: calls.append(("all_reduce", each[0].numel())))
    monkeypatch.setattr(
        f"{nccl}broadcast", lambda each, comms: calls.append(("broadcast", (each[0].numel(), comms)))
    )
    monkeypatch.setattr("torch.device", lambda kind, number: "cpu")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr("torch.cuda.stream", contextlib.nullcontext)

    group = NcclBroadcast(2)
    info = group.init_info()
    group.join()
    group.send(torch.zeros(5, dtype=torch.uint8))

    assert base64.b64decode(str(info["nccl_unique_id_b64"])) == b"i" * 128
    assert (info["world_size"], info["rank_offset"], info["packed"]) == (3, 1, True)
    assert calls == [("init", (3, b"i" * 128, 0)), ("all_reduce", 1), ("broadcast", (5, ["communicator"]))]


async def test_a_trainer_says_why_weights_have_not_arrived_and_sends_the_next_ones(
    server: StandInServer, url: str, tmp_path: Path
) -> None:
    run = TrainerRun(str(tmp_path), 9, Weights.TRANSFER, temperature=1.0, keep=2, lines=False)
    trainer, target = Trainer(Trainers(lambda: None, Characters()), run), TransferTarget(url, PauseMode.KEEP)

    async def sent(step: int) -> str | None:
        return await _sent(
            "transfer", step, functools.partial(trainer._transfer, Comparisons(), target, step, tensors_of(step))
        )

    assert await sent(1) is None
    server.breaks = "/start_weight_update"
    assert "did not load the weights of step 2" in str(await sent(2))
    assert await sent(3) is None
    assert_has(server, tensors_of(3))
    assert server.calls.count("/reset_prefix_cache") == 2, "keys and values of older weights"


def test_chunks_end_with_the_tensor_that_makes_them_too_large() -> None:
    tensors = [torch.zeros(one, dtype=torch.uint8) for one in (3, 5, 2, 11, 1)]
    assert [one.numel() for one in chunks(tensors, 8)] == [10, 11, 1]
    assert [one.numel() for one in chunks(tensors, 7)] == [8, 13, 1]


async def test_a_server_that_does_not_answer_may_wait_for_a_trainer_that_has_died(
    server: StandInServer, transfer: WeightTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "STUCK", 0.1)
    server.stuck = True
    with pytest.raises(
        Unavailable, match=r"/weight_info.*or its workers wait in a broadcast of a trainer that has died"
    ):
        await transfer.send(1, tensors_of(1))
    assert "/pause" not in server.calls
