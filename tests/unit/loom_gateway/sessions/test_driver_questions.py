"""What the gateway makes of a driver that answers, is busy, is older, lies or dies. The stand-in is a driver."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from loom.errors import DriverUnavailable, LoomError, ProtocolMismatch, WrongState
from loom.wire.bodies import Describe, Description, SessionEnded
from loom.wire.frames import decode_frame
from loom.wire.handshake import refusal
from loom.wire.length_prefix import LENGTH, behind_length
from loom.wire.messages import Message
from loom.wire.stream import unnumbered_frame
from loom_gateway.sessions import session
from loom_gateway.sessions.driver_process import DriverProcess
from loom_gateway.sessions.session import LONGEST, DriverQuestions
from loom_gateway.sessions.state_dir import DriverFiles, DriverRecord

BOUND = 20.0

MESHES = {
    "hosts": {
        "id": 0,
        "name": "hosts",
        "extent": {"hosts": 1},
        "elements": {"counts": {"alive": 1}, "states": ["alive"], "failures": []},
        "stopped": False,
        "procs": [],
    },
    "left_out": 0,
}

TENSOR = {
    "mesh": "tensors",
    "name": "w",
    "gradients": 2,
    "trouble": "",
    "time": 5.0,
    "steps": [1, 2],
    "weight_norms": [1.0, None],
    "grad_norms": [0.5, 0.25],
    "weight": {
        "norm": 1.0, "mean": 0.0, "std": 0.5, "min": -1.0, "max": 1.0, "nonfinite": 0.0, "histogram": [1, 2]
    },
    "grad": None,
}  # fmt: skip


def framed(message: Message) -> bytes:
    return behind_length(unnumbered_frame(message))


def described(value: object) -> bytes:
    return framed(Description().message(parts=[json.dumps(value).encode()]))


class Process(DriverProcess):
    """This process, as a driver's."""

    async def end(self, reason: str, timeout: float = 0.0) -> None:
        raise AssertionError

    def signal(self, number: int) -> None:
        raise AssertionError

    def abandon(self) -> None:
        raise AssertionError


