"""A generator's engine on a vLLM server, which is a stand-in: completions, weights, and servers that are none."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import torch
import uvicorn

import loom
from loom.errors import MissingDependency, Unavailable
from loom.rl.engines import model_folder
from loom.rl.engines.engine import EngineKind
from loom.rl.engines.make import gpus_of
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.engines.vllm_client import VllmClient
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Sampling, WeightsSpan
from loom.rl.generation.weight_client import IDLE, UpdateAnswer, shared_client, weights_client
from tests.support.processes import processes_of_group
from tests.support.vllm_stand_in import StandInServer, environment, served

GREEDY = Sampling(4, temperature=0.0)
BOUND = 60.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a config and one tensor; no tokenizer, so that none is compared."""
    return saved(tmp_path / "models", 0, {"layer": torch.zeros(2, 3)})


@pytest.fixture
def server(model: Path) -> StandInServer:
    return StandInServer(model=str(model), key="secret")


@pytest.fixture
def url(server: StandInServer) -> Iterator[str]:
    with served(server) as made:
        yield made


def saved(folder: Path, step: int, state: dict[str, torch.Tensor], **config: Any) -> Path:
    return weights.save(state, {"model_type": "small", "vocab_size": 300, **config}, folder, step)


def step_of(folder: Path, step: int) -> Path:
    return saved(folder / "weights", step, {"layer": torch.full((2, 3), float(step))})


async def started(url: str, model: Path, folder: Path, **options: Any) -> VllmEngine:
    engine = VllmEngine(str(model), VllmOptions.of({"url": url, **options}), folder=folder)
    await engine.start()
    return engine


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loom.rl.engines.vllm.find_spec", lambda name: None)


