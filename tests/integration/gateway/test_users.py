"""Two users of one gateway who distrust each other: what one sees of the other's sessions, and may do there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest

import loom
from loom.errors import LimitReached
from loom.rest_client import Gateway as Rest
from loom.wire.bodies import AskWeaver, EndSession, ListMeshes
from loom.wire.handshake import Welcome
from loom.wire.length_prefix import LENGTH
from loom.wire.messages import Kind
from loom.wire.stream import Stream
from loom_proxy.local import LocalCluster
from tests.support.gateways import BOUND, await_true
from tests.support.processes import LOOM, run_loom, start
from tests.support.raw_client import answer, refusal, say_hello, websocket
from tests.support.two_users import Trainer
from tests.support.users import House

Transport = Literal["websocket", "http"]


@pytest.fixture(scope="module")
def house(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(list(cluster.workers), tmp_path_factory.mktemp("users"))
    yield made
    made.gateway.close()


@pytest.fixture
def job(house: House) -> Iterator[loom.Job]:
    """A session of ann's."""
    with house.connect("ann") as opened:
        yield opened


@pytest.fixture(scope="module")
def unshared(house: House) -> Iterator[loom.Job]:
    """A session of ann's that she shares with nobody."""
    with house.connect("ann") as opened:
        yield opened


# -- what is not shared -------------------------------------------------------------------------------------


@pytest.mark.guarantees("users", "A session is listed for its user and for an admin only")
def test_a_session_is_listed_for_its_user_and_for_an_admin(house: House, job: loom.Job) -> None:
    assert job.session in house.sees("ann")
    assert job.session in house.sees("root")
    assert house.sees("bob") == set()
    assert house.rest("bob").status()["sessions"] == 0
    (own,) = [one for one in house.rest("ann").sessions() if one["name"] == job.session]
    assert (own["user"], own["shared"]) == ("ann", {})


REQUESTS: list[tuple[str, str, object]] = [
    ("DELETE", "", None),
    ("GET", "/logs", None),
    ("GET", "/logs?follow=1", None),
    ("GET", "/meshes", None),
    ("GET", "/runs", None),
    ("GET", "/tensors", None),
    ("GET", "/spans?seconds=0.1", None),
    ("PUT", "/shares/bob", {"scope": "drive"}),
    ("DELETE", "/shares/bob", None),
]


@pytest.mark.guarantees("users", "Over REST, another user's session answers as one that does not exist")
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_another_users_session_answers_as_one_that_does_not_exist(
    house: House, unshared: loom.Job, method: str, path: str, body: object
) -> None:
    one, other = (
        house.answer("bob", method, f"/api/v1/sessions/{name}{path}", body)
        for name in (unshared.session, "nothing-here")
    )

    assert one[0] == 404
    assert (one[0], one[1].replace(unshared.session, "nothing-here")) == other
    assert unshared.run(len, "abc") == 3


@pytest.mark.guarantees(
    "users",
    "Nobody attaches to, watches, takes over, resumes, or opens the second connection of another user's session",
)
@pytest.mark.parametrize(
    "hello",
    [
        {"mode": "watch"},
        {"mode": "drive"},
        {"mode": "drive", "take_over": True},
        {"mode": "drive", "persist": True},
        {"mode": "drive", "lane": 1},
        {"mode": "watch", "lane": 1},
    ],
)
def test_another_users_session_cannot_be_joined(house: House, unshared: loom.Job, hello: dict[str, Any]) -> None:
    said = []
    for name in (unshared.session, "nothing-here"):
        for more in ({}, {"stream": unshared._connection.welcome.stream}):
            with websocket(house.url, house.tokens["bob"]) as client:
                error = refusal(client, session=name, **hello, **more)
                assert type(error) is loom.UnknownSession
                said.append(str(error).replace(unshared.session, "nothing-here"))

    assert len(set(said)) == 1
    assert unshared.session not in said[0]
    assert unshared.run(len, "abc") == 3


@pytest.mark.guarantees("users", "A refusal names the caller's own sessions only, over a WebSocket and over HTTP")
@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_who_is_refused_gets_the_names_of_own_sessions_only(
    house: House, unshared: loom.Job, transport: Transport
) -> None:
    with house.connect("bob", transport=transport) as own:
        # Sessions of tests before this one may still be ending.
        await_true(lambda: [one["name"] for one in house.rest("bob").sessions()] == [own.session])
        with pytest.raises(loom.UnknownSession) as refused:
            house.connect("bob", unshared.session, transport=transport)
        text = str(refused.value)
    assert f"no session named {unshared.session!r}; living sessions: {own.session!r}" in text
    await_true(lambda: house.audit(event="refused", user="bob", code="unknown_session"))


