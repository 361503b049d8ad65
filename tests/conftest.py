"""One cluster of real workers for the whole run, with a session for each test or for the tests of a module."""

from __future__ import annotations

import functools
import gc
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

import loom
from loom.mutual_auth import over_http
from loom_proxy.local import LocalCluster
from tests.support import slow

# A shell's background job ignores SIGINT, and one under nohup SIGHUP. So would the programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


# An example takes as long as a busy machine makes it.
hypothesis.settings.register_profile("loom", deadline=None)
hypothesis.settings.load_profile("loom")

KINDS = ("system", "integration", "unit")
"""Folders of tests. What is in one has a marker of its name; those that take longest begin first."""


@functools.cache
def _kind(path: Path) -> str:
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return folder if folder in KINDS else "integration"


def pytest_addoption(parser: pytest.Parser) -> None:
    slow.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--slow-record"):
        config.pluginmanager.register(slow.Recorder(), "slow-recorder")
    if hasattr(config.option, "loadscopereorder"):  # xdist begins with the files that have the most tests
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from the million objects of thousands of tests, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow.select(config, items)
    for item in items:
        item.add_marker(_kind(item.path))
        # Elsewhere Monarch, Kubetorch and programs that were killed leave things open.
        left_open = ["ignore::ResourceWarning", "default::pytest.PytestUnraisableExceptionWarning"]
        excepted = [] if _kind(item.path) == "unit" else left_open
        usual = pytest.mark.filterwarnings("error", *excepted, *config.getini("filterwarnings"))
        item.add_marker(usual, append=False)  # a test's own marks prevail
    # So that no process of xdist has a long file left when the others are done.
    items.sort(key=lambda item: KINDS.index(_kind(item.path)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Note what its fixtures have done, which is not the test's doing."""
    global _was_root_client
    _was_root_client = _is_root_client()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Fail the test that breaks what others use. No fixture: thousands of tests would set it up."""
    # What a test leaves open is found while it still runs, not in the unit test that comes next.
    if nextitem is not None and _kind(nextitem.path) == "unit" != _kind(item.path):
        gc.collect()
    result = yield
    _check_shared_clusters()
    _check_root_client(item)
    return result


@pytest.fixture(scope="session", autouse=True)
def _no_contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the gateways of whoever runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_forwarded_ports() -> Iterator[None]:
    """Let a module's servers have ports that `kubectl` forwarded in the tests of another."""
    yield
    over_http._forwarded.clear()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a file of contexts, which is not there yet. There are no variables and no keyring."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    for name in ("LOOM_URL", "LOOM_TOKEN", "LOOM_CA", "LOOM_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "config" / "loom"


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """Two workers and a gateway. For tests that break none of them."""
    with LocalCluster(hosts=2) as running:
        _shared.append(running)
        yield running
        _shared.clear()


_shared: list[LocalCluster] = []


def _check_shared_clusters() -> None:
    """Fail the test in which a part of the shared cluster ended, and only that one."""
    for running in _shared:
        if broken := running.ended():
            running.close()
            running.start()
            pytest.fail(f"the cluster that all tests use was broken: {broken}")


def _is_root_client() -> bool:
    """Return whether Monarch has made this process a root client, which prefixes every later line of its log."""
    actors = sys.modules.get("monarch._src.actor.actor_mesh")
    return actors is not None and actors._client_context._val is not None


_was_root_client = False


def _check_root_client(item: pytest.Item) -> None:
    if not _was_root_client and _is_root_client() and _kind(item.path) == "unit":
        pytest.fail("the test made its process a root client of Monarch: run that part in a process of its own")


@pytest.fixture
def job(cluster: LocalCluster) -> Iterator[loom.Job]:
    """A session on the cluster, closed after the test."""
    with loom.connect(cluster.url, cluster.token) as connected:
        yield connected


@pytest.fixture(scope="module")
def shared(cluster: LocalCluster) -> Iterator[loom.Job]:
    """One session on the cluster for those tests of a module that need none of their own, which takes seconds."""
    with loom.connect(cluster.url, cluster.token) as connected:
        yield connected


@contextmanager
def ending_new_meshes(job: loom.Job) -> Iterator[None]:
    """End the meshes that a block adds to a session."""
    before = set(job.meshes.values())
    yield
    made = [mesh for mesh in job.meshes.values() if mesh not in before]
    # One after the other: Monarch may not answer a stop of actors whose processes it stops (torchmonarch 0.7).
    for kind in (loom.ProcMeshProxy, loom.ActorMeshProxy):
        stopping = [mesh.stop() for mesh in made if isinstance(mesh, kind)]
        for one in stopping:
            one.exception(60)  # of a mesh that could not be made


@pytest.fixture
def tidied(shared: loom.Job) -> Iterator[loom.Job]:
    """The session of the module; the meshes that the test spawns in it end with the test."""
    with ending_new_meshes(shared):
        yield shared


@pytest.fixture
def own_cluster() -> Iterator[LocalCluster]:
    """A cluster for a test that breaks it."""
    with LocalCluster(hosts=2) as running:
        yield running
