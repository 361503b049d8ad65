"""A weaver's core with a clock of the test's own, and threadlets without sockets."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from loom.control.frame import pack_value
from loom.control.handshake import ThreadletHello
from loom.weaver.commit_output import OutboxPeer
from loom.weaver.persistent_state import Registry
from loom.weaver.storage.store import Store
from loom.weaver.weaver import Weaver
from tests.unit.loom.weaver.raw_threadlet import hello_of

START = 1_700_000_000.0


class Threadlet(OutboxPeer):
    """One end of a link without a socket."""

    unheard = False
    """Whether it has said what the weaver has not taken yet."""

    @property
    def has_unheard(self) -> bool:
        return self.unheard

    def __init__(self, bench: Bench, replica: str, **hello: Any) -> None:
        self.bench = bench
        self.told: list[list[Any]] = []
        self.closed = False
        self.instance = hello.pop("instance", f"instance-{next(bench.numbers)}")
        self.seq = 0
        session = hello.pop("key_of", None)
        frame = ["hello", hello_of("any", replica, self.instance, **hello)]
        bench.weaver.registration.register(self, ThreadletHello.from_body(frame), bench.now, session)
        bench.commit()

    def say(self, *frame: Any) -> None:
        self.bench.weaver.receive(self, pack_value(list(frame)), self.bench.now)
        self.bench.commit()

    def step(self, step: int, **metrics: float) -> None:
        self.seq += 1
        self.say("status", [[self.seq, self.bench.now, step, None, None, metrics, None]])

    def beat(self, step: int | None = None, phase: str = "step") -> None:
        self.say("beat", self.bench.now, step, phase)

    def ack(self, id: str, ok: bool = True, **rest: Any) -> None:
        self.say("ack", id, 5, {"ok": ok, "reason": None, "changes": {}, "refused": {}, **rest})

    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """Kinds and parameters of the commands so far."""
        return [(frame[2], frame[3]) for frame in self.told if frame[0] == "command"]

    def last_command(self) -> str:
        return next(frame[1] for frame in reversed(self.told) if frame[0] == "command")

    def lose(self) -> None:
        self.bench.weaver.lost(self, self.bench.now)
        self.bench.commit()


class Bench:
    """A weaver and its clock."""

    def __init__(self, path: Path | str = ":memory:", **options: Any) -> None:
        self.path = path
        self.now = START
        self.numbers = itertools.count()
        self.events: list[dict[str, Any]] = []
        self.stacks: list[tuple[str, str]] = []
        self.profiles: list[str] = []
        self.options = options
        self.weaver = Weaver(Registry(Store(path), self.now, **options), self.now)

    def commit(self) -> None:
        output = self.weaver.commit(self.now)
        for peer, frame in output.frames:
            assert isinstance(peer, Threadlet)
            if frame is None:
                peer.closed = True
            else:
                peer.told.append(frame.to_body())
        self.events += [event.to_body() for event in output.events]
        self.stacks += [(id, replica.id) for id, replica in output.stacks]
        self.profiles += [id for id, _, _ in output.profiles]

    def wait(self, seconds: float, *beating: Threadlet) -> None:
        """Let time pass, in which some threadlets say that they live."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            for threadlet in beating:
                threadlet.beat()
            self.weaver.tick(self.now)
            self.commit()

    def state(self, replica: str = "train_0") -> str:
        return self.weaver.known.replicas[replica].state.value

    def event(self, kind: str) -> dict[str, Any]:
        """The last event of a kind."""
        return next(event for event in reversed(self.events) if event["kind"] == kind)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def restart(self) -> None:
        self.weaver.known.store.close()
        self.weaver = Weaver(Registry(Store(self.path), self.now, **self.options), self.now)
