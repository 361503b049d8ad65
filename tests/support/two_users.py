"""A user of a shared gateway who works at random, and meanwhile tries everything of the other user's."""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import random
import threading
import time
from typing import Any, Literal

import loom
from loom import Actor, endpoint
from loom.rest import Gateway as Rest
from loom.token_file import digest
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND
from tests.support.raw_client import refusal, websocket
from tests.support.users import House

TRANSPORTS: tuple[Literal["websocket", "http"], ...] = ("websocket", "http")
MOST = 2
"""Sessions that a user has at once, beside the one with the training."""


class Account(Actor):
    """Holds a number, which only its user may change."""

    def __init__(self) -> None:
        self._total = 0

    @endpoint
    def add(self, value: int) -> int:
        self._total += value
        return self._total


class Trainer(Actor):
    """Trains, as a replica whose name and group are the same for every user."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._threadlet = loom.Threadlet("train_0", group="train", config={"rate": self._rate})
        self._threadlet.handler("rate")(self._set_rate)
        threading.Thread(target=self._train, daemon=True).start()

    def _set_rate(self, value: float) -> None:
        self._rate = value

    def _train(self) -> None:
        number = 0
        while True:
            with self._threadlet.step(number):
                number += 1
            time.sleep(0.01)

    @endpoint
    def rate(self) -> float:
        return self._rate


class Person(threading.Thread):
    """One of the users, who is run with another, given by `meet`. `failure` is what was wrong, or None."""

    def __init__(self, house: House, user: str, seed: int, seconds: float) -> None:
        super().__init__(name=user, daemon=True)
        self.user = user
        self.failure: BaseException | None = None
        self.counts: dict[str, int] = {}
        self.names: list[str] = []  # of every session that there has been
        self.streams: list[str] = []
        self.secret = f"secret-of-{user}"
        self._house = house
        self._random = random.Random(f"{seed} {user}")
        self._seconds = seconds
        self._other: Person
        self._living: dict[str, tuple[loom.Job, Any, int]] = {}
        self._weaver = WeaverProxy(house.url, house.tokens[user])
        self._rate = 0.0

    def meet(self, other: Person) -> None:
        self._other = other

    def begin(self) -> None:
        """Start the training."""
        self._home = self._house.connect(self.user)
        self._note(self._home)
        self._trainer = self._home.hosts.spawn_procs(name="trainers").slice(hosts=0).spawn("trainer", Trainer)
        assert self._trainer.rate.call_one().get(BOUND) == 0.0

    def run(self) -> None:
        actions = [
            self._open,
            self._add,
            self._add,
            self._print,
            self._watch,
            self._look,
            self._command,
            self._leave,
        ]
        attacks = [self._join, self._join, self._ask, self._ask, self._show_token, self._command_other]
        until = time.monotonic() + self._seconds
        try:
            while time.monotonic() < until and self._other.failure is None:
                action = self._random.choice(actions + attacks)
                action()
                self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
            for name in list(self._living):
                self._end(name)
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.failure = error

    def end(self) -> None:
        self._home.close()

    # -- what the user does in what is the user's own -------------------------------------------------------

    def _note(self, job: loom.Job) -> None:
        self.names.append(job.session)
        self.streams.append(job._connection.welcome.stream)
        job.print_logs = False

    def _open(self) -> None:
        if len(self._living) < MOST:
            job = self._house.connect(self.user, transport=self._random.choice(TRANSPORTS))
            self._note(job)
            account = job.hosts.spawn_procs(name="procs").slice(hosts=0).spawn("account", Account)
            self._living[job.session] = job, account, 0

    def _any(self) -> str | None:
        return self._random.choice(list(self._living)) if self._living else None

    def _add(self) -> None:
        name = self._any()
        if name is not None:
            job, account, total = self._living[name]
            value = self._random.randrange(1000)
            assert account.add.call_one(value).get(BOUND) == total + value
            self._living[name] = job, account, total + value

    def _print(self) -> None:
        name = self._any()
        if name is not None:
            job = self._living[name][0]
            job.run(print, self.secret)
            job.flush_logs()
            texts = {line["text"] for line in self._house.rest(self.user).logs(name, follow=False)}
            assert self.secret in texts
            assert self._other.secret not in texts

    def _watch(self) -> None:
        name = self._any()
        if name is not None:
            watcher = self._house.watch(self.user, name)
            watcher.print_logs = False
            assert set(watcher.meshes) <= {"procs", "account"}
            watcher.detach()

    def _look(self) -> None:
        path = self._random.choice(
            ["/api/v1/sessions?ended=true", "/api/v1/status", "/metrics", "/api/v1/weaver/events?limit=1000"]
        )
        status, text = self._house.answer(self.user, "GET", path)
        assert status == 200
        self._check(text)
        assert self._house.sees(self.user) <= set(self.names)
        assert set(self._weaver.replicas()) <= {"train_0"}

    def _command(self) -> None:
        target = self._random.choice(["*", "train", "train_0", "tr*"])
        self._rate = self._random.randrange(1, 1 << 20) + (0.25 if self.user == "ann" else 0.75)
        (answer,) = self._weaver.update_config(target, rate=self._rate).get(BOUND).values()
        assert answer.ok
        assert self._trainer.rate.call_one().get(BOUND) == self._rate

    def _leave(self) -> None:
        name = self._any()
        if name is not None and self._random.random() < 0.5:
            self._end(name)

    def _end(self, name: str) -> None:
        job, account, total = self._living.pop(name)
        assert account.add.call_one(0).get(BOUND) == total
        if self._random.random() < 0.5:
            job.close()
        else:
            self._house.rest(self.user).end_session(name)

    # -- what the user tries with what is the other's -------------------------------------------------------

    def _name_of_other(self) -> str:
        return self._random.choice(self._other.names)

    def _check(self, text: str, asked: str = "") -> None:
        """Check that a text has nothing of the other user's but the name that was asked for."""
        text = text.replace(asked, "") if asked else text
        for name in [*self._other.names, self._other.secret, *self._other.streams]:
            assert name not in text, f"{self.user} saw {name!r} in {text[:2000]!r}"
        for quote in "'", '"':
            assert f"{quote}{self._other.user}{quote}" not in text, text[:2000]

    def _join(self) -> None:
        name = self._name_of_other()
        mode = self._random.choice(["watch", "drive"])
        if self._random.random() < 0.3:
            try:
                joined = loom.connect(
                    self._house.url,
                    self._house.tokens[self.user],
                    name,
                    mode=mode,  # type: ignore[arg-type]
                    take_over=mode == "drive",
                    transport=self._random.choice(TRANSPORTS),
                )
            except loom.UnknownSession as error:
                self._check(str(error), name)
                return
            raise AssertionError(f"{self.user} joined {name}: {joined}")
        hello: dict[str, Any] = {
            "mode": mode,
            "take_over": self._random.random() < 0.5,
            "persist": self._random.random() < 0.5,
            "lane": self._random.choice([0, 1]),
            "stream": self._random.choice(["", *self._other.streams]),
        }
        with websocket(self._house.url, self._house.tokens[self.user]) as client:
            error = refusal(client, session=name, **hello)
        assert type(error) is loom.UnknownSession, error
        self._check(str(error), name)

    def _ask(self) -> None:
        name = self._name_of_other()
        method, path, body = self._random.choice(
            [
                ("DELETE", "", None),
                ("GET", "/logs", None),
                ("GET", "/logs?follow=1", None),
                ("PUT", f"/shares/{self.user}", {"scope": "drive"}),
                ("DELETE", f"/shares/{self._other.user}", None),
            ]
        )
        status, text = self._house.answer(self.user, method, f"/api/v1/sessions/{name}{path}", body)
        assert status == 404, (method, path, status, text)
        self._check(text, name)

    def _show_token(self) -> None:
        """Show what may be known of the other's token, which is not the token."""
        (record,) = [token for token in self._house.file.read() if token.name == self._other.user]
        guess = self._random.choice([record.id, record.name, record.sha256, digest(record.sha256)])
        try:
            Rest(self._house.url, guess).status()
        except loom.AuthenticationError as error:
            self._check(str(error))
        else:
            raise AssertionError(f"{guess!r} was accepted as a token")

    def _command_other(self) -> None:
        """Give a command to whatever has the name of the other's replica: it is the user's own."""
        self._command()
        assert self._weaver.replica("train_0").group == "train"
        events = self._weaver.events(limit=1000)
        self._check(str(events))