@pytest.mark.guarantees("users", "The reason and the log of an ended session are its user's")
def test_an_ended_session_and_its_log_are_its_users_too(house: House) -> None:
    with house.connect("ann") as job:
        job.share("bob")
        job.run(print, "for ann's eyes")
        job.flush_logs()
    await_true(lambda: job.session in {one["name"] for one in house.rest("ann").ended_sessions()})

    assert job.session in {one["name"] for one in house.rest("root").ended_sessions()}
    assert job.session not in {one["name"] for one in house.rest("bob").ended_sessions()}
    assert "for ann's eyes" in {line["text"] for line in house.rest("ann").logs(job.session, follow=False)}
    with pytest.raises(loom.UnknownSession, match="has ended: the client closed it"):
        house.connect("ann", job.session)
    with pytest.raises(loom.UnknownSession, match="no session named") as refused:
        list(house.rest("bob").logs(job.session, follow=False))
    assert "ended:" not in str(refused.value)
    with pytest.raises(loom.UnknownSession, match="no session named"):
        house.connect("bob", job.session)


def test_two_tokens_of_one_user_reach_the_same_sessions(house: House, job: loom.Job) -> None:
    _, text = house.file.create("phone", "view", user="ann")
    watcher = loom.connect(house.url, text, job.session, mode="watch")
    assert watcher.runs() == {}
    watcher.detach()


@pytest.mark.slow
def test_an_admin_reaches_every_session(house: House) -> None:
    job = house.connect("ann")
    watcher = house.watch("root", job.session)
    watcher.detach()

    house.rest("root").end_session(job.session)

    await_true(lambda: job.session not in house.sees("ann"))


# -- what is shared -----------------------------------------------------------------------------------------


@pytest.mark.guarantees("users", "A share gives what its scope says and no more")
def test_who_may_view_sees_and_watches_and_reads_and_no_more(house: House, job: loom.Job) -> None:
    job.share("bob", "view")
    job.run(print, "for both")
    job.flush_logs()

    (seen,) = house.rest("bob").sessions()
    assert (seen["name"], seen["user"], seen["shared"]) == (job.session, "ann", {"bob": "view"})
    assert "for both" in {line["text"] for line in house.rest("bob").logs(job.session, follow=False)}
    watcher = house.watch("bob", job.session)
    watcher.detach()
    with pytest.raises(loom.ScopeError, match=r"'ann' shares session .* with you for view"):
        house.connect("bob", job.session, take_over=True)
    with pytest.raises(loom.ScopeError, match="is for 'ann'"):
        house.rest("bob").end_session(job.session)
    with pytest.raises(loom.ScopeError, match="is for 'ann'"):
        watcher.share("carol")
    assert job.run(len, "abc") == 3


@pytest.mark.guarantees(
    "users",
    "Who may drive a session debugs it and reaches its ranks, also beside its client, and the audit says "
    "who did what; a share for less does not",
)
def test_who_may_drive_debugs_and_who_may_less_does_not(house: House, job: loom.Job) -> None:
    def debug() -> loom.Job:
        return house.connect("bob", job.session, mode="debug")

    with pytest.raises(loom.UnknownSession):
        debug()
    for scope in ("view", "operate"):
        job.share("bob", scope)
        with pytest.raises(loom.ScopeError, match=rf"'ann' shares session .* with you for {scope}"):
            debug()
    job.share("bob", "drive")
    with debug() as guest:
        assert guest.debugger.breakpoints() == []
    assert job.run(len, "abc") == 3


