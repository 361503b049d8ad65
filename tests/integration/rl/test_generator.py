"""A generator in a session: real Monarch actors, called from the laptop and from `job.run`, and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import loom
from loom.rl.generation import weight_files as weights
from loom.rl.generation.completions import Completion
from loom.rl.generation.generator import Generator
from loom.rl.generation.weight_client import weights_client
from loom_proxy.local import LocalCluster
from tests.support.small_models import Letters, SmallModel

BOUND = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        weights.save(SmallModel(seed=step).state_dict(), {}, made / "weights", step)
    return made


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[loom.Job]:
    with loom.connect(cluster.url, cluster.token) as job:
        yield job


@pytest.fixture(scope="module")
def generators(shared: loom.Job, folder: Path) -> Any:
    procs = shared.hosts.spawn_procs(per_host={"gpus": 1}, name="generators")
    spawned = procs.spawn("generators", Generator, SmallModel, Letters(), max_tokens=12, folder=str(folder))
    spawned.initialized.get(timeout=BOUND)
    return spawned


@pytest.fixture(scope="module")
def generator(generators: Any) -> Any:
    return generators.slice(hosts=0, gpus=0)


def test_it_completes_prompts_on_every_host(generators: Any) -> None:
    found: list[list[Completion]] = list(generators.generate.call(["abc", "p"], 2).get(timeout=BOUND).values())

    assert [[one.prompt for one in each] for each in found] == [["abc", "abc", "p", "p"]] * 2
    for one in [*found[0], *found[1]]:
        assert isinstance(one, Completion)
        assert len(one.tokens) == len(one.logprobs) <= 12
    assert found[0] != found[1], "each rank draws for itself"


def test_it_streams_pieces_to_a_port(shared: loom.Job, generator: Any) -> None:
    port, receiver = shared.channel()
    whole = generator.stream.call_one(port, ["abc"], temperature=0.0).get(timeout=BOUND)
    tokens = []
    while True:
        piece = receiver.recv().get(timeout=BOUND)
        tokens += piece.tokens
        if piece.done:
            break
    assert tokens == whole[0].tokens


def test_weights_come_by_path_by_step_and_by_message(generator: Any, folder: Path) -> None:
    greedy = {}
    for step, by in ((1, {}), (2, {"path": str(weights.path_of(folder / "weights", 2))})):
        answer = generator.update_weights.call_one(step, **by).get(timeout=BOUND)
        assert answer["status"] == "ok"
        assert answer["rpc_ms"] > 0
        assert generator.step.call_one().get(timeout=BOUND) == step
        greedy[step] = generator.generate.call_one(["abc"], temperature=0.0).get(timeout=BOUND)[0].tokens
    state = SmallModel(seed=1).state_dict()
    generator.update_weights.call_one(5, state=state).get(timeout=BOUND)
    by_message = generator.generate.call_one(["abc"], temperature=0.0).get(timeout=BOUND)[0]
    assert by_message.tokens == greedy[1] != greedy[2]
    assert by_message.weights_step == 5


def test_what_goes_wrong_is_raised_where_it_was_asked_for(generator: Any) -> None:
    for call, kind, text in (
        (generator.generate.call_one(["abc"], max_tokens=0), loom.WrongArguments, "max_tokens is a whole number"),
        (generator.update_weights.call_one(77), loom.CheckpointBroken, "no such folder"),
        (generator.update_weights.call_one(1, path="x", state={}), loom.WrongArguments, "not by both"),
    ):
        with pytest.raises(loom.ActorError) as caught:
            call.get(timeout=BOUND)
        assert isinstance(caught.value.exception, kind)
        assert text in str(caught.value.exception)


async def test_an_order_on_the_lane_that_cannot_be_followed_is_named(generator: Any) -> None:
    with pytest.raises(loom.LoomError, match=r"a generator cannot load the weights of step 77: .*no such folder"):
        await weights_client("lane").update([generator], 77)


def test_its_url_is_all_that_a_client_needs(generator: Any) -> None:
    url = generator.serve.call_one(admin_port=0).get(timeout=BOUND)
    admin = generator.admin_url.call_one().get(timeout=BOUND)

    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 3}, timeout=BOUND)
    loaded = httpx.post(f"{admin}/update_weights", json={"step": 2}, timeout=BOUND)

    assert url == generator.serve.call_one().get(timeout=BOUND)
    assert len(answer.json()["choices"]) == 1
    assert loaded.json()["step"] == 2
    engine, serving = generator.state.call_one().get(timeout=BOUND)
    assert (engine.inflight, engine.step) == (0, 2)
    assert serving.accept_queue == 0


def orders(generators: Any) -> list[tuple[str, float, float]]:
    """Order weights in each of the three ways, from the cluster."""
    from loom.rl.generation.weight_client import shared_client, weights_client

    actors = [generators.slice(hosts=host, gpus=0) for host in range(2)]
    urls = [actor.serve.call_one().get(timeout=BOUND) for actor in actors]

    async def all_ways() -> list[tuple[str, float, float]]:
        found = []
        async with shared_client() as client:
            for via in ("shared", "admin", "lane"):
                timings = await weights_client(via, client).update(actors if via == "lane" else urls, 1)
                found += [(via, one.rpc_ms, one.queue_ms) for one in timings]
        return found

    return asyncio.run(all_ways())


@pytest.mark.slow
def test_all_three_ways_load_weights_from_a_run(shared: loom.Job, generators: Any) -> None:
    found = shared.run(orders, generators)
    assert [via for via, _, _ in found] == ["shared", "shared", "admin", "admin", "lane", "lane"]
    assert all(rpc_ms > 0 and queue_ms >= 0 for _, rpc_ms, queue_ms in found)
    assert set(generators.step.call().get(timeout=BOUND).values()) == {1}