class Driver:
    """Answers on a driver's socket."""

    def __init__(self, folder: Path) -> None:
        self.answer: Callable[[str], bytes | None] = lambda subject: described(MESHES)
        """Returns what is sent; nothing: the connection is closed."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked: list[str] = []
        self.connections = 0
        self.files = DriverFiles(str(folder / "driver"))
        self.questions = DriverQuestions(Process(self.files, DriverRecord(os.getpid(), 0, session="s")))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(EOFError, OSError), contextlib.closing(writer):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                (message,) = decode_frame(await reader.readexactly(length)).messages
                self.asked.append(Describe.from_body(message.body).subject)
                await self.may_answer.wait()
                answer = self.answer(self.asked[-1])
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[Driver]:
    made = Driver(tmp_path)
    server = await asyncio.start_unix_server(made.serve, made.files.socket)
    yield made
    made.may_answer.set()
    made.questions.close()
    server.close()


@pytest.fixture(autouse=True)
def _nothing_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LONGEST_FRESH", 0.0)


async def test_one_connection_has_all_questions(driver: Driver) -> None:
    run = {"id": 1, "name": "f", "state": "done", "started": 1.0, "finished": 2.5}
    runs = {"runs": [{**run, "trains": [{"id": "3f2a9c", "name": "sft"}]}, run]}
    tensors = {"tensors": [TENSOR], "left_out": 2}
    driver.answer = lambda subject: described({"meshes": MESHES, "runs": runs, "tensors": tensors}[subject])

    assert json.loads(await driver.questions.meshes()) == MESHES
    named, of_an_older_driver = json.loads(await driver.questions.runs())["runs"]
    assert (named, of_an_older_driver) == (runs["runs"][0], {**run, "trains": []})
    assert json.loads(await driver.questions.tensors()) == tensors
    assert json.loads(await driver.questions.meshes()) == MESHES

    assert (driver.asked, driver.connections) == (["meshes", "runs", "tensors", "meshes"], 1)


async def test_who_asks_at_once_or_soon_after_gets_the_same_answer(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LONGEST_FRESH", BOUND)
    monkeypatch.setattr(session, "SHARE", 1e-6)
    await asyncio.gather(*(driver.questions.meshes() for _ in range(50)))
    await driver.questions.meshes()
    assert driver.asked == ["meshes"]


@pytest.mark.guarantees(
    "page actions",
    "A driver that is busy, starting or dead costs whoever looks at its meshes seconds, and no connection more",
)
async def test_a_busy_driver_is_asked_once_and_answers_later(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PATIENCE", 0.05)
    driver.may_answer.clear()
    for _ in range(5):
        with pytest.raises(
            DriverUnavailable, match=r"driver of session 's' has not answered within 0\.05 s: it is busy"
        ):
            await driver.questions.meshes()
        with pytest.raises(DriverUnavailable):
            await driver.questions.runs()
    assert (driver.asked, driver.connections) == (["meshes"], 1)

    monkeypatch.setattr(session, "PATIENCE", BOUND)
    driver.may_answer.set()

    assert json.loads(await driver.questions.meshes()) == MESHES
    assert driver.connections == 1


async def test_one_who_gives_up_takes_the_answer_from_nobody(driver: Driver) -> None:
    driver.may_answer.clear()
    first, second = (asyncio.create_task(driver.questions.meshes()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    driver.may_answer.set()
    assert json.loads(await second) == MESHES


async def test_a_driver_that_nobody_can_reach(tmp_path: Path) -> None:
    with pytest.raises(DriverUnavailable, match="it is ending, or has died"):
        await Driver(tmp_path).questions.meshes()


async def test_another_process_on_the_drivers_socket_is_not_asked(driver: Driver) -> None:
    stranger = DriverQuestions(Process(driver.files, DriverRecord(1, 0, session="s")))
    with pytest.raises(DriverUnavailable):
        await stranger.meshes()
    assert driver.asked == []


async def test_a_driver_that_closes_the_connection_is_asked_again_on_another(driver: Driver) -> None:
    driver.answer = lambda subject: None
    with pytest.raises(DriverUnavailable):
        await driver.questions.meshes()
    driver.answer = lambda subject: described(MESHES)
    assert json.loads(await driver.questions.meshes()) == MESHES
    assert driver.connections == 2


async def test_a_driver_of_an_older_loom(driver: Driver) -> None:
    driver.answer = lambda subject: framed(refusal(ProtocolMismatch("messages of kinds [5] came too early")))
    with pytest.raises(WrongState, match="session 's' is of an older Loom"):
        await driver.questions.meshes()


async def test_a_driver_that_is_starting(driver: Driver) -> None:
    driver.answer = lambda subject: framed(refusal(DriverUnavailable("the session is starting")))
    with pytest.raises(DriverUnavailable, match="the session is starting"):
        await driver.questions.meshes()


def _without(name: str) -> dict[str, Any]:
    return {**MESHES, "hosts": {key: value for key, value in MESHES["hosts"].items() if key != name}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "answer",
    [
        described([]),
        described({}),
        described(_without("elements")),
        described({**MESHES, "left_out": "many"}),
        framed(Description().message(parts=[b"\xff"])),
        framed(Description().message()),
        framed(SessionEnded("x").message()),
        LENGTH.pack(LONGEST + 1),
        LENGTH.pack(3) + b"abc",
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_error(driver: Driver, answer: bytes) -> None:
    driver.answer = lambda subject: answer
    with pytest.raises(LoomError):
        await asyncio.wait_for(driver.questions.meshes(), BOUND)
    driver.answer = lambda subject: described(MESHES)
    assert json.loads(await driver.questions.meshes()) == MESHES


async def test_what_does_not_belong_there_is_left_out(driver: Driver) -> None:
    driver.answer = lambda subject: described({**MESHES, "more": "x"})
    assert json.loads(await driver.questions.meshes()) == MESHES
