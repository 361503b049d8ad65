"""`AsyncWeaverProxy` has what `WeaverProxy` has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.command import InjectionProxy


class Answers:
    """Stands in for the way to the weaver: gives what a test says, and notes what was asked."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.answer = answer
        self.asked: list[tuple[str, Any]] = []

    def ask(self, operation: str, **arguments: Any) -> Any:
        self.asked.append((operation, arguments))
        return self.answer


def weaver_that_answers(answer: Mapping[str, Any]) -> tuple[WeaverProxy, Answers]:
    weaver, answers = WeaverProxy("ws://localhost", None), Answers(answer)
    weaver._ask = answers.ask
    return weaver, answers


DONE = {"id": "c-1", "replicas": ["train_0"], "done": True, "outcomes": {"train_0": {"ok": True, "step": 7}}}


def test_every_public_method_has_a_twin() -> None:
    weaver = WeaverProxy("ws://localhost", None)
    methods = {name for name in dir(weaver) if not name.startswith("_")} - {"aio"}

    assert {"command_of", "remove_injection", "on_respawn", "watch", "events"} <= methods
    assert methods == {name for name in dir(weaver.aio) if not name.startswith("_")}
    for name in methods:
        twin = getattr(weaver.aio, name)
        assert inspect.iscoroutinefunction(twin) or name in ("events", "watch")
        assert [*inspect.signature(twin).parameters] == [*inspect.signature(getattr(weaver, name)).parameters]


def test_what_the_weaver_has_not_its_twin_has_not() -> None:
    aio = WeaverProxy("ws://localhost", None).aio

    for name in ("aio", "restart", "_gateway"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(aio, name)


async def test_a_command_gives_what_its_replicas_made_of_it() -> None:
    weaver, answers = weaver_that_answers(DONE)

    given = await weaver.aio.pause("train_0")
    found = await weaver.aio.command_of("c-1")

    assert given == found
    assert given["train_0"].step == 7
    assert [operation for operation, _ in answers.asked] == ["command", "command_state"]


async def test_an_injection_can_be_removed() -> None:
    weaver, _ = weaver_that_answers({**DONE, "evidence": {}})

    assert isinstance(await weaver.aio.inject("slow", "train_0"), InjectionProxy)


def test_one_request_gives_a_command_and_waits_for_it() -> None:
    weaver, answers = weaver_that_answers(DONE)

    command = weaver.command("pause", wait=1.0)

    assert command.get()["train_0"].ok
    assert answers.asked == [("command", {"kind": "pause", "params": {}, "target": "*", "wait": 1.0})]
