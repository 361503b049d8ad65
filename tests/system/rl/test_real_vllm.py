"""The real vLLM as an engine agrees with the others on log probabilities, and gets weights between completions."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

import loom
from loom.errors import Unavailable
from loom.rl.arithmetic import SMALL_SERVER
from loom.rl.engines.engine import EngineKind
from loom.rl.engines.make import EngineSettings, make_engine
from loom.rl.engines.vllm import VllmEngine, VllmOptions
from loom.rl.engines.vllm_client import VllmClient
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import RequestLimits, Sampling
from tests.support.real_vllm import needs_vllm
from tests.system.rl.drawn import logprobs_of

PROMPTS = ["r38=", "3+4=", "a longer prompt than the others="]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), needs_vllm]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(folder: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(str(folder / "model"), VllmOptions.of(SMALL_SERVER), folder=folder)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_three_engines_agree_on_the_log_probabilities_of_the_same_weights(
    vllm: VllmEngine, folder: Path
) -> None:
    await vllm.update_weights(1)
    engines = {"vllm": vllm}
    for kind in (EngineKind.LOOM, EngineKind.TRANSFORMERS):
        settings = EngineSettings(
            kind, None, None, str(folder / "model"), RequestLimits(), 0, folder, "generator", 0, 0
        )
        engines[kind.value] = engine = make_engine(settings, {})  # type: ignore[assignment]
        await engine.update_weights(1)

    greedy = {}
    for name, engine in engines.items():
        for temperature in (0.7, 1.0):
            for one in await engine.complete(PROMPTS, 4, Sampling(16, temperature, seed=5)):
                assert one.weights_step == 1
                assert one.logprobs == pytest.approx(logprobs_of(folder / "model_1", one, temperature), abs=1e-4), (
                    name
                )
        greedy[name] = await engine.complete(PROMPTS, 1, Sampling(16, 0.0))

    for place in range(len(PROMPTS)):
        one, *others = (found[place] for found in greedy.values())
        for other in others:
            assert other.tokens == one.tokens
            assert other.logprobs == pytest.approx(one.logprobs, abs=1e-4)
            assert other.prompt_tokens == one.prompt_tokens
    for name in ("loom", "transformers"):
        await engines[name].stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_fields_go_through_and_unknown_ones_are_refused(vllm: VllmEngine) -> None:
    fields = {"top_k": 1, "frequency_penalty": 0.5, "ignore_eos": True, "stop": ["zzz"]}
    found = await vllm.complete(PROMPTS, 2, Sampling(12, 1.0).with_fields(fields))
    assert {len(one.tokens) for one in found} == {12}
    with pytest.raises(loom.WrongArguments, match="no sampling field 'frequency_penality'"):
        await vllm.complete(PROMPTS, 1, Sampling(4).with_fields({"frequency_penality": 0.5}))
    with pytest.raises(loom.WrongArguments, match="out of vocabulary"):
        await vllm.complete([[900]], 1, Sampling(4))


def write_in_two_files(folder: Path, step: int, second: str) -> None:
    """Write weights of which one file has a part of each layer, and the second the rest, which is not right."""
    whole = weights.path_of(folder / "weights", 1)
    made = weights.path_of(folder / "weights", step)
    shutil.copytree(whole, made)
    tensors = load_file(made / "model.safetensors")
    (made / "model.safetensors").unlink()
    first = {name: one for name, one in tensors.items() if "q_proj" in name or "gate_proj" in name}
    rest = {name: one for name, one in tensors.items() if name not in first}
    if second == "of another shape":
        rest["model.layers.1.self_attn.v_proj.weight"] = torch.zeros(3, 5)
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": rest}
    for name, part in files.items():
        save_file(part, made / name, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (made / "model.safetensors.index.json").write_text(json.dumps(index))
    if second == "cut off":
        os.truncate(made / name, (made / name).stat().st_size - 1000)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.guarantees("rl serving", "Weights that follow an order which broke in its middle are loaded whole")
@pytest.mark.parametrize(("step", "second"), [(3, "cut off"), (4, "of another shape")])
async def test_weights_after_an_order_that_broke_in_its_middle_are_whole(
    vllm: VllmEngine, folder: Path, monkeypatch: pytest.MonkeyPatch, step: int, second: str
) -> None:
    write_in_two_files(folder, step, second)
    with monkeypatch.context() as patched:
        patched.setattr(VllmClient, "_check_weights", lambda client, path: None)
        with pytest.raises(Unavailable, match=f"did not load the weights of step {step}"):
            await vllm.update_weights(step)

    if second == "of another shape":  # vLLM keeps the tensor, and tries it again
        with pytest.raises(
            Unavailable, match="an earlier order broke in its middle, and cannot be ended: restart it"
        ):
            await vllm.update_weights(2)
    with pytest.raises(Unavailable, match="has weights with the label 'loom-broken'"):
        await vllm.step()
    if second == "of another shape":
        await vllm.stop()
        await vllm.start()

    await vllm.update_weights(2)
    for one in await vllm.complete(PROMPTS, 1, Sampling(16, 0.0)):
        assert one.weights_step == 2
        assert one.logprobs == pytest.approx(logprobs_of(folder / "model_2", one, 1.0), abs=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_weights_have_their_step_and_a_killed_server_says_so(vllm: VllmEngine, folder: Path) -> None:
    answer = await vllm.update_weights(2)
    (one,) = await vllm.complete(PROMPTS[:1], 1, Sampling(8, 0.0))

    assert answer["phases"].keys() == {"check_ms", "pause_ms", "load_ms", "resume_ms"}
    assert [(span.step, span.start, span.end) for span in one.spans] == [(2, 0, len(one.tokens))]
    assert one.logprobs == pytest.approx(logprobs_of(folder / "model_2", one, 1.0), abs=1e-4)

    assert vllm._server is not None
    assert vllm._server.pid is not None
    os.kill(vllm._server.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="has ended, exit code -9"):
        await vllm.complete(PROMPTS, 1, Sampling(4))
