"""The draining file of a worker whose node Kubernetes takes away."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.process.host_notices import DRAINING_VARIABLE, ENDING_VARIABLE, draining_reason, leaving_reason
from loom_gateway.workers import node_taints
from loom_gateway.workers.node_taints import LEAVING, DrainingFile, OwnNode
from tests.support.node_api import NODE, NodeApi, node_api


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeApi]:
    with node_api(tmp_path_factory.mktemp("account")) as api:
        yield api


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DRAINING_VARIABLE, str(tmp_path / "draining"))
    monkeypatch.delenv(ENDING_VARIABLE, raising=False)
    return tmp_path / "draining"


@pytest.fixture
def file(api: NodeApi, path: Path, monkeypatch: pytest.MonkeyPatch) -> DrainingFile:
    monkeypatch.setattr(node_taints, "SERVICE_ACCOUNT", api.folder)
    api.taint()
    api.allowed = True
    node = OwnNode.of(NODE, api.environment)
    assert node is not None
    return DrainingFile(node, str(path))


@pytest.mark.parametrize("key", LEAVING)
def test_a_node_that_is_taken_away_is_drained_until_it_is_not(api: NodeApi, file: DrainingFile, key: str) -> None:
    api.taint("nvidia.com/gpu", key)
    file.look()
    drained = draining_reason()
    api.taint("nvidia.com/gpu")
    file.look()

    assert drained == f"its node {NODE} has the taint {key}"
    assert draining_reason() == ""


@pytest.mark.parametrize("key", ["node.kubernetes.io/memory-pressure", "nvidia.com/gpu", "spot"])
def test_other_taints_say_nothing_of_a_nodes_end(api: NodeApi, file: DrainingFile, path: Path, key: str) -> None:
    api.taint(key)
    file.look()

    assert not path.exists()


def test_an_api_that_refuses_is_told_once_and_changes_nothing(
    api: NodeApi, file: DrainingFile, caplog: pytest.LogCaptureFixture
) -> None:
    api.taint(LEAVING[0])
    file.look()
    api.allowed = False
    with caplog.at_level(logging.WARNING):
        file.look()
        file.look()

    (told,) = caplog.messages
    assert f'nodes "{NODE}" is forbidden' in told
    assert "needs the right to get nodes" in told
    assert draining_reason()


def test_without_the_token_of_a_service_account_no_node_is_read(
    api: NodeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_taints, "SERVICE_ACCOUNT", tmp_path)
    assert OwnNode.of(NODE, api.environment) is None
    assert OwnNode.of(NODE, {}) is None


def test_the_end_of_a_worker_goes_before_the_drain_of_its_host(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.touch()
    monkeypatch.setenv(ENDING_VARIABLE, str(path.with_name("ending")))
    before = leaving_reason()
    path.with_name("ending").write_text("its worker was told to end: SIGTERM\nmore")

    assert before == draining_reason() == "whoever runs it drains it"
    assert leaving_reason() == "its worker was told to end: SIGTERM"
