"""`WeaverProxy.take_back`: which update it means, and the values that it gives to whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loom.errors import NotFound, WrongArguments
from loom_proxy.weaver.methods import WeaverMethods


class Weaver(WeaverMethods):
    """A stand-in for a weaver with two groups, of which some have applied updates."""

    def __init__(self) -> None:
        self.given: list[tuple[str, Any, Any]] = []
        self.told: list[dict[str, Any]] = []
        super().__init__(self._asked)

    def replicas(self) -> dict[str, Any]:
        return {id: SimpleNamespace(id=id, group=id[:-2]) for id in ("train_0", "train_1", "other_0")}

    def applied(self, command: str, replica: str, do: str = "update_config", **changes: Any) -> None:
        about = {"command": command, "do": do, "changes": changes}
        number = len(self.told) + 1
        self.told.append({"id": number, "time": 1.0, "kind": "applied", "replica": replica, **about})

    def _asked(self, operation: str, **arguments: Any) -> Any:
        if operation == "events":
            assert arguments["kind"] == "applied"
            return self.told
        self.given.append((arguments["kind"], arguments["params"], arguments["target"]))
        return {"id": "c", "do": "update_config", "replicas": [], "done": True, "outcomes": {}}


RATE = {"old": 0.1, "new": 0.2, "back": {"rate": None}}


def test_the_last_update_of_the_replicas_is_taken_back_for_those_alike_together() -> None:
    weaver = Weaver()
    weaver.applied("early", "train_0", rate={"old": 9, "new": 0.1})
    for replica, old in (("train_0", 4), ("train_1", 4)):
        weaver.applied("last", replica, rate=RATE, size={"old": old, "new": 8})
    weaver.applied("theirs", "other_0", rate=RATE)
    weaver.applied("paused", "train_0", do="pause")
    weaver.applied("other session", "gen_0@session-1", rate=RATE)

    weaver.take_back("train")
    assert weaver.given == [("update_config", {"rate": None, "size": 4}, ["train_1", "train_0"])]
    weaver.take_back("train_*", command="early")
    assert weaver.given[1:] == [("update_config", {"rate": 9}, ["train_0"])]
    weaver.take_back("gen_0")
    assert weaver.given[2:] == [("update_config", {"rate": None}, ["gen_0@session-1"])]


def test_what_cannot_be_taken_back_is_refused() -> None:
    weaver = Weaver()
    weaver.applied("c", "train_0", rate={"old": None, "new": 1})

    with pytest.raises(NotFound, match="other have applied no update of late"):
        weaver.take_back("other")
    with pytest.raises(NotFound, match="no update 'd' of late"):
        weaver.take_back(command="d")
    with pytest.raises(WrongArguments, match="'c' has changed values of which is not known"):
        weaver.take_back()
    assert weaver.given == []
