"""Several users of one weaver: what is one's own, what a key grants, and what an admin can do for all."""

from __future__ import annotations

import json
import socket
from typing import Any

import msgpack
import pytest

from loom.control.frame import pack
from loom.control.latencies import BOUNDS
from loom.control.operations import OPERATIONS, SetPolicy
from loom.errors import UnsafeStateFolder
from loom.token_file import ADMIN
from loom.weaver.device_failures import Action
from loom.weaver.keys import EVERYONE, Grant, Keys
from loom.weaver.server.server import monotonic_clock
from loom.weaver.server.users import Users
from loom.weaver.storage.store import Store
from tests.unit.loom.weaver.raw_threadlet import (
    BOUND,
    GPU,
    RawGateway,
    RawThreadlet,
    Refused,
    WeaverProcess,
)


def gateway_for(weaver: WeaverProcess, user: str) -> RawGateway:
    gateway = weaver.gateway()
    gateway.user = user
    return gateway


def session_of(weaver: WeaverProcess, user: str, session: str) -> RawGateway:
    return weaver.gateway(weaver.keys.of(user, session))


def threadlet_of(weaver: WeaverProcess, user: str, replica: str = "train_0", **hello: object) -> RawThreadlet:
    threadlet = RawThreadlet(weaver.address_of(user), replica, **hello)  # type: ignore[arg-type]
    threadlet.welcome()
    return threadlet


@pytest.mark.guarantees(
    "weaver",
    "Two users with replicas, groups and devices of the same names never touch each other; `*` is the caller's own",
)
def test_the_same_names_of_two_users_are_two_replicas(weaver: WeaverProcess) -> None:
    anna, bert = threadlet_of(weaver, "anna"), threadlet_of(weaver, "bert")
    asked = gateway_for(weaver, "anna")

    given = asked.ask("command", kind="update_config", params={"learning_rate": 0.5}, target="*")
    id, _, params = anna.command()
    anna.ack(id)
    asked.ask("policy", group="train", action="stop")
    asked.ask("fail_device", device="GPU-0", reason="gone")

    assert given["replicas"] == ["train_0"]
    assert params == {"learning_rate": 0.5}
    assert asked.ask("command_state", id=given["id"], timeout=BOUND)["done"]
    other = gateway_for(weaver, "bert")
    bert.send("beat", 1.0, 1, "step")
    assert other.ask("policies") == {}
    assert [one["state"] for one in other.ask("devices")] == ["active"]
    assert {one["kind"] for one in other.ask("events")} <= {
        "weaver_started",
        "run_began",
        "registered",
        "running",
    }
    bert.socket.settimeout(0.3)  # whatever concerned bert's replica was sent before those answers
    with pytest.raises(TimeoutError):
        bert.until(lambda frame: frame[0] == "command")
    with pytest.raises(Refused, match="no command"):
        other.ask("command_state", id=given["id"])


@pytest.mark.guarantees("weaver", "An error of the weaver names nothing of another user")
def test_an_error_names_nothing_of_another_user(weaver: WeaverProcess) -> None:
    threadlet_of(weaver, "anna", "secret-name")
    threadlet_of(weaver, "bert", "public")

    with pytest.raises(Refused, match=r'no replica named "secret-name"; registered: public$'):
        gateway_for(weaver, "bert").ask("replica", id="secret-name")
    with pytest.raises(Refused, match=r"no device 'GPU-9'; registered: GPU-0$"):
        gateway_for(weaver, "bert").ask("fail_device", device="GPU-9")


@pytest.mark.guarantees(
    "weaver",
    "A session's key registers replicas of that session only, and of two jobs with one name in two "
    "sessions only one trains",
)
def test_a_session_registers_replicas_of_its_own_only(weaver: WeaverProcess) -> None:
    living = threadlet_of(weaver, "anna", "shared-name", session="b")
    address = weaver.address_of("anna", "a")

    other_session = RawThreadlet(address, "x@b", session="b").receive()
    taken = RawThreadlet(address, "shared-name").receive()
    unnamed = RawThreadlet(address, "y")
    unnamed.welcome()

    assert other_session[:2] == ["refuse", "authentication"]
    assert "of the session 'a', and registers no replica of 'b'" in other_session[2]
    assert taken[:2] == ["refuse", "replica_taken"]
    assert "'shared-name' lives outside of the session 'a'" in taken[2]
    replicas = {one["id"]: one["session"] for one in gateway_for(weaver, "anna").ask("replicas")}
    assert replicas == {"shared-name": "b", "y": "a"}
    living.close()