@pytest.mark.guarantees("users", "A guest who drives does not end the session")
def test_who_may_drive_takes_over_and_does_not_end(house: House, job: loom.Job) -> None:
    job.share("bob", "drive")

    with house.connect("bob", job.session, take_over=True) as guest:
        assert guest.run(len, "abcd") == 4
        with pytest.raises(loom.ScopeError, match="is for 'ann'"):
            house.rest("bob").end_session(job.session)

    with websocket(house.url, house.tokens["bob"]) as guest_socket:  # a client that ends it all the same
        welcome = Welcome.from_body(say_hello(guest_socket, session=job.session, take_over=True).body)
        assert not welcome.may_end
        stream = Stream()
        stream.put(EndSession().message(welcome.next_id))
        stream.put(ListMeshes().message(welcome.next_id + 1))
        frame = stream.next_frame()
        assert frame is not None
        guest_socket.send(frame[LENGTH.size :])
        assert answer(guest_socket).kind == Kind.RESULT

    with house.connect("ann", job.session, take_over=True) as again:  # the guest's close left it running
        assert again.run(len, "abc") == 3


@pytest.mark.guarantees("users", "A guest who operates commands the replicas of the shared session, and no other")
def test_who_may_operate_commands_the_replicas_of_the_session_and_no_other(house: House, job: loom.Job) -> None:
    trainers = job.hosts.spawn_procs().slice(hosts=0).spawn("trainer", Trainer)
    assert trainers.rate.call_one().get(BOUND) == 0.0
    path = f"/api/v1/sessions/{job.session}"
    command = {"kind": "update_config", "target": "*", "params": {"rate": 0.5}, "wait": BOUND}
    assert house.answer("bob", "POST", f"{path}/commands", command)[0] == 404

    job.share("bob", "view")
    status, seen = house.answer("bob", "GET", f"{path}/replicas")
    assert (status, [one["id"] for one in json.loads(seen)["replicas"]]) == (200, ["train_0"])
    assert house.answer("bob", "POST", f"{path}/commands", command)[0] == 403

    job.share("bob", "operate")
    status, state = house.answer("bob", "POST", f"{path}/commands", command)
    assert (status, json.loads(state)["outcomes"]["train_0"]["ok"]) == (200, True)
    assert trainers.rate.call_one().get(BOUND) == 0.5
    with house.connect("ann") as another:
        path = f"/api/v1/sessions/{another.session}"
        another.share("bob", "operate")
        assert house.answer("bob", "POST", f"{path}/commands", command)[0] == 404  # it has no replicas


def test_calls_are_observed_for_one_at_a_time_and_no_longer_than_the_share(house: House, job: loom.Job) -> None:
    trainers = job.hosts.spawn_procs().slice(hosts=0).spawn("trainer", Trainer)
    trainers.rate.call_one().get(BOUND)
    job.share("bob", "view")
    with ThreadPoolExecutor(1) as threads:
        seen = threads.submit(house.rest("bob").spans, job.session, 1.0)
        while not seen.done():
            trainers.rate.call_one().get(BOUND)
        assert {record["endpoint"] for record in seen.result()["records"]} == {"rate"}

        refused = threads.submit(observe, house.rest("bob"), job.session)
        await_true(lambda: is_observed(house, job))
        job.unshare("bob")
        with pytest.raises(loom.ScopeError):
            refused.result(BOUND)
    assert not is_observed(house, job)


def observe(gateway: Rest, session: str) -> Any:
    """Observe the calls of a session, after all who do so already."""
    while True:
        with contextlib.suppress(LimitReached):
            return gateway.spans(session, 3.0)


def is_observed(house: House, job: loom.Job) -> bool:
    try:
        house.rest("ann").spans(job.session, 0.001)
    except LimitReached:
        return True
    return False


def test_a_token_of_a_smaller_scope_than_the_share_is_still_of_that_scope(house: House, job: loom.Job) -> None:
    job.share("bob", "drive")
    _, text = house.file.create("bob's phone", "view", user="bob")
    with pytest.raises(loom.ScopeError, match="needs a token of scope drive"):
        loom.connect(house.url, text, job.session, take_over=True)


def test_nobody_shares_more_than_his_token_allows(house: House, job: loom.Job) -> None:
    _, text = house.file.create("ann's panel", "operate", user="ann")
    Rest(house.url, text).share_session(job.session, "bob", "operate")
    with pytest.raises(loom.ScopeError, match="to share a session for drive"):
        Rest(house.url, text).share_session(job.session, "bob", "drive")


@pytest.mark.parametrize(
    ("user", "scope", "match"), [("bob", "admin", "scope"), ("ann", "view", "own"), ("a\tb", "view", "printable")]
)
def test_a_share_that_makes_no_sense_is_refused(
    house: House, job: loom.Job, user: str, scope: Any, match: str
) -> None:
    with pytest.raises(loom.WrongArguments, match=match):
        job.share(user, scope)
    assert [one["shared"] for one in house.rest("ann").sessions() if one["name"] == job.session] == [{}]


