"""The gateway's questions to the weaver, against one that does what a test tells it."""

from __future__ import annotations

import asyncio
import math
import os
import random
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.control.frame import MAX_FRAME, pack, unpack, unpack_all
from loom.process import tasks
from loom.weaver import client as weaver_client
from loom.weaver.client import MAX_QUESTIONS, WeaverClient
from loom.wire.length_prefix import FrameSplitter
from loom.wire.plain import plain
from tests.support.gateways import BOUND


def a_key() -> str:
    return "a-key"


Answer = Callable[["FakeWeaver", list[Any]], Awaitable[None]]


class FakeWeaver:
    """Takes questions and answers as it is told."""

    def __init__(self, path: str, answer: Answer) -> None:
        self.path = path
        self.asked: list[list[Any]] = []
        self._answer = answer
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        splitter = FrameSplitter(MAX_FRAME)
        while data := await reader.read(65536):
            for frame in unpack_all(splitter.feed(data)):
                if frame == ["hello", a_key()]:
                    continue
                self.asked.append(frame)
                await self._answer(self, frame)

    def say(self, frame: list[Any]) -> None:
        self.write(pack(frame))

    def write(self, data: bytes) -> None:
        self._writers[-1].write(data)

    def hang_up(self) -> None:
        self._writers[-1].close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()


Made = Callable[..., Awaitable[tuple[WeaverClient, FakeWeaver]]]


@pytest.fixture
async def made() -> AsyncIterator[Made]:
    """A client and its weaver, which answers as the test says."""
    fakes: list[FakeWeaver] = []
    clients: list[WeaverClient] = []
    with tempfile.TemporaryDirectory(prefix="loom-test-") as folder:

        async def make(answer: Answer, patience: float = 0.2) -> tuple[WeaverClient, FakeWeaver]:
            fake = FakeWeaver(os.path.join(folder, "sock"), answer)
            await fake.start()
            client = WeaverClient(fake.path, a_key, patience)
            client.came()
            fakes.append(fake)
            clients.append(client)
            return client, fake

        yield make
        for client in clients:
            client.close()
        for fake in fakes:
            await fake.close()


async def echo(fake: FakeWeaver, frame: list[Any]) -> None:
    _, number, _, operation, arguments = frame
    fake.say(["answer", number, [operation, arguments]])


async def test_a_question_is_answered(made: Made) -> None:
    client, _ = await made(echo)

    assert await client.ask("replica", id="train_0") == ["replica", {"id": "train_0"}]


async def test_answers_may_come_in_another_order(made: Made) -> None:
    late: list[list[Any]] = []

    async def backwards(fake: FakeWeaver, frame: list[Any]) -> None:
        late.append(frame)
        if len(late) == 3:
            for one in reversed(late):
                await echo(fake, one)

    client, _ = await made(backwards)

    answers = await asyncio.gather(*(client.ask("replica", id=str(n)) for n in range(3)))

    assert [answer[1]["id"] for answer in answers] == ["0", "1", "2"]


async def test_a_command_is_given_and_then_waited_for(made: Made) -> None:
    async def weaver(fake: FakeWeaver, frame: list[Any]) -> None:
        _, number, _, operation, arguments = frame
        fake.say(["answer", number, {"id": "c-1"} if operation == "command" else [operation, arguments]])

    client, fake = await made(weaver)

    state = await client.do("command", "anna", kind="pause", wait=1.5)

    assert state == ["command_state", {"id": "c-1", "timeout": 1.5, "by": "anna"}]
    assert fake.asked[0][2:] == [None, "command", {"kind": "pause", "by": "anna"}]


async def test_a_user_cannot_ask_for_what_drivers_tell(made: Made) -> None:
    client, fake = await made(echo)

    with pytest.raises(loom.WrongArguments, match=r"knows no operation 'supervision'; it knows status, "):
        await client.do("supervision", "anna", session="s")
    assert fake.asked == []


async def test_an_error_is_raised_as_what_it_is(made: Made) -> None:
    async def refuse(fake: FakeWeaver, frame: list[Any]) -> None:
        fake.say(["error", frame[1], "unknown_replica", "no replica named x"])

    client, _ = await made(refuse)

    with pytest.raises(loom.UnknownReplica, match="no replica named x"):
        await client.ask("replica", id="x")


