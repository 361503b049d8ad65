"""Functions that run in the driver, next to the meshes, and go on without a client.

Each has a `RunThread`: the driver's main thread, or another if that is taken. It can be cancelled.

A function with restarts is started again after it has raised, in this driver. If the driver dies, the next one of
the session starts it, from what `RestartFile` has.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from loom.control.run_start import function_place
from loom.errors import (
    LoomError,
    NameTaken,
    NoSuchRun,
    OperationCancelled,
    OperationFailed,
    TooManyRuns,
    WrongArguments,
)
from loom.process import tasks
from loom.tracing import flush
from loom.tracing.trace_ids import begin_trace, checked_trace
from loom.weaver.run_views import RunsPlace, TrainingName
from loom.wire.bodies import (
    AT_EACH,
    STDERR,
    AwaitRun,
    EndRun,
    ListRuns,
    OperationResult,
    ReadRunOutput,
    RunChanged,
    StartRun,
)
from loom.wire.codec import Decoder
from loom.wire.messages import Kind, Message
from loom_gateway.driver.handlers.restarts import CleanStart
from loom_gateway.driver.monarch.errors import raised_message
from loom_gateway.driver.monarch.mesh_table import HOST_MESH
from loom_gateway.driver.output.collector import LogCollector
from loom_gateway.driver.runs.output import RecordedOutput
from loom_gateway.driver.runs.restart_file import RestartFile
from loom_gateway.driver.runs.run_thread import RunThread
from loom_gateway.driver.runs.started_processes import end, started_in_the_driver
from loom_gateway.driver.session.context import SessionContext
from loom_gateway.driver.session.replies import Handler
from loom_gateway.sessions.descriptions import RunInfo, RunState, SessionRuns

MOST_RUNNING = 1000  # functions that run at once; each has a thread
KEPT_RUNS = 256  # finished runs whose result and output are kept; the oldest go first
NAMED_WITHIN = 1.0  # seconds that the weaver has to name the runs of trainings for a list
KEPT_BYTES = 256 << 20  # bytes of results and displays to keep, in addition to the newest; the oldest go first


class FunctionRun:
    """A function that runs, or has run."""

    def __init__(self, request: Message) -> None:
        start = StartRun.from_body(request.body)
        self.ident = request.id
        self.name = start.name
        self.trace = start.trace
        self.at_each = start.restarts == AT_EACH
        """Whether it runs in each driver of the session, and is never started again in one."""
        self.restarts = 0 if self.at_each else start.restarts or 0
        """Times that it may still be started again."""
        self.request = request if start.restarts else None
        """What to start it by, as long as it may be."""
        self.attempt = 0  # how many starts in this driver have failed
        self.waits: asyncio.Task[None] | None = None  # for its next start
        self.notified = start.detached  # whether the client is notified of changes of the state
        self.status = RunState.RUNNING
        self.started = time.time()
        self.finished: float | None = None
        self.finished_order = 0.0  # by a clock that does not jump
        self.thread: RunThread | None = None  # None until it has begun
        self.output: RecordedOutput
        self.given: set[int] = set()  # the ids of the proc meshes that the function was given
        self.keeps_driver = False  # whether it was given what no other driver has
        self.taken_up = False  # whether an earlier driver has left it
        self.over = asyncio.Event()
        self.trains: tuple[TrainingName, ...] = ()  # the runs of which it is, as the weaver said last
        self.answer: Message | None = None  # run's `Kind.RESULT` or `Kind.ERROR` message, encoded once
        self.waiting: list[tuple[int, float]] = []  # operations that wait for the result, with their arrival times
        self.readers: list[tuple[int, float, int]] = []  # that wait for output: id, arrival time, position

    def state(self) -> tuple[str, float, float | None]:
        return self.status.value, self.started, self.finished

    @property
    def places(self) -> dict[str, tuple[float, float]]:
        """The places where the processes of the function's trainings begin, and since and until when.

        A mesh that it was given is used by others before and after it.
        """
        own = dict.fromkeys([self.output.processes.place, *map(str, self.output.processes.meshes)], _EVER)
        going = self.started, math.inf if self.finished is None else self.finished
        return {**dict.fromkeys(map(str, self.given), going), **own}

    def name_trainings(self, begun: Mapping[str, list[RunsPlace]]) -> None:
        """Take the runs of trainings that have begun in places of the session."""
        found = (
            one
            for place, (since, until) in self.places.items()
            for one in begun.get(place, ())
            if any(since <= time <= until for time in one.times)
        )
        self.trains = tuple({one.run: TrainingName(one.run, one.name) for one in found}.values())


_EVER = (-math.inf, math.inf)


class Runs:
    """The runs of one session. All state belongs to the event loop."""

    def __init__(self, context: SessionContext, logs: LogCollector, restart_file: RestartFile) -> None:
        self._context = context
        self._logs = logs
        self._restart_file = restart_file
        self._files = concurrent.futures.ThreadPoolExecutor(1, "restarts")  # one thread, to keep the order
        self.clean_start = CleanStart(context)
        self._runs: dict[int, FunctionRun] = {}
        self._has_run = False  # whether there was ever a run
        self.handlers: dict[int, Handler] = {
            Kind.RUN: self._run,
            Kind.RUNS: self._on_loop(self._list),
            Kind.RUN_RESULT: self._on_loop(self._wait_for_result),
            Kind.RUN_OUTPUT: self._on_loop(self._read),
            Kind.RUN_END: self._on_loop(self._end),
        }

    def new_client(self) -> None:
        """Drop the operations of the previous client that wait for runs. Safe on any thread."""
        self._context.loop.call_soon_threadsafe(self._forget_clients)

    def describe(self) -> SessionRuns:
        """Return the runs that go on or are kept. Safe on any thread but the event loop's."""
        naming = asyncio.run_coroutine_threadsafe(self._name_trainings(), self._context.loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            naming.result(2 * NAMED_WITHIN)
        return SessionRuns(
            [
                RunInfo(run.ident, run.name, run.status, run.started, run.finished, run.trains)
                for run in self._runs.copy().values()
            ]
        )

    async def _name_trainings(self) -> None:
        """Ask the weaver for the runs of the functions' trainings. While it is away, what it said last holds."""
        runs = list(self._runs.values())
        places = {place for run in runs for place in run.places}
        if places and (begun := await self._context.weaver.runs_begun(places, NAMED_WITHIN)) is not None:
            for run in runs:
                run.name_trainings(begun)

    @property
    def going_on(self) -> bool:
        """True if a run goes on. Safe on any thread."""
        return any(run.status is RunState.RUNNING for run in self._runs.copy().values())

    async def close(self) -> None:
        """End the processes that functions have started, at the end of the session."""
        if self._has_run:
            await self._context.loop.run_in_executor(None, lambda: end(started_in_the_driver()))

    def _forget_clients(self) -> None:
        for run in self._runs.values():
            run.waiting.clear()
            run.readers.clear()

    def _on_loop(self, handler: Handler) -> Handler:
        def answer(message: Message, started: float) -> None:
            try:
                handler(message, started)
            except LoomError as error:
                self._context.replies.fail(message.id, started, error)

        return lambda message, started: self._soon(answer, message, started)

    def _soon(self, function: Callable[..., None], *args: Any) -> None:
        self._context.loop.call_soon_threadsafe(function, *args)

    def _find(self, ident: int) -> FunctionRun:
        run = self._runs.get(ident)
        if run is None:
            raise NoSuchRun(
                f"the driver has no run {ident}: it keeps those that are going and the last {KEPT_RUNS} others, "
                f"with {KEPT_BYTES >> 20} MiB of results"
            )
        return run

    async def restore(self, left: Sequence[Message]) -> None:
        """Have the functions that an earlier driver has left, and start them again.

        Those that each driver has to run come first, and have ended before the others begin.
        """
        taken = [self._take_up(message) for message in left]
        first = [one for one in taken if one[0].at_each]
        others = [one for one in taken if not one[0].at_each]
        tasks.run("begin functions of an earlier driver", self._begin_taken(first, others))

    def _take_up(self, message: Message) -> tuple[FunctionRun, Message]:
        """Return a function of an earlier driver, and what it is to be started by: one restart is used up."""
        start = StartRun.from_body(message.body)
        restarts = AT_EACH if start.restarts == AT_EACH else (start.restarts or 0) - 1
        request = replace(start, detached=True, restarts=restarts or None).message(message.id, message.parts)
        run = self._new(request)
        self._runs[run.ident] = run
        run.taken_up = True
        if not run.at_each:
            note = f"loom: its driver has died; the function is started again; {restarts} more restarts are left\n"
            run.output.write(STDERR, note)
        return run, request

    async def _begin_taken(
        self, first: Sequence[tuple[FunctionRun, Message]], others: Sequence[tuple[FunctionRun, Message]]
    ) -> None:
        for run, request in (*first, *others):
            if others and run is others[0][0]:
                await asyncio.gather(*(before.over.wait() for before, _ in first))
            await self._context.loop.run_in_executor(None, self._prepare, run, request)

    def _run(self, message: Message, started: float) -> None:
        run = self._new(message)
        if not run.notified:
            run.waiting.append((message.id, started))
        # Decode here and not on the loop, so that earlier operations have started and later ones have not.
        self._prepare(run, message)

    def _new(self, request: Message) -> FunctionRun:
        run = FunctionRun(request)
        printed = functools.partial(self._printed, run)
        place = function_place(self._context.weaver.session, run.ident)
        run.output = RecordedOutput(self._context.loop, printed, self._logs.of_run(run.ident, run.name), place)
        return run

    def _prepare(self, run: FunctionRun, request: Message) -> None:
        """Decode a function, and let it begin. On any thread but the event loop's."""
        try:
            function = self._decoded(run, request)
            if run.request is not None:
                self._restart_file.keep(request)
            else:
                self._restart_file.drop(request)
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may raise anything
            self._soon(self._refuse, run, error)
        else:
            self._soon(self._begin, run, function)

    def _decoded(self, run: FunctionRun, request: Message) -> Callable[[], Any]:
        fn, args, kwargs = Decoder(functools.partial(self._give, run)).loads(
            request.parts, f"the function or an argument of run {run.name!r}"
        )
        if run.request is not None and run.keeps_driver:
            raise WrongArguments(
                f"run {run.name!r} has restarts, and was given a mesh or port that ends with this driver: give it "
                f"job.hosts, and let it spawn its own"
            )
        function = functools.partial(fn, *args, **kwargs)
        trace = checked_trace(run.trace)
        return function if trace is None else functools.partial(_in_trace, trace, function)

    def _give(self, run: FunctionRun, mesh: int) -> Any:
        """Return the mesh or port of a reference in what a function is given."""
        if run.taken_up:
            mesh = HOST_MESH  # the only one that it may have been given, by another id if hosts had joined
        given = self._context.meshes.resolve(mesh)
        entry = self._context.meshes.known(mesh)
        all_hosts = entry is not None and entry.kind == "hosts" and len(entry.ranks) >= self._context.hosts.first
        run.keeps_driver |= not all_hosts
        if entry is not None and entry.kind != "hosts":
            run.given.add(entry.procs)
        return given

    def _begin(self, run: FunctionRun, function: Callable[[], Any]) -> None:
        if run.answer is not None:
            return  # it was cancelled before
        going = [other for other in self._runs.values() if other.status is RunState.RUNNING and other is not run]
        same = next((other for other in going if other.name == run.name), None)
        if same is not None:
            text = (
                f"run {run.name!r} is still going (id {same.ident}): wait for it, cancel it, or take another name"
            )
            self._refuse(run, NameTaken(text, code="run_name_taken"))
        elif len(going) >= MOST_RUNNING:
            self._refuse(run, TooManyRuns(f"{len(going)} functions run in the driver; no more than that may"))
        else:
            self._runs[run.ident] = run
            self._has_run = True
            self._notify(run)
            self._call(run, function)

    def _call(self, run: FunctionRun, function: Callable[[], Any]) -> None:
        run.thread = RunThread(run.name, function, run.output, functools.partial(self._encode, run))
        run.thread.start()

    async def _start_again(self, run: FunctionRun, error: BaseException) -> None:
        """Call a function that has raised once more. Its restart is used up when it begins."""
        assert run.request is not None
        start = StartRun.from_body(run.request.body)
        left = run.restarts - 1
        request = replace(start, restarts=left or None).message(run.ident, run.request.parts)
        try:
            await self.clean_start.prepare(run.output, error, run.attempt, left)
            function = await self._context.loop.run_in_executor(None, self._decoded, run, request)
            keep = self._restart_file.keep if left else self._restart_file.drop
            await self._context.loop.run_in_executor(self._files, keep, request)
        except Exception as failure:  # noqa: BLE001 - a user's __setstate__ may raise anything
            self._give_up(run, RunState.FAILED, failure)
            return
        run.waits = None
        run.restarts, run.request, run.attempt = left, request if left else None, run.attempt + 1
        self._call(run, function)

    def _give_up(self, run: FunctionRun, status: RunState, error: Exception) -> None:
        """End a function that waits for its next start."""
        run.waits = None
        self._forget_request(run)
        self._finish(run, status, raised_message(run.ident, error, self._context.encoder))

    def _forget_request(self, run: FunctionRun) -> None:
        if run.request is not None:
            self._context.loop.run_in_executor(self._files, self._restart_file.drop, run.request)

    def _refuse(self, run: FunctionRun, error: Exception) -> None:
        self._runs[run.ident] = run
        self._forget_request(run)
        self._finish(run, RunState.FAILED, raised_message(run.ident, error, self._context.encoder))

    def _encode(self, run: FunctionRun, value: Any, error: BaseException | None) -> None:
        """Encode a result or an exception as the run's answer. In the run's thread."""
        flush()
        encoder = self._context.encoder
        status = RunState.DONE if error is None else RunState.FAILED
        if error is not None and run.thread is not None and run.thread.was_cancelled(error):
            status, error = RunState.CANCELLED, OperationCancelled(f"run {run.name!r} was cancelled")
            run.output.processes.end_soon()  # that it has started since
        if status is RunState.FAILED and run.restarts > 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed because the session is over
                self._soon(self._wait_for_next, run, error)
            return
        if run.request is not None and not run.at_each:
            self._restart_file.drop(run.request)  # before anybody learns of the end
        try:
            if error is None:
                parts = encoder.dumps(value, f"the result of run {run.name!r}")
                answer = OperationResult(0.0).message(run.ident, parts)
            else:
                answer = raised_message(run.ident, error, encoder)
        except BaseException as broken:  # noqa: BLE001 - a user's __reduce__ may raise anything
            status = RunState.FAILED
            if not isinstance(broken, LoomError):
                broken = OperationFailed(f"the outcome of run {run.name!r} cannot be pickled: {broken!r}")
            answer = raised_message(run.ident, broken, encoder)
        try:
            self._soon(self._finish, run, status, answer)
        except RuntimeError:
            return  # the loop is closed because the session is over

    def _wait_for_next(self, run: FunctionRun, error: BaseException) -> None:
        run.waits = tasks.run("start a function again", self._start_again(run, error))

    def _finish(self, run: FunctionRun, status: RunState, answer: Message) -> None:
        run.output.finish()
        run.over.set()
        run.status, run.answer, run.finished = status, answer, time.time()
        run.finished_order = time.monotonic()
        self._printed(run, eager=not run.waiting)
        self._notify(run)
        for ident, started in run.waiting:
            self._answer(run, ident, started)
        run.waiting.clear()
        self._forget_oldest()

    def _notify(self, run: FunctionRun) -> None:
        if run.notified:
            # No flush is needed: an answer or the end of this turn of the loop sends it soon.
            self._context.send(RunChanged(*run.state()).message(run.ident))

    def _answer(self, run: FunctionRun, ident: int, started: float) -> None:
        assert run.answer is not None
        body = [(time.perf_counter() - started) * 1000, *run.answer.body[1:]]
        self._context.send(run.answer._replace(id=ident, body=body))

    def _forget_oldest(self) -> None:
        finished = [run for run in self._runs.values() if run.answer is not None]
        finished.sort(key=lambda run: run.finished_order, reverse=True)
        size = 0
        for place, run in enumerate(finished):
            assert run.answer is not None
            size += run.answer.size + run.output.kept_records
            if place >= KEPT_RUNS or (place > 0 and size > KEPT_BYTES):
                del self._runs[run.ident]

    def _list(self, message: Message, started: float) -> None:
        named = ListRuns.from_body(message.body).trainings
        for run in self._runs.values():
            run.notified = True
        if named:
            self._context.replies.answer_with(message, started, self._listed_with_trainings())
        else:
            self._context.replies.succeed(message.id, started, self._listed())

    async def _listed_with_trainings(self) -> list[tuple[Any, ...]]:
        await self._name_trainings()
        trains = {run.ident: [(one.id, one.name) for one in run.trains] for run in self._runs.values()}
        return [(*one, trains[one[0]]) for one in self._listed()]

    def _listed(self) -> list[tuple[Any, ...]]:
        return [(run.ident, run.name, *run.state()) for run in self._runs.values()]

    def _wait_for_result(self, message: Message, started: float) -> None:
        run = self._find(AwaitRun.from_body(message.body).run)
        if run.answer is None:
            run.waiting.append((message.id, started))
        else:
            self._answer(run, message.id, started)

    def _read(self, message: Message, started: float) -> None:
        request = ReadRunOutput.from_body(message.body)
        run, position = self._find(request.run), request.position
        if request.wait and run.answer is None and run.output.end <= position:
            run.readers.append((message.id, started, position))
        else:
            self._send_output(run, (message.id, started, position), eager=True)

    def _printed(self, run: FunctionRun, eager: bool = True) -> None:
        """Answer the operations that wait for output."""
        readers, run.readers = run.readers, []
        for reader in readers:
            if run.answer is not None or run.output.end > reader[2]:
                self._send_output(run, reader, eager)
            else:
                run.readers.append(reader)

    def _send_output(self, run: FunctionRun, reader: tuple[int, float, int], eager: bool) -> None:
        ident, started, position = reader
        end = run.output.end
        position, pieces = run.output.since(position)
        ended = run.answer is not None and position >= end
        self._context.replies.succeed(ident, started, (position, ended, pieces), eager=eager)

    def _end(self, message: Message, started: float) -> None:
        request = EndRun.from_body(message.body)
        ident = request.run
        if request.how == "forget":
            run = self._runs.get(ident)
            if run is not None and run.answer is not None:
                del self._runs[ident]
            return
        run = self._find(ident)
        going = run.answer is None
        if going and (run.thread is None or run.waits is not None):
            if run.waits is not None:
                run.waits.cancel()
            self._give_up(run, RunState.CANCELLED, OperationCancelled(f"run {run.name!r} was cancelled"))
        elif going and run.thread is not None:
            run.thread.cancel()
            run.output.processes.end_soon()
        self._context.replies.succeed(message.id, started, going)


def _in_trace(trace: str, function: Callable[[], Any]) -> Any:
    begin_trace(trace)  # for good: the thread is the run's own
    return function()