@pytest.mark.guarantees("weaver", "A session asks for its own user, and reports for itself only")
def test_a_session_acts_for_its_user_and_reports_for_itself(weaver: WeaverProcess) -> None:
    mine = threadlet_of(weaver, "anna", "mine", session="a", procs="1", rank=0)
    other = threadlet_of(weaver, "anna", "other", session="b", procs="1", rank=0)
    driver = session_of(weaver, "anna", "a")

    ended = driver.ask("supervision", session="b", procs=1, rank=None, what="died")
    driver.ask("command", kind="pause", target="other", by="somebody")

    assert ended == ["mine"]
    (event,) = driver.ask("events", kind="command")
    assert event["by"] == "a"
    assert driver.ask("address") == weaver.address_of("anna", "a")
    mine.close()
    other.close()


@pytest.mark.guarantees("weaver", "A session asks for its own user, and reports for itself only")
@pytest.mark.parametrize("user", ["bert", ADMIN, EVERYONE])
def test_a_session_cannot_act_for_another_user(weaver: WeaverProcess, user: str) -> None:
    driver = session_of(weaver, "anna", "a")
    driver.user = user

    with pytest.raises(Refused, match="a session acts for its own user only"):
        driver.ask("replicas")
    driver.send("watch", 5, user)
    assert driver.receive()[:2] == ["error", 5]


@pytest.mark.parametrize("operation", ["numbers", "audit", "users"])
def test_a_session_cannot_ask_for_what_only_the_gateway_may(weaver: WeaverProcess, operation: str) -> None:
    with pytest.raises(Refused, match="a session cannot ask"):
        session_of(weaver, "anna", "a").ask(operation)


def test_the_gateway_names_whom_it_acts_for(weaver: WeaverProcess) -> None:
    gateway = weaver.gateway()
    gateway.user = None

    with pytest.raises(Refused, match="has to name the user"):
        gateway.ask("replicas")


@pytest.mark.guarantees(
    "users", "Operations in flight, and bytes of results that are kept, count in all sessions of a user"
)
def test_a_session_is_told_what_its_users_other_sessions_use(weaver: WeaverProcess) -> None:
    report = {"counts": [0] * (len(BOUNDS) + 1), "sum": 0.0}
    one, other, berts = (
        session_of(weaver, user, name) for user, name in (("anna", "a"), ("anna", "b"), ("bert", "c"))
    )

    first = one.ask("calls", **report, in_flight=7, kept=100)
    second = other.ask("calls", **report, in_flight=5, kept=20)

    assert first == {"in_flight": 0, "kept": 0, "idle": None}
    assert second == {"in_flight": 7, "kept": 100, "idle": None}
    assert one.ask("calls", **report, in_flight=1, kept=1) == {"in_flight": 5, "kept": 20, "idle": None}
    assert berts.ask("calls", **report) == {"in_flight": 0, "kept": 0, "idle": None}


def connected(weaver: WeaverProcess) -> socket.socket:
    there = socket.socket(socket.AF_UNIX)
    there.settimeout(BOUND)
    there.connect(weaver.socket)
    return there


@pytest.mark.guarantees("weaver", "The weaver's unix socket believes nobody without a key")
@pytest.mark.parametrize(
    "said",
    [
        pack(["ask", 1, ADMIN, "replicas", {}]),
        pack(["hello"]),
        pack(["hello", 5]),
        b"\xff\xff\xff\xff",
        (1 << 20).to_bytes(4, "big") + b"x" * 100,
    ],
)
def test_the_unix_socket_answers_nobody_without_a_key(weaver: WeaverProcess, said: bytes) -> None:
    with connected(weaver) as there:
        there.sendall(said)
        assert there.recv(100) == b""


@pytest.mark.parametrize("key", ["", "x", "anna:a:wrong", "::", "::wrong", "a:b:c:d"])
def test_a_key_that_is_none_is_refused(weaver: WeaverProcess, key: str) -> None:
    assert weaver.gateway(key).receive()[:2] == ["refuse", "authentication"]