async def test_while_it_is_away_a_question_waits_and_then_says_why() -> None:
    client = WeaverClient("/nowhere", a_key, patience=0.05)

    with pytest.raises(loom.WeaverUnavailable, match="has not come up yet"):
        await client.ask("status")
    client.went("it was killed by SIGKILL")
    with pytest.raises(loom.WeaverUnavailable, match="killed by SIGKILL"):
        await client.ask("status")


@pytest.mark.parametrize("up", [True, False], ids=["nothing listens", "not up"])
async def test_questions_wait_for_an_absent_one_together_and_not_one_after_the_other(up: bool) -> None:
    client = WeaverClient("/nowhere", a_key, patience=0.1)
    if up:
        client.came()
    asked = asyncio.gather(*(client.ask("status") for _ in range(1000)), return_exceptions=True)

    answers = await asyncio.wait_for(asked, BOUND)

    assert {type(answer) for answer in answers} == {loom.WeaverUnavailable}


async def test_a_question_waits_for_one_that_comes(made: Made) -> None:
    client, _ = await made(echo, patience=10)
    client.went("it died")
    asking = asyncio.ensure_future(client.ask("status"))
    await asyncio.sleep(0)

    client.came()

    assert (await asking)[0] == "status"


async def test_a_command_is_not_asked_again_where_the_answer_was_lost(made: Made) -> None:
    async def hang_up(fake: FakeWeaver, frame: list[Any]) -> None:
        fake.hang_up()

    client, fake = await made(hang_up)

    with pytest.raises(loom.WeaverUnavailable, match="may have done it"):
        await client.ask("command", kind="stop")
    assert len(fake.asked) == 1


async def test_what_changes_nothing_is_asked_again(made: Made) -> None:
    async def hang_up_once(fake: FakeWeaver, frame: list[Any]) -> None:
        if len(fake.asked) == 1:
            fake.hang_up()
        else:
            await echo(fake, frame)

    client, fake = await made(hang_up_once)

    assert (await client.ask("status"))[0] == "status"
    assert len(fake.asked) == 2


async def test_one_that_does_not_answer_is_not_waited_for_for_ever(made: Made) -> None:
    async def say_nothing(fake: FakeWeaver, frame: list[Any]) -> None:
        pass

    client, _ = await made(say_nothing)

    with pytest.raises(loom.WeaverUnavailable, match=r"did not answer within 0\.05 s"):
        await client.ask("status", 0.05)


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\x01", pack(["dance", 1]), pack(["answer", "one", 2])]
)
async def test_one_that_speaks_nonsense_is_given_up(made: Made, data: bytes) -> None:
    async def nonsense(fake: FakeWeaver, frame: list[Any]) -> None:
        fake.write(data)

    client, _ = await made(nonsense)

    with pytest.raises(loom.WeaverUnavailable):
        await client.ask("command")


@pytest.mark.parametrize("value", [1 << 80, object(), {1: 2}, b"bytes"])
async def test_what_the_link_cannot_carry_is_refused(made: Made, value: object) -> None:
    client, fake = await made(echo)

    with pytest.raises(loom.WrongArguments):
        await client.ask("command", params={"a": value})
    assert fake.asked == []
    assert (await client.ask("status"))[0] == "status"


@pytest.mark.parametrize("about", [{}, {"in_session": "s-1"}])
@pytest.mark.parametrize("as_json", [False, True])
async def test_few_large_questions_of_one_user_are_under_way(
    made: Made, as_json: bool, about: dict[str, str]
) -> None:
    came: asyncio.Queue[list[Any]] = asyncio.Queue()
    client, fake = await made(lambda fake, frame: came.put(frame))
    ask = client.ask_json if as_json else client.ask
    asked = [ask("history", user="ann", replica="r", **about) for _ in range(20)]
    asked += [ask("events", user="bob"), client.ask("command", user="ann")]  # which is no read, and waits for none
    all_of_them = asyncio.gather(*asked)

    first = [await came.get() for _ in range(MAX_QUESTIONS + 2)]
    assert Counter(frame[2] for frame in first) == {"ann": MAX_QUESTIONS + 1, "bob": 1}
    assert came.empty()
    for frame in first:
        fake.say(["answer", frame[1], b"{}"])
    for _ in range(20 - MAX_QUESTIONS):
        fake.say(["answer", (await came.get())[1], b"{}"])
    assert set(await all_of_them) == {b"{}"}
    assert not client._turns