async def test_completions_have_tokens_logprobs_and_the_step_of_their_weights(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    engine = await started(url, model, tmp_path)

    found = await engine.complete([[1, 2], "ab"], 2, Sampling(4, 0.7, seed=3, top_p=0.9, stop=("x",)))

    assert [one.prompt for one in found] == [[1, 2], [1, 2], "ab", "ab"]
    assert [one.prompt_tokens for one in found[1:3]] == [[1, 2], [97, 98]]
    assert found[0].tokens == [68] * 4
    assert (found[0].text, found[0].logprobs, found[0].truncated) == ("DDDD", [0.0] * 4, True)
    assert found[0].weights_step == 0
    assert (await engine.state()).tokens == 16
    await engine.stop()


@pytest.mark.guarantees(
    "rl serving", "vLLM's workers have all loaded new weights before a token is drawn with them"
)
async def test_weights_are_loaded_between_a_pause_and_their_label(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    step_of(tmp_path, 7)
    engine = await started(url, model, tmp_path)
    server.calls.clear()

    answer = await engine.update_weights(7)

    assert [one for one in server.calls if one not in ("/get_world_size", "/weight_info")] == [
        "/pause",
        "/update_weight_version",
        "/collective_rpc",
        "/update_weight_version",
        "/resume",
    ]
    assert (answer["status"], answer["step"]) == ("ok", 7)
    assert sum(answer["phases"].values()) <= answer["rpc_ms"] + 0.01
    assert list(answer["phases"]) == ["check_ms", "pause_ms", "load_ms", "resume_ms"]
    (one,) = await engine.complete([[1]], 1, GREEDY)
    assert (one.weights_step, one.logprobs, one.spans) == (7, [-7.0] * 4, (WeightsSpan(7, 0, 4),))
    assert await engine.step() == 7
    await engine.stop()


async def test_completions_that_are_under_way_end_with_the_weights_of_their_beginning(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        step_of(tmp_path, step)
    engine = await started(url, model, tmp_path)
    await engine.update_weights(1)
    server.hold.clear()
    server.begun.clear()
    before = asyncio.ensure_future(engine.complete([[1]], 1, GREEDY))
    assert await asyncio.to_thread(server.begun.wait, BOUND)

    update = asyncio.ensure_future(engine.update_weights(2))
    while not server.paused:  # noqa: ASYNC110 - it is another thread's
        await asyncio.sleep(0.005)
    after = asyncio.ensure_future(engine.complete([[1]], 1, GREEDY))
    assert not update.done()
    server.hold.set()

    assert (await update)["step"] == 2
    assert [(await one)[0].weights_step for one in (before, after)] == [1, 2]
    await engine.stop()


async def test_a_failure_in_the_middle_of_an_update_leaves_no_weights_that_are_used(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    for step in (1, 2):
        step_of(tmp_path, step)
    engine = await started(url, model, tmp_path)
    await engine.update_weights(1)
    server.breaks = "/collective_rpc"

    with pytest.raises(Unavailable, match="did not load the weights of step 2"):
        await engine.update_weights(2)
    assert server.paused, "it draws no token"
    server.paused = False
    with pytest.raises(Unavailable, match="label 'loom-broken'"):
        await engine.complete([[1]], 1, GREEDY)

    await engine.update_weights(2)  # as of a generator that takes its place
    assert (await engine.complete([[1]], 1, GREEDY))[0].weights_step == 2
    await engine.stop()


async def test_an_answer_of_too_few_workers_is_a_failure(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    step_of(tmp_path, 1)
    engine = await started(url, model, tmp_path)
    server.workers, server.silent_workers = 2, 1

    with pytest.raises(Unavailable, match="1 of 2 workers answered"):
        await engine.update_weights(1)
    assert server.label == "loom-broken"
    await engine.stop()


async def test_keys_of_older_weights_that_stay_are_a_failure(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    step_of(tmp_path, 1)
    engine = await started(url, model, tmp_path, pause="keep")
    server.keeps_keys = True

    with pytest.raises(Unavailable, match="still has keys and values of older weights"):
        await engine.update_weights(1)
    assert (server.paused, server.label) == (True, "loom-broken")
    await engine.stop()


async def test_the_time_in_the_engine_is_the_servers_own_if_it_says_it(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    step_of(tmp_path, 1)
    engine = await started(url, model, tmp_path)
    server.rpc_ms = 1e6

    phases = (await engine.update_weights(1))["phases"]

    assert {name: phases[name] for name in phases if name != "check_ms"} == {
        "pause_ms": 1e6,
        "load_ms": 2e6,
        "resume_ms": 2e6,
    }
    await engine.stop()


@pytest.mark.parametrize("via", ["shared", "admin"])
async def test_an_order_has_one_connection_of_its_own_from_pause_to_resume(
    server: StandInServer, url: str, tmp_path: Path, via: str
) -> None:
    """Of several API servers one has it whole, and completions that are paused keep no connection from it."""
    path = step_of(tmp_path, 1)

    async def order(http: httpx.AsyncClient, to: str, step: int, path: str | None, trace: str) -> UpdateAnswer:
        return await VllmClient(http, to).update_weights(step, str(path))

    async with shared_client(connections=1) as http:
        (timing,) = await weights_client(via, http, order).update([url], 1, str(path))

    first, *others = server.ports
    assert (len(set(others)), first in others) == (1, False)
    assert server.calls[0] == "/get_world_size"
    assert timing.rpc_ms == pytest.approx(sum(timing.phases.values()), abs=0.01)


async def test_a_server_that_restarted_gets_weights_before_its_completions_are_taken(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    step_of(tmp_path, 1)
    engine = await started(url, model, tmp_path)
    await engine.update_weights(1)
    server.label, server.weights = "default", 0

    with pytest.raises(Unavailable, match="it has restarted"):
        await engine.complete([[1]], 1, GREEDY)
    await engine.update_weights(1)
    assert (await engine.complete([[1]], 1, GREEDY))[0].weights_step == 1
    await engine.stop()


async def test_tokens_of_two_policies_are_refused_unless_keeping_was_asked_for(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    server.version_per_token = ["step_3", "step_3", "step_4", "step_4"]
    engine = await started(url, model, tmp_path)
    with pytest.raises(loom.OperationFailed, match="tokens of two policies, 3 times"):
        await engine.complete([[1]], 1, GREEDY)
    await engine.stop()

    keeping = await started(url, model, tmp_path, pause="keep")
    (one,) = await keeping.complete([[1]], 1, GREEDY)
    assert [span.step for span in one.spans] == [3, 3, 4, 4]
    assert one.weights_step == 3
    await keeping.stop()


async def test_completions_without_log_probabilities_are_refused(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    server.logprobs = False
    engine = await started(url, model, tmp_path)
    with pytest.raises(loom.WrongArguments, match="0 log probabilities for 4 tokens"):
        await engine.complete([[1]], 1, GREEDY)
    await engine.stop()


async def test_a_sampling_field_that_the_server_lacks_is_refused(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    engine = await started(url, model, tmp_path)
    assert await engine.complete([[1]], 1, GREEDY.with_fields({"frequency_penalty": 0.5}))
    with pytest.raises(loom.WrongArguments, match="no sampling field 'frequency_penality'; vLLM would ignore it"):
        await engine.complete([[1]], 1, GREEDY.with_fields({"frequency_penality": 0.5}))
    await engine.stop()


@pytest.mark.parametrize("broken", ["torn", "missing", "other names", "other shapes"])
async def test_weights_that_are_not_whole_or_not_the_models_change_nothing(
    server: StandInServer, url: str, model: Path, tmp_path: Path, broken: str
) -> None:
    path = step_of(tmp_path, 1)
    match broken:
        case "torn":
            file = path / "model.safetensors"
            os.truncate(file, file.stat().st_size - 4)
            expected: Any = (loom.CheckpointBroken, "bytes instead of")
        case "missing":
            path.rename(tmp_path / "elsewhere")
            expected = (loom.CheckpointBroken, "there is no such folder")
        case "other names":
            saved(tmp_path / "weights", 1, {"other": torch.zeros(2, 3)})
            expected = (loom.WrongArguments, r"missing \['layer'\], unknown \['other'\]")
        case _:
            saved(tmp_path / "weights", 1, {"layer": torch.zeros(3, 3)})
            expected = (loom.WrongArguments, r"shape \[3, 3\], and the model's is \[2, 3\]")
    engine = await started(url, model, tmp_path)
    server.calls.clear()

    with pytest.raises(expected[0], match=expected[1]):
        await engine.update_weights(1)
    assert server.calls == [], "the server was not even asked"
    await engine.stop()


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"development": False}, "no vLLM server in development mode: start it with VLLM_SERVER_DEV_MODE=1"),
        ({"drops": ("/pause",)}, "a proxy drops that route"),
        ({"scale_out": False}, "start it with --enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ({"divides_prompts": True}, "start it with --no-enable-chunked-prefill"),
    ],
)
async def test_a_server_that_lacks_something_is_refused_with_what_to_do(
    server: StandInServer, model: Path, tmp_path: Path, lacks: dict[str, Any], said: str
) -> None:
    for name, value in lacks.items():
        setattr(server, name, value)
    with served(server) as url, pytest.raises(loom.WrongArguments, match=said):
        await started(url, model, tmp_path)


async def test_a_server_of_another_model_is_refused(server: StandInServer, url: str, tmp_path: Path) -> None:
    other = saved(tmp_path / "others", 0, {"layer": torch.zeros(2, 3)}, vocab_size=400)
    with pytest.raises(
        loom.WrongArguments, match=r"has another model than .*: vocab_size is 300 there and 400 here"
    ):
        await started(url, other, tmp_path)


async def test_a_server_with_another_tokenizer_is_refused(
    server: StandInServer, url: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Words:
        def encode(self, text: str) -> list[int]:
            return list(range(len(text.split())))

    monkeypatch.setattr("loom.rl.engines.vllm.find_spec", lambda name: object())
    monkeypatch.setattr("loom.rl.models.tokenizers.tokenizer_of", lambda path: Words())
    with pytest.raises(loom.WrongArguments, match=r"another tokenizer than .* into 32 tokens, and the model's own"):
        await started(url, model, tmp_path)


async def test_no_server_and_a_wrong_key_are_errors_of_their_own(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match="does not answer"):
        await started("http://127.0.0.1:1", model, tmp_path)
    with pytest.raises(loom.Denied, match="401"):
        await started(url.replace("secret", "other"), model, tmp_path)


async def test_a_server_that_slept_draws_nothing_before_it_has_weights_again(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    server.device, server.sleeps = "cuda", True
    for step in (1, 2):
        step_of(tmp_path, step)
    engine = await started(url, model, tmp_path, colocated=True)
    await engine.update_weights(1)
    server.calls.clear()

    await engine.sleep()
    await engine.wake()
    with pytest.raises(Unavailable, match="has weights with the label 'loom-broken'"):
        await engine.complete([[1]], 1, GREEDY)
    await engine.update_weights(2)

    assert server.calls[:5] == ["/pause", "/update_weight_version", "/sleep", "/is_sleeping", "/wake_up"]
    assert (await engine.complete([[1]], 1, GREEDY))[0].weights_step == 2
    await engine.stop()


async def test_a_server_that_only_says_that_it_sleeps_or_wakes_is_an_error(
    server: StandInServer, url: str, model: Path, tmp_path: Path
) -> None:
    server.device, server.sleeps, server.drowsy = "cuda", True, True
    engine = await started(url, model, tmp_path, colocated=True)

    with pytest.raises(Unavailable, match="does not sleep"):
        await engine.sleep()
    with pytest.raises(Unavailable, match="still sleeps"):
        await engine.wake()
    await engine.stop()


@pytest.mark.parametrize(
    ("device", "said"),
    [("cpu", "on CPUs, vLLM ignores that it should sleep"), ("cuda", "start it with --enable-sleep-mode")],
)
async def test_a_server_that_cannot_sleep_is_not_colocated(
    server: StandInServer, url: str, model: Path, tmp_path: Path, device: str, said: str
) -> None:
    server.device = device
    with pytest.raises(loom.WrongArguments, match=said):
        await started(url, model, tmp_path, colocated=True)


async def test_vllm_for_cpus_is_not_started_to_be_colocated(model: Path, tmp_path: Path) -> None:
    (tmp_path / "stand-in" / "lib" / "python3.12" / "site-packages" / "vllm-0.32.0+cpu.dist-info").mkdir(
        parents=True
    )
    with pytest.raises(loom.WrongArguments, match="colocated with trainers on GPUs only"):
        await own(model, tmp_path, colocated=True)


@pytest.mark.parametrize(("shared", "found"), [(False, ["2"]), (True, ["1"])])
def test_generators_take_the_last_gpus_of_their_host_or_those_of_trainers(
    monkeypatch: pytest.MonkeyPatch, shared: bool, found: list[str]
) -> None:
    gpus = [SimpleNamespace(kind="gpu", uuid=str(number)) for number in range(4)]
    monkeypatch.setattr("loom.devices.use.local_devices", lambda: gpus)

    assert gpus_of(1, 1, shared) == found
    with pytest.raises(loom.WrongArguments, match="wants 3 GPUs after 3 of others, and the host has 4"):
        gpus_of(1, 3, shared)


def test_no_request_goes_by_a_connection_that_the_server_may_be_closing() -> None:
    """Such a request fails, and the generator would count as lost."""
    assert uvicorn.Config("app").timeout_keep_alive / 2 >= IDLE


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(loom.WrongArguments, match="no option 'tensor_paralel'; it has url, tensor_parallel"):
        VllmOptions.of({"tensor_paralel": 2})
    with pytest.raises(loom.WrongArguments, match="pause is 'wait' or 'keep', not 'abort'"):
        VllmOptions.of({"pause": "abort"})


async def own(model: Path, folder: Path, **options: Any) -> VllmEngine:
    made = environment(folder / "stand-in")
    engine = VllmEngine(str(model), VllmOptions.of({"installation": made, **options}), folder=folder)
    await engine.start()
    return engine


@pytest.mark.slow
@pytest.mark.guarantees("rl serving", "No process of a vLLM server that Loom started outlives it")
async def test_a_server_that_loom_starts_wants_its_token_and_leaves_no_process(model: Path, tmp_path: Path) -> None:
    engine = await own(model, tmp_path, tensor_parallel=2)
    assert engine._server is not None
    pid = engine._server.pid
    assert pid is not None
    assert len(processes_of_group(pid)) >= 3, "the server, its engine, and what watches them"

    step_of(tmp_path, 1)
    await engine.update_weights(1)
    assert (await engine.complete([[1]], 1, GREEDY))[0].weights_step == 1
    assert "secret" not in engine.url
    command = psutil.Process(pid).cmdline()
    assert engine.url.partition("loom:")[2].partition("@")[0] not in " ".join(command)
    assert "Application startup complete" not in (tmp_path / "vllm.log").read_text(), "the announcement"
    await engine.stop()

    assert not processes_of_group(pid)


@pytest.mark.slow
async def test_a_server_may_listen_later_than_it_says_that_it_is_ready(model: Path, tmp_path: Path) -> None:
    engine = await own(model, tmp_path, environment={"STAND_IN_LISTENS": "1"})

    assert await engine.complete([[1]], 1, GREEDY)
    await engine.stop()


@pytest.mark.slow
async def test_a_server_that_is_killed_says_so_with_its_last_lines(model: Path, tmp_path: Path) -> None:
    engine = await own(model, tmp_path)
    assert engine._server is not None
    pid = engine._server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)

    with pytest.raises(Unavailable, match=r"has ended, exit code -9; all is in .*vllm\.log; its last lines:"):
        await engine.complete([[1]], 1, GREEDY)
    await engine.stop()
    while processes_of_group(pid):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def is_shared(name: str) -> bool:
    return Path("/dev/shm", name).exists()


@pytest.mark.slow
async def test_what_a_killed_server_had_in_shared_memory_is_removed(model: Path, tmp_path: Path) -> None:
    name = f"psm_{secrets.token_hex(4)}"
    other = SharedMemory(create=True, size=1)
    engine = await own(model, tmp_path, environment={"STAND_IN_SHARED": name})
    assert is_shared(name)
    assert engine._server is not None
    assert engine._server.pid is not None

    os.killpg(engine._server.pid, signal.SIGKILL)  # also what Python has for that
    assert await engine._server.ended(BOUND)
    until = time.monotonic() + BOUND
    while is_shared(name):
        assert time.monotonic() < until
        await asyncio.sleep(0.02)

    await engine.stop()
    other.close()
    other.unlink()  # it is there still: it is another program's


async def test_a_server_that_cannot_start_is_an_error_with_its_last_lines(model: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"(?s)ended before it was ready.*the model does not fit"):
        await own(model, tmp_path, environment={"STAND_IN_FAILS": "1"})


async def test_a_folder_without_vllm_is_an_error_that_says_how_to_make_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_VLLM", str(tmp_path / "none"))
    engine = VllmEngine(str(model), VllmOptions())
    with pytest.raises(MissingDependency, match=r"images/vllm-cpu\.sh .*none makes one for CPUs"):
        await engine.start()


def test_a_sharded_folder_has_the_tensors_of_all_its_files(tmp_path: Path) -> None:
    saved(tmp_path, 0, {"layer": torch.zeros(2, 3)})
    saved(tmp_path, 1, {"head": torch.zeros(4)})
    folder = tmp_path / "sharded"
    folder.mkdir()
    for number, name in enumerate(("one.safetensors", "two.safetensors")):
        (tmp_path / f"step_{number}" / "model.safetensors").rename(folder / name)
    index = '{"weight_map": {"layer": "one.safetensors", "head": "two.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)

    assert model_folder.tensors_of(folder) == {"layer": (2, 3), "head": (4,)}


def test_engines_say_what_they_can() -> None:
    assert [one for one in EngineKind if one.in_process] == [EngineKind.LOOM, EngineKind.TRANSFORMERS]
    assert [one for one in EngineKind if one.has_http] == [EngineKind.LOOM, EngineKind.VLLM]