@pytest.mark.guarantees(
    "users",
    "A share that is taken back or made smaller ends the connections that it let in, over a WebSocket and "
    "over HTTP",
)
@pytest.mark.parametrize("transport", ["websocket", "http"])
@pytest.mark.parametrize("then", [lambda job: job.unshare("bob"), lambda job: job.share("bob", "view")])
def test_a_share_that_is_taken_back_or_made_smaller_disconnects(
    house: House, job: loom.Job, transport: Transport, then: Callable[[loom.Job], None]
) -> None:
    job.share("bob", "drive")
    guest = house.connect("bob", job.session, transport=transport, take_over=True)

    owner = house.watch("ann", job.session)
    then(owner)

    assert guest._connection.ended.wait(BOUND)
    with pytest.raises(loom.ScopeError, match="is not shared with you for drive any more"):
        guest.run(len, "abc")
    await_true(lambda: house.audit(event="cut off", user="bob"))
    owner.detach()
    with house.connect("ann", job.session, take_over=True) as again:
        assert again.run(len, "abc") == 3


@pytest.mark.guarantees(
    "users", "Who watches, and follows logs and events of a session that is not shared any more, is ended"
)
def test_a_watcher_and_a_follower_of_logs_lose_a_share_that_is_taken_back(house: House, job: loom.Job) -> None:
    job.share("bob")
    job.run(print, "for both")
    watcher = house.watch("bob", job.session)
    environment = {**os.environ, "LOOM_URL": house.url, "LOOM_TOKEN": house.tokens["bob"]}
    following = start("-c", LOOM, "logs", "--session", job.session, "--follow", env=environment)
    assert following.stdout is not None
    assert "for both" in following.stdout.readline()

    job.unshare("bob")

    following.communicate(timeout=BOUND)  # ends
    list(watcher.events())  # ends
    assert watcher._connection.ended.wait(BOUND)
    with pytest.raises(loom.NotFound, match="is not shared with 'bob'"):
        job.unshare("bob")
    assert house.sees("bob") == set()


@pytest.mark.guarantees("users", "Users and shares of sessions outlive the gateway")
def test_shares_outlive_the_gateway(house: House) -> None:
    job = house.connect("ann")
    job.share("bob")
    job.detach()

    house.gateway.end(signal.SIGKILL)
    house.gateway.start()

    assert house.sees("bob") == {job.session}
    with house.connect("ann", job.session, take_over=True) as again:
        again.unshare("bob")


@pytest.mark.guarantees("users", "A driver of an older gateway belongs to the user of its token")
def test_a_session_of_an_older_gateway_belongs_to_the_user_of_its_token(house: House) -> None:
    job, own = house.connect("ann"), house.gateway.connect()
    job.detach()
    own.detach()
    house.gateway.end(signal.SIGKILL)
    for path in house.gateway.state.glob("driver-*.json"):
        with contextlib.suppress(FileNotFoundError):  # of a spare, which ends with its gateway
            record = json.loads(path.read_text())
            if record["session"]:
                del record["user"], record["shared"]
                path.write_text(json.dumps(record))

    house.gateway.start()

    assert job.session in house.sees("ann")
    assert house.sees("bob") == set()
    users = {one["name"]: one["user"] for one in house.rest("root").sessions()}
    assert (users[job.session], users[own.session]) == ("ann", "admin")
    house.connect("ann", job.session, take_over=True).close()
    house.gateway.connect(own.session).close()


@pytest.mark.guarantees("users", "The audit has the user")
def test_sharing_is_in_the_audit_with_the_user(house: House, job: loom.Job) -> None:
    job.share("bob", "operate")
    job.unshare("bob")

    (shared,) = house.audit(event="shared", session=job.session)
    assert (shared["user"], shared["with"], shared["for"], shared["status"]) == ("ann", "bob", "operate", 200)
    (unshared,) = house.audit(event="unshared", session=job.session)
    assert (unshared["user"], unshared["with"], unshared["status"]) == ("ann", "bob", 200)


def test_sessions_are_shared_from_a_terminal(house: House, job: loom.Job) -> None:
    def sessions(*words: str) -> str:
        given = ["--url", house.url, "--token", house.tokens["ann"]]
        ended = run_loom("sessions", *words, *given, env={**os.environ, "COLUMNS": "200"})
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "for operate" in sessions("share", job.session, "bob", "--scope", "operate")
    assert "bob: operate" in sessions("list")
    assert "any more" in sessions("unshare", job.session, "bob")
    assert house.sees("bob") == set()


