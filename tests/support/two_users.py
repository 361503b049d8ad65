"""A user of a shared gateway who works at random, and meanwhile tries everything of the other user's.

Whatever is tried with a name of the other's is tried with a name that nobody has, too: both answers are the same.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

import loom
from loom import Actor, endpoint
from loom.rest_client import Gateway as Rest
from loom.rest_client import quoted
from loom.token_file import digest
from tests.support.gateways import BOUND, await_true
from tests.support.raw_client import refusal, websocket
from tests.support.trespass import REFUSED, attempts_on, outcome, outcomes
from tests.support.users import House

TRANSPORTS: tuple[Literal["websocket", "http"], ...] = ("websocket", "http")
MOST = 2
"""Sessions that a user has at once, beside the one with the training."""

_IDS = re.compile("[0-9a-f]{32}")


def _as_a_word(name: str) -> re.Pattern[str]:
    """Finds a name, and not a part of another word, as 'cod' is of 'code'."""
    return re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])")


class Account(Actor):
    """Holds a number, which only its user may change."""

    def __init__(self) -> None:
        self._total = 0

    @endpoint
    def add(self, value: int) -> int:
        self._total += value
        return self._total


class Trainer(Actor):
    """Trains, as a replica whose name and group are by default the same for every user."""

    def __init__(self, replica: str = "train_0", group: str = "train") -> None:
        self._rate = 0.0
        self._threadlet = loom.Threadlet(replica, group=group, config={"rate": self._rate}, injectable=True)
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

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def try_all(self, attempts: list[tuple[str, Any]]) -> list[str]:
        return outcomes(attempts)


class Person(threading.Thread):
    """One of the users, who is run with another, given by `meet`. `failure` is what was wrong, or None.

    Args:
        trains: whether the user has processes on workers, and not only a session.
        own_ids: whether drivers and workers have user ids of their own, so that the kernel keeps users apart, too.
        own_workers: whether the users have workers of their own.
    """

    def __init__(
        self,
        house: House,
        user: str,
        seed: int,
        seconds: float,
        trains: bool = True,
        own_ids: bool = False,
        own_workers: bool = False,
    ) -> None:
        super().__init__(name=user, daemon=True)
        self.user = user
        self.failure: BaseException | None = None
        self.counts: dict[str, int] = {}
        self.names: list[str] = []  # of every session that there has been
        self.streams: list[str] = []
        self.tunnels: list[str] = []
        self.commands: list[str] = []
        self.drivers: list[int] = []
        self.trainer_pid = 0
        self.replica, self.group = f"replica-of-{user}", f"group-of-{user}"
        self.secret = f"secret-of-{user}"
        self._house = house
        self._random = random.Random(f"{seed} {user}")
        self._seconds = seconds
        self._trains, self._own_workers = trains, own_workers
        self._other: Person
        self._living: dict[str, tuple[loom.Job, Any, int]] = {}
        self._weaver = house.weaver(user)
        self._rate = 0.0
        self._targets: list[str | list[str]] = []  # of the other's, which the user has tried
        self._actions: list[Callable[[], None]] = [self._look]
        if trains:
            self._actions += [
                self._open,
                self._add,
                self._add,
                self._print,
                self._watch,
                self._command,
                self._leave,
            ]
        self._attacks: list[Callable[[], None]] = [
            self._join,
            self._join,
            self._ask,
            self._ask,
            self._show_token,
            self._command_other,
            self._command_other,
            self._ask_weaver,
            self._ask_weaver,
            self._use_tunnel,
            *([self._break_out] if trains and own_ids else []),
        ]

    @property
    def all_actions(self) -> set[str]:
        """The names of everything that is done in a long time."""
        return {action.__name__ for action in self._actions + self._attacks}

    def meet(self, other: Person) -> None:
        self._other = other

    def begin(self) -> None:
        """Open a session, and train: one replica of the same name as the other's, and one of another name."""
        self._home = self._house.connect(self.user)
        self._note(self._home)
        if not self._trains:
            return
        on = self._home.hosts.spawn_procs(per_host={"gpus": 2}, name="trainers").slice(hosts=0)
        self._trainer = on.slice(gpus=0).spawn("trainer", Trainer)
        named = on.slice(gpus=1).spawn("named", Trainer, self.replica, self.group)
        assert [one.rate.call_one().get(BOUND) for one in (self._trainer, named)] == [0.0, 0.0]
        self.trainer_pid = self._trainer.pid.call_one().get(BOUND)

    def run(self) -> None:
        until = time.monotonic() + self._seconds
        try:
            while time.monotonic() < until and self._other.failure is None:
                action = self._random.choice(self._actions + self._attacks)
                action()
                self.counts[action.__name__] = self.counts.get(action.__name__, 0) + 1
            for name in list(self._living):
                self._end(name)
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self.failure = error

    def end(self) -> None:
        """Check that the training went on untouched, and end it."""
        assert self._home.run(len, "abc") == 3
        self._check_replicas()
        if self._trains:
            assert self._trainer.rate.call_one().get(BOUND) == self._rate
            assert self._trainer.pid.call_one().get(BOUND) == self.trainer_pid
        self._home.close()

    def _check_replicas(self) -> None:
        there = {one.id: one.state.value for one in self._weaver.replicas().values()}
        assert there == (dict.fromkeys(("train_0", self.replica), "running") if self._trains else {})

    # -- what the user does in what is the user's own -------------------------------------------------------

    def _note(self, job: loom.Job) -> None:
        self.names.append(job.session)
        self.streams.append(job._connection.welcome.stream)
        if job.transport == "http":
            self.tunnels.append(job._connection._transport._path.strip("/"))  # type: ignore[attr-defined]
        self.drivers.append(self._house.gateway.session(job.session)["pid"])
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
            [
                "/api/v1/sessions?ended=true",
                "/api/v1/status",
                "/metrics",
                "/api/v1/weaver/status",
                "/api/v1/weaver/devices",
                "/api/v1/weaver/goodput",
                "/api/v1/weaver/policies",
            ]
        )
        status, text = self._house.answer(self.user, "GET", path)
        assert status == 200
        self._check(text)
        for event in self._weaver.events(limit=1000):
            if event.data.get("target") not in self._targets:  # what the user has asked for is in the user's events
                self._check(str(event))
        assert self._house.sees(self.user) <= set(self.names)
        self._check_replicas()

    def _command(self) -> None:
        target = self._random.choice(["*", "train", "train_0", "tr*"])
        self._rate = self._random.randrange(1, 1 << 20) + (0.25 if self.user == "ann" else 0.75)
        command = self._weaver.update_config(target, rate=self._rate)
        self.commands.append(command.id)
        answers = command.get(BOUND)
        assert set(answers) == ({"train_0", self.replica} if target == "*" else {"train_0"})
        assert all(answer.ok for answer in answers.values()), answers
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
        # What the user's refusals list is then the same for some time.
        await_true(lambda: name not in self._house.sees(self.user))

    # -- what the user tries with what is the other's -------------------------------------------------------

    def _check(self, text: str, asked: str = "") -> None:
        """Check that a text has nothing of the other user's but the name that was asked for."""
        text = text.replace(asked, "") if asked else text
        other = self._other
        known = [*other.names, *other.streams, *other.tunnels, *other.commands, other.secret, other.replica]
        for name in [*known, other.group]:
            assert name not in text, f"{self.user} saw {name!r} in {text[:2000]!r}"
        for quote in "'", '"':
            assert f"{quote}{other.user}{quote}" not in text, text[:2000]

    def _alike(self, attempt: Callable[[str], Any], theirs: str) -> None:
        """Check that an attempt with a name of the other's has the same outcome as one with a name of nobody's."""
        nobodys = "".join(self._unlike(letter) for letter in theirs)
        found = [str(attempt(name)) for name in (theirs, nobodys)]
        one, nobody = (
            _IDS.sub("ID", _as_a_word(name).sub("NAME", text))
            for text, name in zip(found, (theirs, nobodys), strict=True)
        )
        assert one == nobody, f"{self.user} tells {theirs!r} from the unknown {nobodys!r}: {found}"
        self._check(found[0], theirs)

    def _unlike(self, letter: str) -> str:
        """A letter in place of one of a name: what is left of a name is its form."""
        return self._random.choice("0123456789abcdef") if letter in "0123456789abcdef" else letter

    def _request(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        return self._house.answer(self.user, method, path, body)

    def _join(self) -> None:
        """Drive, watch, take over, resume, or open a second connection."""
        mode = self._random.choice(["watch", "drive"])
        if self._random.random() < 0.3:
            attempt = self._connecting(mode, self._random.choice(TRANSPORTS))
        else:
            attempt = self._greeting(
                mode=mode,
                take_over=self._random.random() < 0.5,
                persist=self._random.random() < 0.5,
                lane=self._random.choice([0, 1]),
                stream=self._random.choice(["", *self._other.streams]),
            )
        self._alike(attempt, self._random.choice(self._other.names))

    def _connecting(self, mode: Any, transport: Literal["websocket", "http"]) -> Callable[[str], str]:
        def attempt(name: str) -> str:
            try:
                joined = self._house.connect(
                    self.user, name, mode=mode, take_over=mode == "drive", transport=transport
                )
            except loom.UnknownSession as error:
                return str(error)
            raise AssertionError(f"{self.user} joined {name}: {joined}")

        return attempt

    def _greeting(self, **hello: Any) -> Callable[[str], str]:
        def attempt(name: str) -> str:
            with websocket(self._house.url, self._house.tokens[self.user]) as client:
                error = refusal(client, session=name, **hello)
            assert type(error) is loom.UnknownSession, error
            return str(error)

        return attempt

    def _ask(self) -> None:
        """End, read, follow, share, unshare, command, or look at, a session."""
        command = {"kind": "update_config", "params": {"rate": -1.0}}
        method, path, body = self._random.choice(
            [
                ("DELETE", "", None),
                ("GET", "/logs", None),
                ("GET", "/logs?follow=1", None),
                ("GET", "/replicas", None),
                ("GET", "/meshes", None),
                ("GET", "/runs", None),
                ("GET", "/tensors", None),
                ("GET", "/spans?seconds=0.1", None),
                ("POST", "/commands", command),
                ("PUT", f"/shares/{self.user}", {"scope": "drive"}),
                ("DELETE", "/shares/carol", None),
            ]
        )

        def attempt(name: str) -> tuple[int, str]:
            status, text = self._request(method, f"/api/v1/sessions/{name}{path}", body)
            assert status == 404, (method, path, status, text)
            return status, text

        self._alike(attempt, self._random.choice(self._other.names))

    def _show_token(self) -> None:
        """Show what may be known of the other's token, which is not the token."""
        (record,) = [token for token in self._house.file.read() if token.name == self._other.user]

        def attempt(guess: str) -> str:
            try:
                Rest(self._house.url, guess).status()
            except loom.AuthenticationError as error:
                return str(error)
            raise AssertionError(f"{guess!r} was accepted as a token")

        self._alike(attempt, self._random.choice([record.id, record.sha256, digest(record.sha256)]))
        self._alike(attempt, f"{record.name} {record.id}")

    def _command_other(self) -> None:
        """Command, pause, stop, drain, fail or strike replicas, by every form of target."""
        name = self._random.choice([self._other.replica, self._other.group])
        form = self._random.choice(["{}", "{}*", "?{}", "{}@" + self._random.choice(self._other.names)])
        theirs = form.format(name)
        as_list = self._random.random() < 0.3
        kind = self._random.choice(["update_config", "pause", "stop", "drain", "inject"])

        def attempt(target: str) -> tuple[int, str]:
            body: dict[str, Any] = {"target": [target] if as_list else target, "params": {}}
            self._targets.append(body["target"])
            if kind == "inject":
                return self._request("POST", "/api/v1/weaver/inject", {"fault": "sigkill", **body})
            body["params"] = {"rate": -1.0} if kind == "update_config" else {}
            status, text = self._request("POST", "/api/v1/weaver/commands", {"kind": kind, **body})
            assert '"ok":true' not in text.replace(" ", ""), text
            return status, text

        self._alike(attempt, theirs)
        if self._trains:
            self._command()  # what has the name of the other's replica is the user's own

    def _ask_weaver(self) -> None:
        """Ask for the replica, the stacks, the metrics, the commands and the weaver of the other."""
        other = self._other
        replica, session = other.replica, self._random.choice(other.names)
        found = [
            ("GET", "replicas/{}", replica),
            ("GET", "replicas/{}/stacks", replica),
            ("GET", "replicas/{}/profile?seconds=1", replica),
            ("GET", "replicas/{}/metrics", replica),
            ("GET", "replicas/{}/metrics/loss", replica),
            ("GET", "events?replica={}", replica),
            ("GET", "goodput?job={}", f"{other.group}@{other.names[0]}"),
            ("GET", "replicas?user={}", other.user),
            ("GET", "address?user={}", other.user),
            ("GET", "replicas?session={}", session),
            ("GET", "status?session={}", session),
            *(("GET", "commands/{}", command) for command in other.commands[-1:]),
            *(("DELETE", "inject/{}", command) for command in other.commands[-1:]),
            ("POST", "devices/{}/failure", f"GPU-{other.user}"),
            ("WS", "", other.user),
        ]
        method, path, name = self._random.choice(found)

        def attempt(name: str) -> object:
            if method == "WS":
                return self._watch_weaver(name)
            return self._request(
                method, "/api/v1/weaver/" + path.format(quoted(name, "name")), {} if method == "POST" else None
            )

        self._alike(attempt, name)

    def _watch_weaver(self, user: str) -> object:
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.client import connect

        given = {"Authorization": f"Bearer {self._house.tokens[self.user]}"}
        with connect(f"{self._house.url}/ws/v1/weaver?user={user}", additional_headers=given) as feed:
            try:
                raise AssertionError(f"{self.user} saw {feed.recv(timeout=BOUND)!r:.200}")
            except ConnectionClosed as error:
                return error.rcvd

    def _use_tunnel(self) -> None:
        """Send to, read from, or close, a tunnel through HTTP."""
        method, path = self._random.choice([("POST", "/up?n=1"), ("GET", "/down?n=1"), ("DELETE", "?n=1")])
        if self._other.tunnels:
            self._alike(
                lambda name: self._request(method, f"/api/v1/tunnel/{name}{path}"),
                self._random.choice(self._other.tunnels),
            )

    def _break_out(self) -> None:
        """Try files, sockets and processes, from the driver and from a worker."""
        attempts = attempts_on(self._house, self._random.choice(self._other.drivers))
        for where, found in [
            ("its driver", self._home.run(outcomes, attempts)),
            ("its worker", self._trainer.try_all.call_one(attempts).get(BOUND)),
        ]:
            tried = dict(zip(attempts, found, strict=True))
            assert set(found) <= REFUSED, f"{self.user}, in {where}: {tried}"
        assert self._home.run(outcome, "signal", self._other.trainer_pid) == "PermissionError"
        # The limit that is documented: on a worker that users share, isolation ends at the host.
        (limit,) = self._trainer.try_all.call_one([("signal", self._other.trainer_pid)]).get(BOUND)
        assert limit == ("PermissionError" if self._own_workers else "done: None")