def test_a_key_for_threadlets_asks_nothing_and_the_gateways_registers_nothing(weaver: WeaverProcess) -> None:
    assert "one for threadlets" in weaver.gateway(weaver.keys.of("anna")).receive()[2]
    address = f"{weaver.address.rpartition('/')[0]}/{weaver.keys.gateway()}"
    assert "the key is the gateway's" in RawThreadlet(address).receive()[2]


@pytest.mark.parametrize(
    ("user", "session"),
    [("anna", None), ("anna", "a"), ("a:b", "c/d"), ("\U0001f600 x", "%41"), ("anna:a", None), ("*", None)],
)
def test_a_key_grants_what_it_names(user: str, session: str | None) -> None:
    keys = Keys(b"secret")

    assert keys.read(keys.of(user, session)) == Grant(user, session)
    assert keys.read(keys.gateway()) == Grant(None, None)


@pytest.mark.guarantees("weaver", "A forged key grants nothing")
def test_keys_of_another_secret_or_with_other_names_grant_nothing() -> None:
    keys = Keys(b"secret")
    user, session, mac = keys.of("anna", "a").split(":")

    for forged in (Keys(b"other").of("anna", "a"), f"bert:{session}:{mac}", f"{user}::{mac}", f"::{mac}"):
        with pytest.raises(Exception, match="the key is not of this weaver"):
            keys.read(forged)


def test_replicas_are_there_after_a_restart_for_their_user(weaver: WeaverProcess) -> None:
    threadlet_of(weaver, "anna", "a_0")
    threadlet_of(weaver, "../bert", "b_0")
    gateway_for(weaver, "anna").ask("policy", group="train", action="pause")

    weaver.end()
    weaver.start()

    assert [one["id"] for one in gateway_for(weaver, "anna").ask("replicas")] == ["a_0"]
    assert gateway_for(weaver, "anna").ask("policies") == {"train": "pause"}
    assert [one["id"] for one in gateway_for(weaver, "../bert").ask("replicas")] == ["b_0"]
    assert sorted(gateway_for(weaver, EVERYONE).ask("users")) == ["../bert", ADMIN, "anna"]


def test_the_key_of_an_older_loom_is_the_admins(weaver: WeaverProcess) -> None:
    weaver.end()
    link = weaver.folder / "link.json"
    link.write_text(json.dumps({**json.loads(link.read_text()), "key": "the-old-key"}))
    weaver.start()

    RawThreadlet(f"{weaver.address.rpartition('/')[0]}/the-old-key", "train_0").welcome()

    assert [one["id"] for one in weaver.gateway().ask("replicas")] == ["train_0"]


def test_a_secret_that_was_removed_makes_every_key_void(weaver: WeaverProcess) -> None:
    before = weaver.address_of("anna")
    weaver.end()
    (weaver.folder / "secret").unlink()
    weaver.start()

    assert RawThreadlet(before).receive()[1] == "authentication"


@pytest.mark.guarantees("weaver", "A device's failure reaches every user of the device, if an admin reports it")
def test_an_admin_reports_a_device_for_all_who_use_it(weaver: WeaverProcess) -> None:
    anna, bert = threadlet_of(weaver, "anna", "a"), threadlet_of(weaver, "bert", "b")
    carla = threadlet_of(weaver, "carla", "c", devices=[{**GPU, "uuid": "GPU-7"}])
    everyone = gateway_for(weaver, EVERYONE)

    event = everyone.ask("fail_device", device="GPU-0", reason="Xid 79")

    assert [(one["user"], one["replica"]) for one in event["replicas"]] == [("anna", "a"), ("bert", "b")]
    assert anna.command()[1] == bert.command()[1] == "device_failed"
    assert [one["state"] for one in gateway_for(weaver, "carla").ask("devices")] == ["active"]
    with pytest.raises(Refused, match="no user's replicas have registered"):
        everyone.ask("fail_device", device="GPU-1")
    carla.close()