# -- the weaver of a shared session --------------------------------------------------------------------------


@pytest.fixture
def training(house: House, job: loom.Job) -> Iterator[tuple[loom.Job, Any, Any]]:
    """A session of ann's with the replica ``seen``, its actor, and that of ``hidden`` in her other session."""
    with house.connect("ann") as another:
        actors = []
        for one, name in ((job, "seen"), (another, "hidden")):
            trainer = one.hosts.spawn_procs().slice(hosts=0).spawn("trainer", Trainer, name)
            assert trainer.rate.call_one().get(BOUND) == 0.0
            actors.append(trainer)
        await_true(lambda: set(job.weaver.replicas()) >= {"seen", "hidden"})
        yield (job, *actors)


def joined(house: House, job: loom.Job, scope: str) -> loom.Job:
    """Bob, in the session as the scope of his share allows."""
    job.share("bob", scope)  # type: ignore[arg-type]
    mode: dict[str, Any] = {"take_over": True} if scope == "drive" else {"mode": "watch"}
    return house.connect("bob", job.session, **mode)


@pytest.mark.guarantees(
    "users", "A guest's `job.weaver` is the owner's, limited to the session's replicas and by the share's scope"
)
@pytest.mark.parametrize("scope", ["view", "operate", "drive"])
def test_a_guests_weaver_is_the_owners_limited_to_the_session(
    house: House, training: tuple[loom.Job, Any, Any], scope: str
) -> None:
    job, _, beyond = training
    weaver = joined(house, job, scope).weaver

    (seen,) = weaver.replicas().values()
    assert (seen.id, seen.session, seen.user) == ("seen", job.session, "ann")
    assert weaver.status()["replicas"] == {"running": 1}
    assert {event.replica for event in weaver.events(0)} == {"seen"}
    assert [one.replicas for one in weaver.devices().values()] == [("seen",)]
    assert set(weaver.goodput()) <= {f"train@{job.session}"}
    with pytest.raises(
        loom.UnknownReplica, match=f"no replica of session '{job.session}' is meant by 'hidden'; it has: seen$"
    ):
        weaver.replica("hidden")
    for beyond_it in (weaver.policies, weaver.address, lambda: weaver.set_policy("*", "stop")):
        with pytest.raises(loom.LoomError, match=r"reaches beyond session|with you for view"):
            beyond_it()
    if scope == "view":
        with pytest.raises(loom.ScopeError, match=r"shares session .* with you for view"):
            weaver.update_config("*", rate=0.5)
    else:
        outcomes = weaver.update_config("*", rate=0.5).get(BOUND)
        assert [(id, one.ok) for id, one in outcomes.items()] == [("seen", True)]
        with pytest.raises(loom.UnknownReplica, match="is meant by 'hidden'"):
            weaver.update_config("hidden", rate=0.75)
    updates, events = weaver.watch(), weaver.events(0, follow=True)
    assert set(next(updates).replicas) == {"seen"}  # type: ignore[union-attr]
    assert next(events).replica == "seen"
    owner = house.watch("ann", job.session)
    owner.unshare("bob")
    for followed in (updates, events):
        with pytest.raises(loom.UnknownSession, match="no session named"):
            list(followed)
    with pytest.raises(loom.UnknownSession, match="no session named"):
        weaver.replicas()
    owner.detach()
    assert beyond.rate.call_one().get(BOUND) == 0.0


@pytest.mark.guarantees(
    "users", "A guest cannot ask the weaver with the session's key, which reaches all replicas of its owner"
)
def test_a_guest_who_drives_cannot_ask_the_weaver_with_the_sessions_key(
    house: House, training: tuple[loom.Job, Any, Any]
) -> None:
    job, _, beyond = training
    guest = joined(house, job, "drive")

    for operation, arguments in [("replicas", {}), ("command", {"kind": "pause", "target": "*"})]:
        with pytest.raises(loom.ScopeError, match="a guest of a session asks the gateway"):
            guest._calls.ask(AskWeaver(operation, arguments, BOUND), key=None).get(BOUND)

    guest.close()
    assert beyond.rate.call_one().get(BOUND) == 0.0
