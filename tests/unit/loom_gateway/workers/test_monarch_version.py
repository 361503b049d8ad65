"""The address of a worker's service, by the version of Monarch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import pytest

from loom_gateway.workers import monarch_env as module
from loom_gateway.workers.monarch_env import monarch_version, service_address

WORKER = "tcp://10.0.0.5:26600"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    monarch_version.cache_clear()
    yield
    monarch_version.cache_clear()


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(module, "version", {"torchmonarch": version}.__getitem__)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.7.0", (0, 7)), ("0.8.0.dev20261027", (0, 8)), ("0.8.0rc1", (0, 8)), ("0.8", (0, 8)), ("1.10.2", (1, 10))],
)
def test_the_version_is_that_of_the_package_also_of_a_pre_release(
    monkeypatch: pytest.MonkeyPatch, version: str, expected: tuple[int, int]
) -> None:
    installed(monkeypatch, version)
    assert monarch_version() == expected


def test_a_machine_without_monarch_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(metadata.PackageNotFoundError, match="torchmonarch"):
        monarch_version()


def test_monarch_0_7_takes_an_address_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.7.3")
    assert service_address(WORKER) == WORKER


@pytest.mark.parametrize("version", ["0.8.0.dev20261027", "0.8.1", "1.0.0"])
def test_later_monarchs_need_the_identity_of_the_service(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, version)
    assert service_address(WORKER) == f"service<1>@{WORKER}"


def test_all_addresses_of_one_worker_name_one_service(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "0.8.0")
    by_name, by_address = service_address("tcp://worker-0:26600"), service_address(WORKER)
    assert by_name.split("@")[0] == by_address.split("@")[0]