def test_an_admin_sees_lists_of_all(weaver: WeaverProcess) -> None:
    threadlet_of(weaver, "anna", "train_0")
    threadlet_of(weaver, "bert", "train_0")
    everyone = gateway_for(weaver, EVERYONE)

    assert {(one["user"], one["id"]) for one in everyone.ask("replicas")} == {
        ("anna", "train_0"),
        ("bert", "train_0"),
    }
    assert {one["user"] for one in everyone.ask("devices")} == {"anna", "bert"}
    assert {one["user"] for one in everyone.ask("goodput")} == {"anna", "bert"}
    assert {one["user"] for one in everyone.ask("events", kind="registered")} == {"anna", "bert"}
    assert everyone.ask("status")["replicas"] == {"running": 2}
    assert set(msgpack.unpackb(everyone.ask("numbers"))) == {ADMIN, "anna", "bert"}
    with pytest.raises(Refused, match="one user at a time"):
        everyone.ask("command", kind="pause")
    with pytest.raises(Refused, match="numbered for each user"):
        everyone.ask("events", after=1)


@pytest.mark.guarantees(
    "weaver", "A watcher is told of its user's replicas only, and a page also of the sessions that its user may see"
)
def test_a_watcher_is_told_of_its_users_replicas_only(weaver: WeaverProcess) -> None:
    watcher = gateway_for(weaver, "anna")
    assert watcher.watch()["replicas"] == []

    threadlet_of(weaver, "bert", "b")
    threadlet_of(weaver, "anna", "a")

    assert watcher.event("registered")["replica"] == "a"


@pytest.mark.guarantees("weaver", "A fault of a host on which another user has processes needs an admin")
def test_a_fault_of_a_host_on_which_others_are_needs_an_admin(weaver: WeaverProcess) -> None:
    mine = threadlet_of(weaver, "anna", "a", host="h", injectable=True)
    other = threadlet_of(weaver, "bert", "b", host="h")
    anna = gateway_for(weaver, "anna")
    fault = {"fault": "lost_host", "target": "a"}

    with pytest.raises(Refused, match=r"lost_host strikes every process on a host.*scope admin"):
        anna.ask("inject", **fault)
    with pytest.raises(Refused, match="scope admin"):
        session_of(weaver, "anna", "s").ask("inject", **fault, admin=True)
    process_fault = anna.ask("inject", fault="sigstop", target="a")
    by_admin = anna.ask("inject", **fault, admin=True)

    assert process_fault["replicas"] == by_admin["replicas"] == ["a"]
    mine.close()
    other.close()


def test_a_fault_of_the_gateway_is_not_given_to_replicas(weaver: WeaverProcess) -> None:
    threadlet = threadlet_of(weaver, "anna", "a", injectable=True)

    for asked in (session_of(weaver, "anna", "s"), gateway_for(weaver, "anna")):
        with pytest.raises(Refused, match="dead_gateway is injected by the gateway"):
            asked.ask("inject", fault="dead_gateway", target="*", admin=True)
    with pytest.raises(Refused, match="there is no fault 'nonsense'"):
        session_of(weaver, "anna", "s").ask("inject", fault="nonsense", target="*")
    threadlet.close()


@pytest.mark.guarantees("weaver", "A fault of a host on which another user has processes needs an admin")
def test_a_fault_of_a_worker_that_anothers_session_uses_needs_an_admin(weaver: WeaverProcess) -> None:
    threadlet = threadlet_of(weaver, "anna", "a", host="h", session="mine", injectable=True)
    calls = {"counts": [0] * 15, "sum": 0.0}
    session_of(weaver, "anna", "mine").ask("calls", workers=["tcp://w0:26600"], **calls)
    bert = session_of(weaver, "bert", "his")
    anna = gateway_for(weaver, "anna")

    bert.ask("calls", workers=["tcp://w1:26600"], **calls)
    alone = anna.ask("inject", fault="lost_host", target="a")
    bert.ask("calls", workers=["tcp://w1:26600", "tcp://w0:26600"], **calls)

    assert alone["replicas"] == ["a"]
    with pytest.raises(Refused, match="another user has processes there"):
        anna.ask("inject", fault="lost_host", target="a")
    threadlet.close()


