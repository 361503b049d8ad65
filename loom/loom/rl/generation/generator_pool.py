"""`GeneratorPool`: the generators of a run, each in a process of its own, and others in the place of lost ones."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loom.driver_api import Session, SpawnedProcs
from loom.errors import ActorError, Denied, LoomError, MissingDependency, WrongArguments, because
from loom.process.threads import start_thread
from loom.rl.engines.engine import EngineKind
from loom.rl.generation.completions import TextOrTokens
from loom.rl.generation.generator_requests import GeneratorRequests
from loom.rl.generation.interruptible_calls import LOOK_EVERY, ProcessGone, call_one, result_of
from loom.rl.generation.weight_client import WeightsVia
from loom.rl.settings import Generators
from loom.train.settings import RetryBudget

_log = logging.getLogger("loom")

OPEN_TIMEOUT = 120.0
"""Seconds that a generator's process has to start and to import everything."""
ENGINE_TIMEOUT = 900.0
"""Seconds that its engine has to start after that, if the options do not say."""


@dataclass
class PooledGenerator:
    """A generator that has answered."""

    number: int
    procs: SpawnedProcs
    actor: Any
    """The Monarch mesh, of one actor."""
    gone: threading.Event
    weights_step: int | None = None
    """The step of the weights; None before the first."""
    asleep: bool = False
    """True while trainers use its GPUs."""
    _url: str = ""

    def url(self) -> str:
        """Return the URL of its HTTP server, which is started for that.

        Raises:
            ProcessGone: the generator is lost.
        """
        if not self._url:
            self._url = result_of(call_one(self.actor.serve), self.gone, OPEN_TIMEOUT)
        return self._url


