"""Machines for the tests of this folder, and a session and a project for each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loom
from loom.process.child import Child, python
from loom.process.listen import free_ports
from tests.integration.sync.projects import Machines, Project


@pytest.fixture(scope="package")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("machines")
    caches = [folder / name for name in ("gateway", "host-0", "host-1")]
    addresses = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
    options = ["--host", "127.0.0.1", "--port", "0", *(word for a in addresses for word in ("--worker", a))]

    def environment(cache: Path) -> dict[str, str]:
        return {**os.environ, "LOOM_CACHE": str(cache), "LOOM_SYNC_LIMIT": str(64 << 20)}

    command = python("loom_gateway", *options, "--exit-with-parent")
    children = [Child("the gateway", command, environment(caches[0]))]
    for address, cache in zip(addresses, caches[1:], strict=True):
        command = python("loom_gateway.workers.host", "--address", address, "--exit-with-parent")
        children.append(Child(address, command, environment(cache)))
    try:
        ready = [child.ready.result(60) for child in children]
        yield Machines(ready[0]["url"], ready[0]["token"], caches[0], caches[1:])
    finally:
        for child in children:
            child.ask_to_end()
        for child in children:
            child.end(5.0)


@pytest.fixture(scope="module")
def shared(machines: Machines) -> Iterator[loom.Job]:
    """One session for those tests of a module that sync nothing into it."""
    with loom.connect(machines.url, machines.token) as connected:
        yield connected


@pytest.fixture
def job(machines: Machines) -> Iterator[loom.Job]:
    with loom.connect(machines.url, machines.token) as connected:
        yield connected


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    made = Project(tmp_path / "project")
    monkeypatch.syspath_prepend(made.folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield made
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