def test_what_a_session_does_on_a_rank_is_given_to_the_gateway_for_the_audit(weaver: WeaverProcess) -> None:
    about = {"does": "exec", "mesh": "trainers", "rank": 3, "what": "nvidia-smi " * 40, "guest": "bob"}

    assert session_of(weaver, "anna", "mine").ask("reached", **about) is None

    entries = gateway_for(weaver, "anna").ask("audit", trail="", last=0)["entries"]
    (entry,) = [one for one in entries if one["operation"] == "exec"]
    assert (entry["user"], entry["session"], entry["guest"]) == ("anna", "mine", "bob")
    assert (entry["mesh"], entry["rank"], entry["what"]) == ("trainers", "3", ("nvidia-smi " * 40)[:200])


@pytest.mark.guarantees(
    "weaver",
    "What a session commands is in the audit once, and what a page commands as over REST, also if its "
    "WebSocket drops",
)
def test_what_a_session_commands_is_given_to_the_gateway_for_the_audit_once(weaver: WeaverProcess) -> None:
    driver, gateway = session_of(weaver, "anna", "a"), weaver.gateway()
    driver.ask("command", kind="update_config", params={"password": "hidden"}, target="train")
    driver.ask("replicas")
    gateway.ask("command", kind="pause")  # the gateway writes its own line

    trail = gateway.ask("audit", trail="", last=0)
    (entry,) = trail["entries"]

    assert (entry["user"], entry["session"], entry["operation"]) == ("anna", "a", "command")
    assert (entry["kind"], entry["target"], entry["keys"]) == ("update_config", "train", ["password"])
    assert "hidden" not in json.dumps(entry)
    driver.ask("policy", group="train", action="stop")
    (second,) = gateway.ask("audit", trail=trail["trail"], last=trail["last"])["entries"]
    assert (second["operation"], second["group"], second["action"]) == ("policy", "train", "stop")


@pytest.mark.guarantees("weaver", "Users without work cost nothing")
async def test_users_without_work_are_left_alone() -> None:
    now = [1_700_000_000.0]
    users = Users(lambda user: Store(":memory:"), [ADMIN], Keys(b"secret"), lambda: now[0], "tcp://h:1")
    for number in range(50):
        users.of(f"user-{number}")

    for _ in range(5):
        users.tick(now[0])
        for user in [users.of(name) for name, _ in users.items()]:
            user.commit_now()
        now[0] += 0.1

    assert not users._active
    users.of("user-1").requests.do(SetPolicy("train", Action.STOP))
    users.of("user-1").plan_commit()
    assert list(users._active) == [users.of("user-1")]
    users.close()


async def test_a_store_that_cannot_be_read_is_one_users_trouble() -> None:
    def store(user: str) -> Store:
        if user == "bert":
            raise UnsafeStateFolder("broken")
        return Store(":memory:")

    users = Users(store, [ADMIN, "bert", "anna"], Keys(b"secret"), monotonic_clock(), "tcp://h:1")

    assert [user for user, _ in users.items()] == [ADMIN, "anna"]
    with pytest.raises(UnsafeStateFolder):
        users.of("bert")
    users.close()