class GeneratorPool:
    """The generators, for one thread. Others start generators meanwhile.

    Args:
        requests: by which completions are requested over HTTP.
        via: returns the way of orders; with `WeightsVia.LANE` completions are endpoint calls, too.
        load: gives a generator that has just started the current weights, or raises `ProcessGone`.
        lines: whether generators print their events.
    """

    def __init__(
        self,
        session: Session,
        spec: Generators,
        folder: Path,
        requests: GeneratorRequests,
        via: Callable[[], WeightsVia],
        load: Callable[[PooledGenerator], None],
        lines: bool,
    ) -> None:
        self._lines = lines
        self._requests = requests
        self._via = via
        self._session = session
        self._spec = spec
        self._folder = folder
        self._load = load
        self._tokenizer = spec.own_tokenizer
        self._arrived: queue.SimpleQueue[PooledGenerator | _Failed] = queue.SimpleQueue()
        self._starting: set[int] = set()
        self._numbers = itertools.count()
        self._failures: dict[int, int] = {}
        self._last_failure = ""
        self._retries = RetryBudget()
        self._closed = threading.Event()
        self.living: list[PooledGenerator] = []
        self.lost = 0
        """Generators that were lost."""

    def resize(self, count: int) -> None:
        """Start generators, or stop those with the highest numbers, until so many are there or on their way."""
        for number in range(count):
            if number not in self._starting and all(one.number != number for one in self.living):
                self._start(number, 0.0)
        for one in [one for one in self.living if one.number >= count]:
            self.living.remove(one)
            one.procs.stop("fewer generators are wanted")

    def admit(self, block: bool = False) -> None:
        """Let generators that have started take part, with the current weights.

        Args:
            block: whether to wait until there is one at least.

        Raises:
            LoomError: there is no generator, and none may be started any more.
        """
        while True:
            while not self._arrived.empty():
                self._admit(self._arrived.get())
            if not block or self.living:
                return
            if not self._starting:
                raise LoomError(
                    f"no generator is left, and each was started as often as it may be: {self._last_failure}"
                )
            time.sleep(LOOK_EVERY)

    def await_all(self) -> None:
        """Wait until all generators take part; if one fails, until there is one at least."""
        while self._starting and not self._failures:
            self.admit()
            time.sleep(LOOK_EVERY)
        self.admit(block=True)

    def _admit(self, one: PooledGenerator | _Failed) -> None:
        self._starting.discard(one.number)
        if isinstance(one, _Failed):
            self._retry(one.number, one.reason, one.for_good)
            return
        try:
            self._load(one)
        except ProcessGone as error:
            self.lose(one, str(error))
        else:
            self.living.append(one)
            self.living.sort(key=lambda each: each.number)

    def generate(self, prompts: Sequence[TextOrTokens], n: int, max_tokens: int, seed: int) -> list[list[Any]]:
        """Return ``n`` completions of each prompt; others generate again what a lost generator was to."""
        found: dict[int, list[Any]] = {}
        encoded = [self._tokens_of(prompt) for prompt in prompts]
        for attempt in itertools.count():
            left = [place for place in range(len(prompts)) if place not in found]
            if not left:
                return [found[place] for place in range(len(prompts))]
            self.admit(block=True)
            calls = []
            for share, one in enumerate(list(self.living)):
                if places := left[share :: len(self.living)]:
                    own_seed = seed + 1_009 * one.number + 10_007 * attempt
                    asked = [encoded[place] for place in places]
                    calls.append((one, places, self.begin(one, asked, n, max_tokens, own_seed)))
            for one, places, call in calls:
                try:
                    completions = result_of(call, one.gone)
                except ProcessGone as error:
                    self.lose(one, str(error))
                    continue
                self._failures[one.number] = 0
                found.update((place, completions[n * at : n * (at + 1)]) for at, place in enumerate(places))
        raise AssertionError

    def _tokens_of(self, prompt: TextOrTokens) -> list[int]:
        """Return a prompt's tokens: the orchestrator's tokenizer decides, and not each engine's."""
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def begin(
        self, one: PooledGenerator, prompts: Sequence[TextOrTokens], n: int, max_tokens: int, seed: int
    ) -> Future[list[Any]]:
        """Request ``n`` completions of each prompt from a generator."""
        encoded = [self._tokens_of(prompt) for prompt in prompts]
        if self._via() is WeightsVia.LANE:
            return call_one(one.actor.generate, encoded, n=n, max_tokens=max_tokens, seed=seed)
        sampling = replace(self._spec.sampling, max_tokens=max_tokens, seed=seed)
        try:
            return self._requests.complete(one.url(), encoded, n, sampling)
        except ProcessGone as error:
            failed: Future[list[Any]] = Future()
            failed.set_exception(error)
            return failed

    @property
    def asleep(self) -> bool:
        """True if generators sleep."""
        return any(one.asleep for one in self.living)

    def sleep(self) -> None:
        """Let the generators free their GPUs' memory; those that do not are lost."""
        self._turn(lambda generator: generator.sleep, asleep=True)

    def wake(self) -> None:
        """Let the generators take their GPUs' memory back; those that do not are lost. They need weights then."""
        self._turn(lambda generator: generator.wake, asleep=False)

    def _turn(self, endpoint: Callable[[Any], Any], asleep: bool) -> None:
        calls = [(one, call_one(endpoint(one.actor))) for one in self.living if one.asleep is not asleep]
        for one, call in calls:
            try:
                result_of(call, one.gone)
            except ProcessGone as error:
                self.lose(one, str(error))
            else:
                one.asleep = asleep

    def lose(self, one: PooledGenerator, reason: str) -> None:
        """Replace a lost generator."""
        self.lost += 1
        one.procs.stop(reason)
        if one in self.living:
            self.living.remove(one)
        self._retry(one.number, reason)

    def _retry(self, number: int, reason: str, for_good: bool = False) -> None:
        failures = self._failures[number] = self._failures.get(number, 0) + 1
        wait = None if for_good else self._retries.wait(failures)
        if wait is None and not for_good and self.living:  # its host may come back while others generate
            wait = self._retries.longest_wait
        self._last_failure = reason
        _log.warning("generator %d is lost: %s; %s", number, reason, "given up" if wait is None else "starts again")
        if wait is not None:
            self._start(number, wait)

    def _start(self, number: int, wait: float) -> None:
        self._starting.add(number)
        start_thread(f"generator {number}", self._open, number, wait)

    def _open(self, number: int, wait: float) -> None:
        if self._closed.wait(wait):
            return
        procs: SpawnedProcs | None = None
        try:
            hosts = self._session.hosts()
            gone = threading.Event()
            name = f"generator_{number}-{next(self._numbers)}"
            environment = {"LOOM_TIMING_ROLE": "generator", "LOOM_TIMING_DIR": self._timing_folder()}
            if self._lines:
                environment["LOOM_TIMING_LINES"] = "1"
            procs = self._session.spawn_procs(
                name, hosts[number % len(hosts)], {"gpus": 1}, lambda rank: gone.set(), environment
            )
            actor = procs.mesh.spawn("generator", self._class(), *self._args(), **self._kwargs(number))
            engine = float(self._spec.options.get("start_timeout", ENGINE_TIMEOUT))
            result_of(call_one(actor.start), gone, OPEN_TIMEOUT + engine)
        except Exception as error:  # noqa: BLE001 - the host may be lost meanwhile; another attempt follows
            if procs is not None:
                procs.stop("the generator could not be started")
            raised = error.exception if isinstance(error, ActorError) else error
            for_good = isinstance(raised, WrongArguments | Denied | MissingDependency)
            self._arrived.put(_Failed(number, because("it could not be started", raised), for_good))
            return
        if self._closed.is_set():
            procs.stop("the run is over")
        self._arrived.put(PooledGenerator(number, procs, actor, gone))

    def _timing_folder(self) -> str:
        return os.environ.get("LOOM_TIMING_DIR") or str(self._folder / "timing")

    def _class(self) -> type:
        from loom.rl.generation.generator import Generator

        return self._spec.actor or Generator

    def _args(self) -> tuple[Any, ...]:
        return self._spec.make_model, self._spec.tokenizer

    def _kwargs(self, number: int) -> Mapping[str, Any]:
        spec, hosts = self._spec, len(self._session.hosts())
        own: dict[str, Any] = {
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "concurrency": spec.concurrency,
        }
        if spec.model is not None or spec.kind is not EngineKind.LOOM:
            model = None if spec.model is None else os.fspath(spec.model)
            place: dict[str, Any] = {"log": f"generator_{number}", "slot": number // hosts, "gpus": spec.gpus}
            if spec.colocated:
                place["colocated"] = True
            own = {**own, "engine": spec.kind.value, "model": model, **place}
        return {**own, "seed": spec.seed + number, "folder": str(self._folder), **spec.options}

    def close(self) -> None:
        """Stop all generators, also starting ones."""
        self._closed.set()
        for one in self.living:
            one.procs.stop("the run is over")
        self.living = []
        while not self._arrived.empty():
            if isinstance(arrived := self._arrived.get(), PooledGenerator):
                arrived.procs.stop("the run is over")


@dataclass(frozen=True)
class _Failed:
    number: int
    reason: str
    for_good: bool
    """True if another attempt would fail alike."""


@dataclass
class PromptRequest:
    """A prompt whose completions are generated."""

    id: str
    """``STEP.PROMPT`` of the step that asked for it."""
    prompt: Any
    """The prompt as the task gave it: a text, or tokens."""
    n: int
    max_tokens: int
    seed: int
    generator: PooledGenerator | None = None
    answer: Future[list[Any]] | None = None


class Inflight:
    """Requests that go on from step to step, for one thread."""

    def __init__(self, pool: GeneratorPool) -> None:
        self._pool = pool
        self._open: list[PromptRequest] = []

    @property
    def count(self) -> int:
        """Prompts whose completions are generated now."""
        return len(self._open)

    def next_finished(self, wanted: int, new: list[PromptRequest]) -> list[tuple[PromptRequest, list[Any]]]:
        """Add requests; return the first ones that are done, in the order in which they were asked for."""
        self._open += new
        found: dict[str, list[Any]] = {}
        while len(found) < wanted:
            self._pool.admit(block=True)
            self._send()
            waiting = [one.answer for one in self._open if one.answer is not None and one.id not in found]
            wait(waiting, LOOK_EVERY, FIRST_COMPLETED)
            for one in self._open:
                if one.id not in found and len(found) < wanted and (answer := self._outcome(one)) is not None:
                    found[one.id] = answer
        taken = [one for one in self._open if one.id in found]
        self._open = [one for one in self._open if one.id not in found]
        return [(one, found[one.id]) for one in taken]

    def _send(self) -> None:
        for one in self._open:
            if one.answer is None:
                busy = {each.number: 0 for each in self._pool.living}
                for other in self._open:
                    if other.answer is not None and other.generator is not None and other.generator.number in busy:
                        busy[other.generator.number] += 1
                one.generator = min(self._pool.living, key=lambda each: busy[each.number])
                one.answer = self._pool.begin(one.generator, [one.prompt], one.n, one.max_tokens, one.seed)

    def _outcome(self, one: PromptRequest) -> list[Any] | None:
        """Return the completions of a request; None if there are none. With its generator lost, it begins again."""
        generator, answer = one.generator, one.answer
        if generator is None or answer is None or not (answer.done() or generator.gone.is_set()):
            return None
        try:
            completions: list[Any] = result_of(answer, generator.gone)
        except ProcessGone as error:
            if generator in self._pool.living:
                self._pool.lose(generator, str(error))
            one.generator = one.answer = None
            return None
        return completions
