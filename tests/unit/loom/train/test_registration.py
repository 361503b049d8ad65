"""A manager of torchft that is registered: what its steps tell the weaver, with a real lighthouse and weaver."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from loom.errors import WrongArguments
from loom.process.listen import open_store
from loom.threadlet import Threadlet
from loom.train import register
from tests.unit.loom.threadlet.fake_weaver import Loop, eventually
from tests.unit.loom.weaver.raw_threadlet import BOUND, WeaverProcess, running_weaver

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated"),  # torchft's own
    pytest.mark.filterwarnings("ignore:unclosed <socket"),  # its HTTP server's
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

Make = Callable[..., Any]


@pytest.fixture
def weaver() -> Iterator[WeaverProcess]:
    with running_weaver() as running:
        yield running


@pytest.fixture
def manager() -> Iterator[Make]:
    """Makes managers of one group each, with a lighthouse."""
    from torchft.coordination import LighthouseServer
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=20)
    made = []

    def make(replica_id: str | None = "train_0", world_size: int = 1) -> Any:
        store = open_store("127.0.0.1")
        wait = timedelta(seconds=BOUND)
        made.append(
            (
                Manager(
                    pg=ProcessGroupGloo(timeout=wait),
                    load_state_dict=lambda state: None,
                    state_dict=lambda: {},
                    min_replica_size=1,
                    timeout=wait,
                    rank=0,
                    world_size=world_size,
                    store_addr="127.0.0.1",
                    store_port=store.port,
                    lighthouse_addr=f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}",
                    replica_id=replica_id,
                    hostname="127.0.0.1",
                ),
                store,
            )
        )
        return made[-1][0]

    yield make
    for one, _ in made:
        one.shutdown(wait=False)
        one._checkpoint_transport._server.server_close()  # torchft leaves its socket open
    lighthouse.shutdown()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEAVER", "REPLICA", "GROUP"):
        monkeypatch.delenv(f"LOOM_{name}", raising=False)


def connected(manager: Any, weaver: WeaverProcess) -> Threadlet:
    threadlet = register(manager, weaver=weaver.address, config={"rate": 0.5})
    eventually(lambda: threadlet.connected)
    return threadlet


def test_steps_that_count_and_steps_that_do_not_are_told_apart(weaver: WeaverProcess, manager: Make) -> None:
    one = manager()
    connected(one, weaver)
    gateway = weaver.gateway()

    for fails in (False, True, False):
        one.start_quorum()
        if fails:
            one.report_error(RuntimeError("a peer is gone"))
        assert one.should_commit() is not fails

    replica = eventually(lambda: reported(gateway, commits=2.0))
    assert (replica["step"], replica["group"], replica["config"]) == (2, "train", {"rate": 0.5})
    assert replica["metrics"] == {
        "participants": 1.0,
        "batches_committed": 2.0,
        "commits": 2.0,
        "failed_commits": 1.0,
    }

    one.shutdown(wait=False)
    eventually(lambda: gateway.ask("replica", id="train_0")["state"] == "finished")


def reported(gateway: Any, **metrics: float) -> dict[str, Any] | None:
    replica: dict[str, Any] = gateway.ask("replica", id="train_0")
    return replica if metrics.items() <= replica["metrics"].items() else None


def test_a_paused_group_begins_no_step(weaver: WeaverProcess, manager: Make) -> None:
    one = manager()
    threadlet = connected(one, weaver)
    gateway = weaver.gateway()
    loop = Loop(lambda number: one.start_quorum() or one.should_commit())
    assert loop.step() == 0
    paused = gateway.ask("command", kind="pause", target="train_0")["id"]
    eventually(lambda: threadlet._pending, "the pause")
    loop.go()
    assert gateway.ask("command_state", id=paused, timeout=BOUND)["done"]
    assert loop.done.empty()

    gateway.ask("command", kind="resume", target="train_0")

    assert loop.done.get(timeout=BOUND) == 1
    assert one.current_step() == 2
    loop.end()


@pytest.mark.parametrize(
    ("replica_id", "world_size", "replica", "group"),
    [
        ("train_ddp_12", 1, "train_ddp_12", "train_ddp"),
        ("train_ddp_1", 2, "train_ddp_1_0", "train_ddp"),
        ("7", 1, "7", "7"),
    ],
)
def test_the_replica_and_its_job_are_named_after_the_manager(
    manager: Make, replica_id: str, world_size: int, replica: str, group: str
) -> None:
    threadlet = register(manager(replica_id, world_size))

    assert (threadlet.replica_id, threadlet.group) == (replica, group)


def test_the_environment_and_the_script_name_the_job_before_the_manager(
    manager: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_GROUP", "from_env")
    monkeypatch.setenv("LOOM_REPLICA", "named")

    assert register(manager()).group == "from_env"
    assert register(manager(), group="mine").group == "mine"
    assert register(manager(None)).replica_id == "named"


def test_a_manager_is_registered_once(manager: Make) -> None:
    one = manager()
    register(one)

    with pytest.raises(WrongArguments, match="the manager of 'train_0' is registered already"):
        register(one)
    gc.collect()
    register(manager())


def test_what_is_no_manager_is_not_registered() -> None:
    not_one: Any = object()
    with pytest.raises(WrongArguments, match="register takes a torchft Manager, not object"):
        register(not_one)