@pytest.mark.guarantees(
    "users", "For a guest, the owner's other replicas, devices, events and commands do not exist"
)
def test_a_guest_reaches_the_replicas_of_one_session_only(weaver: WeaverProcess) -> None:
    seen = threadlet_of(weaver, "anna", "train_0", session="a", procs="1", rank=0)
    hidden = threadlet_of(weaver, "anna", "train_1", session="b", procs="1", rank=0)
    other_gpu = {**GPU, "uuid": "GPU-7"}
    elsewhere = threadlet_of(weaver, "anna", "tune_0", session="b", group="tune", devices=[other_gpu])
    elsewhere.await_stored(elsewhere.report(1, loss=0.5))
    gateway = gateway_for(weaver, "anna")

    def guest(operation: str, **arguments: object) -> Any:
        return gateway.ask("in_session", session="a", do=operation, arguments=arguments)

    everything = gateway.ask("command", kind="pause", params={}, target="*")
    own = guest("command", kind="update_config", params={"learning_rate": 0.5}, target=["train*", "trainers", "*"])

    assert own["replicas"] == ["train_0"]
    assert [one["id"] for one in guest("replicas")] == ["train_0"]
    assert [one["replicas"] for one in guest("devices")] == [["train_0"]]
    assert guest("status")["replicas"] == {"running": 1}
    assert [guest("status")[name] for name in ("devices", "commands", "reports")] == [1, 1, 0]
    assert [one["job"] for one in guest("goodput")] == ["train@a"]
    assert {one["replica"] for one in guest("events", limit=1000)} == {"train_0"}
    assert guest("command_state", id=own["id"], timeout=0)["replicas"] == ["train_0"]
    for operation, arguments in [
        ("replica", {"id": "train_1"}),
        ("stacks", {"replica": "train_1"}),
        ("metrics", {"replica": "train_1"}),
        ("history", {"replica": "train_1", "metric": "loss"}),
        ("events", {"replica": "train_1"}),
        ("command", {"kind": "stop", "target": "train_1"}),
    ]:
        with pytest.raises(Refused, match=r"no replica of session 'a' is meant by 'train_1'; it has: train_0$"):
            guest(operation, **arguments)
    with pytest.raises(Refused, match="no command"):
        guest("command_state", id=everything["id"], timeout=0)
    again = guest("command", kind="pause", params={}, target="train_0", id=everything["id"])
    assert again["id"] != everything["id"]
    assert again["replicas"] == ["train_0"]
    for operation in (
        "address",
        "policy",
        "policies",
        "fail_device",
        "inject",
        "remove_fault",
        "numbers",
        "in_session",
    ):
        with pytest.raises(Refused, match="reaches beyond session 'a'"):
            guest(operation)
    with pytest.raises(Refused, match="a session cannot ask"):
        session_of(weaver, "anna", "a").ask("in_session", session="b", do="replicas")
    with pytest.raises(Refused, match="about a device, which other sessions may use"):
        guest("command", kind="deactivate_device", params={"device": "GPU-0"}, target="train_0")
    assert guest("command", kind="resume", params={}, target=None)["replicas"] == ["train_0"]
    with pytest.raises(Refused, match=r"no replica of session 'a' is meant by \[\]"):
        guest("command", kind="resume", params={}, target=[])
    for threadlet in (seen, hidden, elsewhere):
        threadlet.close()


ABOUT_RUNS = {
    "run_history": {"metric": "loss"},
    "run_curves": {"metric": "loss"},
    "note_run": {"text": "mine now"},
    "tag_run": {"add": ["mine"]},
    "branch_run": {"step": 1},
}
"""Further arguments of the operations on runs."""


@pytest.mark.guarantees(
    "users", "Another user's run is refused in the words for a run that there is not, by its id and by any guess"
)
@pytest.mark.parametrize("session", [None, "a"])
def test_another_users_run_is_refused_as_one_that_there_is_not(weaver: WeaverProcess, session: str | None) -> None:
    secret = threadlet_of(weaver, "anna", "train_0", start="5ecre7aa", session="s")
    secret.await_stored(secret.report(1, loss=0.5))
    threadlet_of(weaver, "bert", "train_0", start="0wnrunbb", session="a", group="own")
    anna, bert = gateway_for(weaver, "anna"), gateway_for(weaver, "bert")
    anna.ask("note_run", run="5ecre7aa", text="kept")
    operations = {name: one for name, one in OPERATIONS.items() if one.of_runs}
    assert operations.keys() >= ABOUT_RUNS.keys()

    def in_session(operation: str, given: dict[str, Any]) -> dict[str, Any]:
        return {"session": session, "do": operation, "arguments": given}

    def refusal(operation: str, names: tuple[str, ...]) -> str:
        given = {**ABOUT_RUNS.get(operation, {}), **dict(zip(OPERATIONS[operation].of_runs, names, strict=False))}
        asked = (operation, given) if session is None else ("in_session", in_session(operation, given))
        with pytest.raises(Refused) as refused:
            bert.ask(asked[0], **asked[1])
        return str(refused.value)

    for operation in operations:
        for guess in ("5ecre7aa", "5ecr", "train", "5*"):
            for place in range(len(OPERATIONS[operation].of_runs)):
                known = ("0wnrunbb",) * place
                said = refusal(operation, (*known, guess, guess))
                assert said == refusal(operation, (*known, "nowhere1", "nowhere1")).replace("nowhere1", guess)
    assert [one["id"] for one in bert.ask("runs")] == ["0wnrunbb"]
    assert [(one["id"], one["note"], one["tags"]) for one in anna.ask("runs")] == [("5ecre7aa", "kept", [])]
