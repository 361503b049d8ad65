"""`connection_mode`: whether an object with pods of its own is Loom's, in a session, or served by Kubetorch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import loom
from loom_proxy.remote import deployments
from loom_proxy.remote.deployments import Deployment, service_of
from loom_proxy.remote.kubetorch import KubetorchFunction, KubetorchObject
from loom_proxy.remote.objects import RemoteFunction, RemoteObject
from tests.support.ordinary_classes import Shop, power

kt = pytest.importorskip("kubetorch")

URL = "http://localhost:32300/ns/shop"


class Mesh:
    """Stands in for the actors of a session, which have made their objects."""

    def __len__(self) -> int:
        return 1

    class make:
        @staticmethod
        def call() -> Any:
            return type("Made", (), {"get": staticmethod(lambda timeout=None: None)})()

        call_one = call

    run = make


@pytest.fixture
def deployed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Deployment]]:
    """What is deployed, and how; nothing is, in truth."""
    done: list[tuple[str, Deployment]] = []

    def in_session(deployment: Deployment, *args: Any) -> Any:
        done.append(("session", deployment))
        return deployment.name, Mesh(), lambda: None

    def by_kubetorch(deployment: Deployment, kind: str, *args: Any) -> Any:
        done.append((kind, deployment))
        return service_of(at(URL), None, deployment.target), lambda: None

    monkeypatch.setattr(Deployment, "in_session", in_session)
    monkeypatch.setattr(Deployment, "by_kubetorch", by_kubetorch)
    return done


def at(url: str) -> Any:
    fields = {"MODULE_TYPE": "cls", "callable_name": "Shop", "serialization": "json", "base_endpoint": url}
    return type("Module", (), fields)()


@pytest.mark.parametrize("mode", [None, "websocket"])
def test_a_class_or_function_on_a_compute_is_put_into_a_session(
    deployed: list[tuple[str, Deployment]], mode: str | None
) -> None:
    compute = kt.Compute(cpus=1)

    shop = loom.cls(Shop, "shop").to(compute, connection_mode=mode)
    function = loom.fn(power, "power").to(compute, connection_mode=mode)

    assert (type(shop), type(function)) == (RemoteObject, RemoteFunction)
    assert [(how, one.name, one.compute) for how, one in deployed] == [
        ("session", "shop", compute),
        ("session", "power", compute),
    ]


def test_over_http_kubetorch_serves_it(deployed: list[tuple[str, Deployment]]) -> None:
    compute = kt.Compute(cpus=1)

    shop = loom.cls(Shop, "shop").to(compute, connection_mode="http")
    function = loom.fn(power, "power").to(compute, connection_mode="http")

    assert (type(shop), type(function)) == (KubetorchObject, KubetorchFunction)
    assert [how for how, _ in deployed] == ["cls", "fn"]


@pytest.mark.parametrize(("mode", "of"), [("websocket", RemoteObject), ("http", KubetorchObject)])
def test_the_same_is_awaited_with_either_mode(deployed: list[tuple[str, Deployment]], mode: str, of: Any) -> None:
    shop = asyncio.run(loom.cls(Shop, "shop").to_async(kt.Compute(cpus=1), connection_mode=mode))

    assert type(shop) is of
    assert len(deployed) == 1


def test_another_mode_is_named(deployed: list[tuple[str, Deployment]]) -> None:
    with pytest.raises(loom.WrongConnectionMode, match="'pigeon': give 'websocket' or 'http'"):
        loom.cls(Shop).to(kt.Compute(cpus=1), connection_mode="pigeon")

    assert deployed == []


def test_a_function_is_looked_for_by_the_prefixes_of_its_service(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(deployments, "find_service", lambda *args: asked.append(args))
    monkeypatch.setattr(Deployment, "in_session", lambda one, *args: (one.name, Mesh(), lambda: None))

    loom.fn(power, "power").to(kt.Compute(cpus=1, namespace="ns"), get_if_exists=True, reload_prefixes="ann")

    assert asked == [("power", "ns", ["ann"])]
