"""The weaver through TLS, through a prefix, and where there are no WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

import loom
from loom.weaver.views import Away, Delta, DeviceInfo, ReplicaInfo, Snapshot, WeaverEvent
from loom_proxy.local import LocalCluster
from loom_proxy.weaver import watch as weaver_feed
from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.watch import poll
from tests.support.gateways import BOUND
from tests.support.network.http_proxy import Fault, HttpProxy
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for this host, its key, and that of its authority."""
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "certificate.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return folder


@pytest.fixture(scope="module")
def secure(ca: Path) -> Iterator[LocalCluster]:
    options = ["--tls-cert", str(ca / "certificate.pem"), "--tls-key", str(ca / "key.pem")]
    with LocalCluster(1, gateway_options=options) as cluster:
        yield cluster


def test_over_tls(secure: LocalCluster, ca: Path) -> None:
    weaver = WeaverProxy(secure.url, secure.token, str(ca / "ca.pem"))
    await_weaver(weaver)

    assert secure.url.startswith("wss://")
    assert isinstance(next(weaver.watch(BOUND)), Snapshot)
    with loom.connect(secure.url, secure.token, ca=str(ca / "ca.pem")) as job:
        assert job.weaver.status()["replicas"] == {}


def test_whom_nobody_vouches_for_is_not_trusted(secure: LocalCluster) -> None:
    weaver = WeaverProxy(secure.url, secure.token)

    with pytest.raises(loom.UntrustedGateway):
        weaver.status()
    with pytest.raises(loom.UntrustedGateway):
        next(weaver.watch(BOUND))


def test_where_nobody_answers() -> None:
    weaver = WeaverProxy("ws://127.0.0.1:9", "a token")

    with pytest.raises(loom.GatewayUnreachable):
        weaver.status()
    with pytest.raises(loom.GatewayUnreachable):
        next(weaver.watch(BOUND))


@pytest.mark.parametrize("status", [None, 403, 501])
def test_without_websockets_it_is_asked_again_and_again(
    cluster: LocalCluster, status: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weaver_feed, "EVERY", 0.2)

    def decide(method: str, target: str) -> Fault | int | None:
        if not target.startswith("/ws/"):
            return None
        return Fault.LOSE_REQUEST if status is None else status

    direct = WeaverProxy(cluster.url, cluster.token)
    await_weaver(direct)
    with HttpProxy(int(cluster.url.rpartition(":")[2]), decide) as proxy:
        url = f"ws://127.0.0.1:{proxy.port}"
        weaver = WeaverProxy(url, cluster.token)
        updates = weaver.watch(BOUND)
        assert isinstance(next(updates), Snapshot)

        with training(direct.address(), f"train_{status}"):
            seen: list[object] = []
            for update in updates:
                seen.append(update)
                if isinstance(update, Delta) and update.replicas.get(f"train_{status}", {}).get("step"):
                    break

        assert "registered" in [one.kind for one in seen if isinstance(one, WeaverEvent)]
        with pytest.raises(loom.NotAGateway):
            next(WeaverProxy(url, cluster.token, transport="websocket").watch(BOUND))


async def test_coroutines_poll_too(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaver_feed, "EVERY", 0.2)
    weaver = WeaverProxy(cluster.url, cluster.token, transport="http")
    await asyncio.to_thread(await_weaver, weaver)
    followed = weaver.aio.events(follow=True, limit=1)
    first = await anext(followed)
    await weaver.aio.set_policy("polled", "stop")

    news = await asyncio.wait_for(anext(followed), BOUND)

    assert (news.id, news.kind) == (first.id + 1, "policy")


def test_a_weaver_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weaver_feed, "EVERY", 0.0)
    replica = ReplicaInfo("train_0", "running", step=1)
    device = DeviceInfo("GPU-0", "active", status={"power": 1})
    looks: list[Snapshot | Exception] = [
        Snapshot({"event": 1}, {"train_0": replica}, {}),
        Snapshot({"event": 2}, {"train_0": ReplicaInfo("train_0", "running", step=2)}, {"GPU-0": device}),
        loom.WeaverUnavailable("it died"),
        loom.WeaverUnavailable("it died"),
        Snapshot({"event": 5}, {}, {}),
        Snapshot({"event": 6}, {}, {}),
    ]
    happened = {1: [WeaverEvent(2, 0.0, "policy", None, {})], 5: [WeaverEvent(6, 0.0, "policy", None, {})]}

    def look() -> Snapshot:
        found = looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    updates = poll(look, lambda after: iter(happened.get(after, [])))
    seen = [next(updates) for _ in range(6)]

    assert [type(update).__name__ for update in seen] == [
        "Snapshot",
        "WeaverEvent",
        "Delta",
        "Away",
        "Snapshot",
        "WeaverEvent",
    ]
    delta = seen[2]
    assert isinstance(delta, Delta)
    assert delta.replicas["train_0"]["step"] == 2
    assert delta.devices == {"GPU-0": {"power": 1}}
    assert isinstance(seen[3], Away)