async def test_a_question_that_waits_for_too_long_is_refused(made: Made) -> None:
    came: asyncio.Queue[list[Any]] = asyncio.Queue()
    client, _ = await made(lambda fake, frame: came.put(frame))
    held = [asyncio.ensure_future(client.ask("replicas", user="ann")) for _ in range(MAX_QUESTIONS)]
    for _ in held:
        await came.get()

    with pytest.raises(loom.LimitReached, match="questions about replicas of 'ann'"):
        await client.ask("events", 0.01, user="ann")
    for one in held:
        one.cancel()


@pytest.mark.parametrize("many", [[1] * 1000, [[]] * 1000, {str(n): n for n in range(1000)}, [[[[1] * 300]]]])
async def test_many_values_are_read_beside_the_event_loop(
    made: Made, monkeypatch: pytest.MonkeyPatch, many: object
) -> None:
    threads: list[int] = []

    def noted(value: object, path: str) -> object:
        threads.append(threading.get_ident())
        return plain(value, path)

    monkeypatch.setattr(weaver_client, "plain", noted)
    client, fake = await made(echo)

    await client.ask("command", params={"a": many})
    assert threading.get_ident() not in threads
    await client.ask("command", params={"a": [1] * 100})
    assert threads[-1] == threading.get_ident()
    assert [frame[4]["params"]["a"] for frame in fake.asked] == [many, [1] * 100]


async def test_what_is_too_large_is_refused(made: Made) -> None:
    client, _ = await made(echo)

    with pytest.raises(loom.TooLarge):
        await client.ask("command", params={"a": "x" * (17 << 20)})


async def test_a_wait_that_is_given_up_leaves_the_others(made: Made) -> None:
    first: list[list[Any]] = []

    async def late(fake: FakeWeaver, frame: list[Any]) -> None:
        if not first:
            first.append(frame)
            return
        await echo(fake, first[0])  # for which nobody waits any more
        await echo(fake, frame)

    client, _ = await made(late)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.ask("status"), 0.05)

    assert (await client.ask("replicas"))[0] == "replicas"


async def test_an_error_that_nobody_waits_for_any_more_leaves_the_others(made: Made) -> None:
    first: list[list[Any]] = []

    async def late(fake: FakeWeaver, frame: list[Any]) -> None:
        if not first:
            first.append(frame)
            return
        fake.say(["error", first[0][1], "unknown_replica", "no replica named x"])
        await echo(fake, frame)

    client, _ = await made(late)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(client.ask("replica", id="x"), 0.05)

    assert (await client.ask("replicas"))[0] == "replicas"


async def test_a_weaver_that_is_said_to_be_there_is_waited_for_until_it_listens(tmp_path: Path) -> None:
    client, fake = WeaverClient(str(tmp_path / "sock"), a_key, BOUND), FakeWeaver(str(tmp_path / "sock"), echo)
    client.came()
    asking = asyncio.ensure_future(client.ask("status"))
    await asyncio.sleep(0)  # in which it finds nobody
    assert not asking.done()

    await fake.start()

    assert (await asking)[0] == "status"
    client.close()
    await fake.close()


async def test_a_weaver_that_is_said_to_be_there_and_does_not_listen_is_away(tmp_path: Path) -> None:
    client = WeaverClient(str(tmp_path / "sock"), a_key, 0.05)
    client.came()

    with pytest.raises(loom.WeaverUnavailable, match="the weaver is away: No such file or directory"):
        await client.ask("status")


async def test_nobody_waits_when_the_gateway_ends(made: Made) -> None:
    async def say_nothing(fake: FakeWeaver, frame: list[Any]) -> None:
        client.close()

    client, _ = await made(say_nothing, patience=BOUND)

    with pytest.raises(loom.WeaverUnavailable):
        await asyncio.wait_for(client.ask("command_state", BOUND), BOUND / 4)


async def test_watching_ends_with_the_weaver(made: Made) -> None:
    async def push(fake: FakeWeaver, frame: list[Any]) -> None:
        fake.say(["snapshot", frame[1], {"replicas": []}])
        fake.say(["event", frame[1], {"event": {"id": 1}}])
        fake.hang_up()

    client, _ = await made(push)

    async with client.watch("anna") as watch:
        assert await watch.next() == ("snapshot", {"replicas": []})
        assert await watch.next() == ("event", {"event": {"id": 1}})
        with pytest.raises(loom.WeaverUnavailable):
            await watch.next()


