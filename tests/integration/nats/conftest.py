"""One cluster for the module, a NATS server, a bridge and training for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import nats
import pytest
from nats.aio.client import Client

from loom.token_file import TokenFile
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.nats.bridges import Bridge, group_of, states
from tests.integration.nats.nats_server import NatsServer, require_nats_server
from tests.support.gateways import await_true
from tests.support.weaver_training import Training, training
from tests.support.weavers import await_weaver


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """More tokens of the cluster's."""
    return TokenFile(tmp_path_factory.mktemp("bridge") / "tokens.json")


@pytest.fixture(scope="module")
def cluster(tokens: TokenFile) -> Iterator[LocalCluster]:
    require_nats_server()
    with LocalCluster(1, gateway_options=["--tokens", str(tokens.path)]) as running:
        yield running


@pytest.fixture(scope="module")
def weaver(cluster: LocalCluster) -> WeaverProxy:
    return WeaverProxy(cluster.url, cluster.token)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    require_nats_server()
    with NatsServer() as running:
        yield running


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Client]:
    """A monitoring system."""
    connected = await nats.connect(server.url, reconnect_time_wait=0, max_reconnect_attempts=-1)
    yield connected
    await connected.close()


@pytest.fixture
def bridge(cluster: LocalCluster, server: NatsServer) -> Iterator[Bridge]:
    with Bridge(cluster.url, cluster.token, server.url) as running:
        yield running


@pytest.fixture
def trainers(weaver: WeaverProxy, request: pytest.FixtureRequest) -> Iterator[list[Training]]:
    """Two processes that train, in a group of the test's own; see `names`."""
    group = group_of(request.node.name)
    names = [f"{group}_0", f"{group}_1"]
    with training(await_weaver(weaver), *names, group=group) as processes:
        await_true(lambda: all(states(weaver).get(name) == "running" for name in names))
        yield processes


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """The group of the test's processes. They are group_0 and group_1."""
    return group_of(request.node.name)
