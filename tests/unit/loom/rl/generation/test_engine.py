"""The engine draws what a model alone would, without a cache; it takes turns with new weights, and has bounds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import loom
from loom.rl.generation.completions import Completion, RequestLimits, Sampling
from loom.rl.generation.engine import Engine
from tests.support.small_models import LETTERS, Letters, SmallModel

PROMPTS = ["a", "bcdefgh", "hg", "abcabcabcabcabcabc", "p", "ponm"]
GREEDY = Sampling(24, temperature=0.0)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(SmallModel(), Letters(), limits=RequestLimits(concurrency=4, queue=64))
    yield made
    made.close()


@torch.inference_mode()
def uncached(model: SmallModel, prompt: str, max_tokens: int) -> tuple[list[int], list[float]]:
    """What a model writes greedily, one prompt at a time and all of it computed anew for each token."""
    tokens = Letters().encode(prompt)
    written: list[int] = []
    logprobs: list[float] = []
    while len(written) < max_tokens and (not written or written[-1] > 1):
        logits, _ = model(torch.tensor([tokens + written]))
        found = logits[0, -1].double().log_softmax(-1)
        written.append(int(found.argmax()))
        logprobs.append(float(found.max()))
    return written, logprobs


async def test_greedy_completions_are_those_of_the_model_alone_without_a_cache(engine: Engine) -> None:
    completions = await engine.generate(PROMPTS, sampling=GREEDY)

    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens, logprobs = uncached(SmallModel(), prompt, GREEDY.max_tokens)
        assert completion.tokens == tokens
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert completion.prompt_tokens == Letters().encode(prompt)
        assert completion.truncated == (tokens[-1] > 1)
        assert completion.text == Letters().decode(tokens)
    assert len({len(completion.tokens) for completion in completions}) > 1, "all left at the same step"


async def test_a_request_joins_and_leaves_while_another_one_goes_on(engine: Engine) -> None:
    async with engine.open(["abc"], sampling=Sampling(40, 0.0)) as long:
        pieces = aiter(long)
        await anext(pieces)
        joined = await engine.generate(["bcdefgh", "p"], sampling=Sampling(3, 0.0))
        async for _ in pieces:
            pass
        (first,) = long.completions()

    assert first.tokens == uncached(SmallModel(), "abc", 40)[0]
    assert [one.tokens for one in joined] == [uncached(SmallModel(), text, 3)[0] for text in ("bcdefgh", "p")]


async def test_pieces_are_the_completion(engine: Engine) -> None:
    tokens: dict[int, list[int]] = {0: [], 1: []}
    ended = []
    async with engine.open(["abc"], 2, Sampling(12)) as stream:
        async for pieces in stream:
            for piece in pieces:
                tokens[piece.index] += piece.tokens
                ended += [piece.index] * piece.done
        completions = stream.completions()

    assert [tokens[0], tokens[1]] == [one.tokens for one in completions]
    assert sorted(ended) == [0, 1]


async def test_a_seed_decides_what_is_drawn_whatever_else_is_generated(engine: Engine) -> None:
    sampling = Sampling(16, seed=7)
    alone = await engine.generate(["abc"], 3, sampling)
    beside, _ = await asyncio.gather(
        engine.generate(["abc"], 3, sampling), engine.generate(PROMPTS, 2, Sampling(9))
    )
    others = await engine.generate(["abc"], 3, Sampling(16, seed=8))

    assert [one.tokens for one in beside] == [one.tokens for one in alone]
    assert [one.tokens for one in others] != [one.tokens for one in alone]
    assert len({tuple(one.tokens) for one in alone}) == 3


async def test_tokens_are_drawn_with_their_probabilities() -> None:
    many = Engine(SmallModel(), Letters(), limits=RequestLimits(concurrency=1000, max_n=3000))
    drawn = await many.generate(["abc"], 3000, Sampling(1, temperature=2.0))
    many.close()
    logits, _ = SmallModel()(torch.tensor([Letters().encode("abc")]))
    wanted = (logits[0, -1].detach() / 2).softmax(-1)

    counts = torch.bincount(torch.tensor([one.tokens[0] for one in drawn]), minlength=Letters.size)
    assert torch.allclose(counts / 3000, wanted, atol=0.04)
    assert all(one.logprobs[0] == pytest.approx(float(wanted[one.tokens[0]].log()), abs=1e-4) for one in drawn)


async def test_new_weights_are_used_and_completions_keep_the_step_with_which_they_began(engine: Engine) -> None:
    other = SmallModel(seed=1)
    async with engine.open(["abc"], sampling=Sampling(90, 0.0)) as stream:
        pieces = aiter(stream)
        await anext(pieces)
        await asyncio.to_thread(engine.swap, other.state_dict(), 5)
        after = (await engine.generate(["abc"], sampling=GREEDY))[0]
        async for _ in pieces:
            pass
        before = stream.completions()[0]

    assert (before.weights_step, after.weights_step, engine.step) == (0, 5, 5)
    assert after.tokens == uncached(other, "abc", GREEDY.max_tokens)[0]


async def test_weights_of_another_model_are_refused_whole(engine: Engine) -> None:
    state = SmallModel(seed=1).state_dict()
    lacking = {name: tensor for name, tensor in state.items() if name != "head.bias"}
    with pytest.raises(loom.WrongArguments, match=r"missing \['head.bias'\]"):
        engine.swap(lacking, 1)
    with pytest.raises(loom.WrongArguments, match=r"head.bias has the shape \[3\]"):
        engine.swap({**state, "head.bias": torch.zeros(3)}, 1)

    assert engine.step == 0
    assert (await engine.generate(["abc"], sampling=GREEDY))[0].tokens == uncached(SmallModel(), "abc", 24)[0]


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)  # the engine's thread tells nobody


class Held(SmallModel):
    """A model that computes a step only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.computing = threading.Event()
        self.go = threading.Semaphore(0)

    def forward(self, tokens: torch.Tensor, cache: object = None) -> object:  # type: ignore[override]
        self.computing.set()
        assert self.go.acquire(timeout=60)
        self.steps += 1
        return super().forward(tokens, cache)  # type: ignore[arg-type]


