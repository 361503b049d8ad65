"""The ways to order weights: each says how long it took, and where none can be given or taken, that is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom.rl.generation import weight_files as weights
from loom.rl.generation.weight_client import AdminWeights, shared_client, weights_client
from loom.tracing.spans import listen
from tests.support.small_models import SmallModel
from tests.unit.loom.rl.generation.test_http_servers import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    weights.save(SmallModel(seed=1).state_dict(), {}, tmp_path, 3)
    yield made
    made.close()


@pytest.mark.guarantees(
    "rl serving",
    "An order to load weights says its `rpc_ms`; one on the shared client waits for a connection, and one "
    "on its own does not",
)
@pytest.mark.parametrize("via", ["shared", "admin"])
async def test_an_order_over_http_is_timed(
    via: str, server: Server, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="httpx")
    loom.tracing.configure(lines=True)
    async with shared_client() as client:
        (timing,) = await weights_client(via, client).update([server.url], 3)
    loom.tracing.configure(lines=False)

    assert timing.wall_ms == pytest.approx(timing.rpc_ms + timing.queue_ms, abs=0.01)
    assert timing.rpc_ms > 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines() if line.startswith(f"[weights][{timing.trace}]")] == [
        "client.send", "server.recv", "rpc.start", "rpc.done", "client.done"
    ]  # fmt: skip
    token = server.url.split(":")[2].split("@")[0]
    assert token not in out + caplog.text
    assert "/update_weights" in caplog.text, "httpx logs URLs"
    assert server.engine.step == 3


@pytest.mark.guarantees(
    "rl serving",
    "An order to load weights says its `rpc_ms`; one on the shared client waits for a connection, and one "
    "on its own does not",
)
async def test_an_order_over_the_shared_client_waits_for_a_connection_and_one_of_its_own_does_not(
    server: Server,
) -> None:
    waits: dict[object, object] = {}
    ended = listen(lambda one: waits.update({one["trace"]: one.get("pool_ms")}))
    async with shared_client(connections=1) as client:
        async with client.stream("GET", f"{server.url}/v1/models"):
            waiting = asyncio.create_task(weights_client("shared", client).update([server.url], 3))
            (own,) = await weights_client("admin").update([server.url], 3)
            assert not waiting.done()
            assert server.engine.step == 3
        (shared,) = await waiting
    ended()
    assert min(shared.queue_ms, own.queue_ms) >= 0
    assert waits[own.trace] < waits[shared.trace] <= shared.queue_ms  # type: ignore[operator]


async def test_a_generator_that_cannot_load_or_does_not_answer_is_named(server: Server) -> None:
    with pytest.raises(loom.LoomError, match=r"http://[^@]*/update_weights answers 409: .*no such folder"):
        await AdminWeights().update([server.url, server.url], 9)
    with pytest.raises(loom.Unavailable, match=r"http://127.0.0.1:1/update_weights does not answer: ConnectError"):
        await AdminWeights().update(["http://loom:secret@127.0.0.1:1", server.url], 3)
    assert server.engine.step == 3, "the other one has loaded them"


def test_a_way_that_does_not_exist_is_refused() -> None:
    with pytest.raises(loom.WrongArguments, match="one of shared, admin, lane, not 'pigeon'"):
        weights_client("pigeon")
    with pytest.raises(loom.WrongArguments, match="needs the HTTP client"):
        weights_client("shared")
