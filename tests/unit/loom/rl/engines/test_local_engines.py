"""Engines in the generator's process on a Hugging Face model agree with the model alone, and with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loom
from loom.rl.arithmetic_model import write_arithmetic_model
from loom.rl.engines.engine import EngineKind, InferenceEngine
from loom.rl.engines.make import EngineSettings, make_engine
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Completion, RequestLimits, Sampling
from loom.rl.models import causal

pytest.importorskip("transformers")
PROMPTS = ["r38=", "3+4=", "a longer prompt than the others="]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_arithmetic_model(tmp_path_factory.mktemp("model"), layers=1, hidden=64))


@pytest.fixture(params=["loom", "transformers"])
def engine(request: pytest.FixtureRequest, model: str, tmp_path: Path) -> Iterator[InferenceEngine]:
    made = engine_of(request.param, model, tmp_path)
    yield made
    asyncio.run(made.stop())


def engine_of(kind: str, model: str, folder: Path) -> InferenceEngine:
    limits = RequestLimits(concurrency=4)
    settings = EngineSettings(EngineKind(kind), None, None, model, limits, 0, folder, "generator", 0, 0)
    return make_engine(settings, {})


@torch.inference_mode()
def logprobs_of(model: str, completion: Completion, temperature: float = 1.0) -> list[float]:
    """What the model alone says of a completion's tokens."""
    tokens = torch.tensor([[*completion.prompt_tokens, *completion.tokens]])
    logits = causal.load(model)(input_ids=tokens).logits[0, len(completion.prompt_tokens) - 1 : -1]
    found = (logits.double() / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(found, completion.tokens, strict=True)]


async def test_the_log_probabilities_are_the_models_with_and_without_temperature(
    engine: InferenceEngine, model: str
) -> None:
    warm = await engine.complete(PROMPTS, 2, Sampling(12, 0.7, seed=3))
    greedy = await engine.complete(PROMPTS, 1, Sampling(12, 0.0))

    for one in warm:
        assert one.logprobs == pytest.approx(logprobs_of(model, one, 0.7), abs=1e-4)
    for one in greedy:
        assert one.logprobs == pytest.approx(logprobs_of(model, one), abs=1e-4)
    assert [one.prompt for one in greedy] == PROMPTS
    assert all(len(one.tokens) == 12 for one in warm if one.truncated)
    assert warm[0].tokens != warm[1].tokens


async def test_both_write_the_same_greedily(model: str, tmp_path: Path) -> None:
    found = []
    for kind in ("loom", "transformers"):
        engine = engine_of(kind, model, tmp_path)
        found.append([one.tokens for one in await engine.complete(PROMPTS, 1, Sampling(16, 0.0))])
        await engine.stop()
    assert found[0] == found[1]


async def test_new_weights_change_what_is_drawn_and_its_step(engine: InferenceEngine, tmp_path: Path) -> None:
    other = write_arithmetic_model(tmp_path / "other", layers=1, hidden=64, seed=1)
    state = causal.weights_of(causal.load(other))
    weights.save(state, {}, tmp_path / "weights", 5)

    answer = await engine.update_weights(5)
    (one,) = await engine.complete(PROMPTS[:1], 1, Sampling(8, 0.0))

    assert (answer["status"], answer["step"], await engine.step()) == ("ok", 5, 5)
    assert one.weights_step == 5
    assert one.logprobs == pytest.approx(logprobs_of(str(other), one), abs=1e-4)
    await engine.update_weights(6, state=state)
    assert await engine.step() == 6
    with pytest.raises(loom.WrongArguments, match="these weights are not this model's"):
        await engine.update_weights(7, state={"other": torch.zeros(1)})


async def test_nothing_is_drawn_while_it_is_paused(engine: InferenceEngine) -> None:
    await engine.pause()
    request = asyncio.ensure_future(engine.complete(PROMPTS, 1, Sampling(4, 1.0)))
    done, _ = await asyncio.wait([request], timeout=0.2)
    assert not done
    await engine.resume()
    assert len(await request) == 3


async def test_a_stop_ends_a_completion_before_its_text(engine: InferenceEngine) -> None:
    (whole,) = await engine.complete(PROMPTS[:1], 1, Sampling(40, 1.0, seed=1))
    stop = next(letter for letter in whole.text[3:] if letter.isprintable() and letter.isascii())

    (one,) = await engine.complete(PROMPTS[:1], 1, Sampling(40, 1.0, seed=1, stop=(stop,)))

    assert one.text == whole.text[: whole.text.index(stop)]
    assert one.tokens == whole.tokens[: len(one.tokens)]
    assert not one.truncated
    assert len(one.logprobs) == len(one.tokens)


async def test_the_most_probable_tokens_alone_are_drawn_if_asked_for(engine: InferenceEngine) -> None:
    narrow = Sampling(6, 1.0, seed=4, top_k=1)
    (greedy,) = await engine.complete(PROMPTS[:1], 1, Sampling(6, 0.0))
    found = await engine.complete(PROMPTS[:1], 3, narrow)

    assert all(one.tokens == greedy.tokens for one in found)
    assert all(abs(logprob) < 1e-9 for one in found for logprob in one.logprobs), "the only choice has the chance 1"


async def test_bad_prompts_are_refused_with_their_reason(engine: InferenceEngine) -> None:
    with pytest.raises(loom.WrongArguments, match="from 0 to 257, not 900"):
        await engine.complete([[1, 900]], 1, Sampling(4))
    with pytest.raises(loom.WrongArguments, match="a prompt has from 1 to"):
        await engine.complete([[]], 1, Sampling(4))
    with pytest.raises(loom.WrongArguments, match="n is a whole number"):
        await engine.complete(["a"], 0, Sampling(4))


async def test_fields_of_other_engines_are_refused_by_looms_own(model: str, tmp_path: Path) -> None:
    engine = engine_of("loom", model, tmp_path)
    with pytest.raises(loom.WrongArguments, match="has no frequency_penalty; other engines may"):
        await engine.complete(PROMPTS, 1, Sampling(4).with_fields({"frequency_penalty": 0.5}))
    await engine.stop()


def test_an_engine_without_a_model_or_with_a_wrong_option_is_refused(model: str, tmp_path: Path) -> None:
    settings = EngineSettings(EngineKind.VLLM, None, None, None, RequestLimits(), 0, tmp_path, "generator", 0, 0)
    with pytest.raises(loom.WrongArguments, match="engine='vllm' needs a model"):
        make_engine(settings, {})
    local = replace(settings, kind=EngineKind.TRANSFORMERS, model=model)
    with pytest.raises(loom.WrongArguments, match="engine='transformers' has no option 'url'"):
        make_engine(local, {"url": "http://here"})