async def test_a_large_snapshot_is_decoded_in_turns_and_what_comes_after_it_waits(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "TURN", 0.0)
    replicas = [{"id": f"train_{number}", "metrics": {"loss": math.inf}} for number in range(3000)]
    devices = [{"uuid": "GPU-0"}]
    snapshot = {"status": {"reports": 1}, "replicas": replicas, "devices": devices, "more": {"events": []}}
    rounds = 0

    async def say(weaver: FakeWeaver, frame: list[Any]) -> None:
        weaver.say(["snapshot", 1, {**snapshot, "status": {"text": "x" * weaver_client.LARGE}}])
        weaver.say(["event", 1, {"event": {"id": 1}}])
        weaver.say(["snapshot", 1, snapshot])

    async def do_other_things() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    client, weaver = await made(say)
    other = asyncio.ensure_future(do_other_things())
    async with client.watch("ann") as watch:
        kind, first = await asyncio.wait_for(watch.next(), BOUND)
        before = rounds
        assert (kind, first["replicas"]) == ("snapshot", replicas)
        assert await watch.next() == ("event", {"event": {"id": 1}})
        assert await watch.next() == ("snapshot", snapshot)
    other.cancel()

    assert before > 3000 // 16
    assert weaver.asked == [["watch", 1, "ann"]]


async def test_a_large_answer_is_decoded_in_turns(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TURN", 0.0)
    replicas = [{"id": f"train_{number}", "metrics": {"loss": 0.5}} for number in range(3000)]
    rounds = 0

    async def say(weaver: FakeWeaver, frame: list[Any]) -> None:
        weaver.say(["answer", frame[1], replicas])

    async def do_other_things() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    client, _ = await made(say)
    other = asyncio.ensure_future(do_other_things())
    assert await asyncio.wait_for(client.ask("replicas", BOUND), BOUND) == replicas
    other.cancel()

    assert rounds > 3000 // 16


VALUES: list[Any] = [
    None, True, -1, 2**63, 1.5, math.inf, "", "é" * 40, "x" * 70_000, b"", b"y" * 70_000, [], {}, [[[[[[[1]]]]]]],
    list(range(70_000)), {str(n): n for n in range(70_000)},
    {"a": {"b": {"c": {"d": {"e": {"f": list(range(100))}}}}}},
]  # fmt: skip


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value!r:.20}")
async def test_what_is_decoded_in_turns_is_what_is_decoded_at_once(value: Any, count: int) -> None:
    for frame in (
        ["answer", 1, value],
        ["answer", 1, {"a": value, "b": [value, value]}],
        ["answer", *[value] * count],
    ):
        body = pack(frame)[4:]

        assert await weaver_client.unpack_in_turns(body) == unpack(body) == frame


async def test_whatever_is_cut_off_or_garbled_is_refused_in_turns_as_at_once() -> None:
    body = pack(["answer", 1, {"a": VALUES[8], "b": [1.5, {"c": "d"}], "e": VALUES[10]}])[4:]
    chance = random.Random(56)
    cuts = [body[: chance.randrange(len(body))] for _ in range(200)]
    for number in range(400):
        garbled = bytearray(body)
        garbled[chance.choice((number % 40, chance.randrange(len(body))))] = chance.randrange(256)
        cuts.append(bytes(garbled))
    for wrong in cuts:
        try:
            expected: Any = unpack(wrong)
        except loom.ProtocolMismatch:
            with pytest.raises(loom.ProtocolMismatch):
                await weaver_client.unpack_in_turns(wrong)
        else:
            assert repr(await weaver_client.unpack_in_turns(wrong)) == repr(expected)


@pytest.mark.parametrize(
    "body",
    [
        [1, 1, {"replicas": "x" * 300_000}],
        ["snapshot", 1, {"replicas": [], "padding": "x" * 300_000}, 4],
        ["snapshot", 1, "x" * 300_000],
        "x" * 300_000,
    ],
)
async def test_a_large_frame_that_is_no_push_ends_the_watch(made: Made, body: Any) -> None:
    async def say(weaver: FakeWeaver, frame: list[Any]) -> None:
        weaver.say(body)

    client, _ = await made(say)
    async with client.watch("ann") as watch:
        with pytest.raises(loom.WeaverUnavailable, match="not understood: not a "):
            await asyncio.wait_for(watch.next(), BOUND)