async def test_a_swap_waits_for_the_step_under_way_and_for_no_other() -> None:
    model = Held()
    engine = Engine(model, Letters())
    async with engine.open(["abc"], sampling=Sampling(30)) as stream:
        await asyncio.to_thread(model.computing.wait, 60)
        swap = asyncio.create_task(asyncio.to_thread(engine.swap, SmallModel(seed=1).state_dict(), 1))
        await until(lambda: engine._swaps)  # it waits for the lock
        assert not swap.done()
        model.go.release()
        await asyncio.wait_for(swap, 60)
        assert model.steps == 1
    model.go.release(50)
    engine.close()
    assert stream.rows[0].weights_step == 0


async def test_completions_of_a_client_that_left_are_generated_no_further() -> None:
    model = Held()
    engine = Engine(model, Letters(), limits=RequestLimits(concurrency=1))
    async with engine.open(["abc"] * 3, sampling=Sampling(1)):
        await asyncio.to_thread(model.computing.wait, 60)
    model.go.release()
    await until(lambda: not (engine.state.inflight or engine.state.waiting))
    engine.close()
    assert model.steps == 1


async def test_more_completions_wait_than_may() -> None:
    model = Held()
    engine = Engine(model, Letters(), limits=RequestLimits(concurrency=1, queue=2))
    async with engine.open(["abc"], sampling=Sampling(1)) as stream:
        await asyncio.to_thread(model.computing.wait, 60)
        async with engine.open(["a", "b"], sampling=Sampling(1)) as queued:
            with pytest.raises(loom.LimitReached, match="2 completions wait already"):
                engine.open(["c"], sampling=Sampling(1))
            assert (engine.state.inflight, engine.state.waiting) == (1, 2)
            model.go.release(3)
            for each in (stream, queued):
                async for _ in each:
                    pass
    engine.close()


class Fails(SmallModel):
    def forward(self, tokens: torch.Tensor, cache: object = None) -> object:  # type: ignore[override]
        logits, cache = super().forward(tokens, cache)  # type: ignore[arg-type]
        if tokens.shape[1] == 3:
            raise RuntimeError("out of memory")
        if tokens.shape[1] == 4:
            logits = logits * float("nan")
        return logits, cache


async def test_a_model_that_fails_ends_its_completions_and_not_the_engine() -> None:
    engine = Engine(Fails(), Letters())
    with pytest.raises(loom.LoomError, match="out of memory"):
        await engine.generate(["abc"], sampling=GREEDY)
    with pytest.raises(loom.LoomError, match="not finite"):
        await engine.generate(["abcd"], sampling=GREEDY)
    assert (await engine.generate(["ab"], sampling=GREEDY))[0].tokens
    engine.close()


@pytest.mark.parametrize(
    ("prompts", "n", "sampling", "reason"),
    [
        ([""], 1, GREEDY, "from 1 to 50 tokens, and this one 0"),
        (["a" * 51], 1, GREEDY, "from 1 to 50 tokens, and this one 51"),
        (["a" * 50], 1, Sampling(60), "the model reads at most 96 tokens"),
        ([], 1, GREEDY, "0 prompts with n=1 are 0"),
        (["a"] * 3, 3, GREEDY, "3 prompts with n=3 are 9"),
        (["a"], 0, GREEDY, "n is a whole number from 1 to 8, not 0"),
        (["a"], 1, Sampling(0), "max_tokens is a whole number from 1 to 80, not 0"),
        (["a"], 1, Sampling(81), "max_tokens is a whole number from 1 to 80, not 81"),
        (["a"], 1, Sampling(1, float("nan")), "temperature is a number from 0 to 100, not nan"),
        (["a"], 1, Sampling(1, -1.0), "temperature is a number from 0 to 100, not -1.0"),
    ],
)
async def test_what_exceeds_a_limit_is_refused_with_the_limit(
    prompts: list[str], n: int, sampling: Sampling, reason: str
) -> None:
    engine = Engine(
        SmallModel(), Letters(), limits=RequestLimits(max_prompt=50, max_tokens=80, max_n=8, max_completions=8)
    )
    with pytest.raises(loom.WrongArguments, match=reason):
        engine.open(prompts, n, sampling)
    engine.close()


async def test_a_closed_engine_ends_what_was_under_way_and_takes_no_more() -> None:
    model = Held()
    engine = Engine(model, Letters())
    waiting = asyncio.create_task(engine.generate(["abc"], sampling=GREEDY))
    await asyncio.to_thread(model.computing.wait, 60)
    model.go.release(30)
    await asyncio.to_thread(engine.close)
    results: list[list[Completion] | BaseException] = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(results[0], list) or "the engine was closed" in str(results[0])
    with pytest.raises(loom.WrongState, match="closed"):
        engine.open(["abc"], sampling=GREEDY)


def test_letters_are_what_they_were() -> None:
    assert Letters().decode(Letters().encode(LETTERS)) == LETTERS
