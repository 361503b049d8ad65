"""The way of commands to the workers: in batches, in their order, and never more than the workers keep up with."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from uuid import uuid4

from loom.errors import Invalid, LimitReached, LoomError, operation_failed
from loom.process.threads import start_thread
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.placements import spread
from loom.tensors.sending.encoding import FREE, CommandEncoder, Failure, Form, Numbered, check_number
from loom.tensors.sending.source_lines import Site, caller_site, place_of

MOST_COMMANDS = 2048
"""Commands of a batch."""
MOST_BYTES = 4 << 20
"""Bytes of data of a batch, from which on it is sent."""
MOST_FAILURES = 1000
"""Failures whose lines are remembered."""
SOON = 0.001
"""Seconds after which a batch is sent if it does not fill, and nothing is on its way."""
LATEST = 0.02
"""Seconds for which a batch that does not fill waits for the answer of the one before."""
IDLE = 2.0
"""Seconds without a command after which the thread that sends ends."""
MOST_BATCHES = 16
"""Batches that are not done yet; whoever adds one more waits."""
MOST_BYTES_WAITING = 64 << 20
"""Bytes of data in them."""


class Asked(NamedTuple):
    """A read on its way."""

    batch: int
    future: Any


class Sent(NamedTuple):
    """A batch that is not done, as far as is known."""

    number: int
    answer: Any
    sites: list[Site | None]
    size: int


def await_answer(lock: AbstractContextManager[Any], sent: Sequence[Sent]) -> None:
    """Wait a little while the workers are busy: each batch costs as much as dozens of commands."""
    # The first look is made alone: one of Monarch's futures can be waited for by several threads only after it.
    with lock:
        if not sent or is_done(answer := sent[-1].answer, 0):
            return
    is_done(answer, LATEST)


def is_done(answer: Any, seconds: float) -> bool:
    """Wait for an answer; return whether it has come. An error in it is told when its batch is settled."""
    try:
        answer.get(timeout=seconds)
    except TimeoutError:
        return False
    except Exception:  # noqa: BLE001
        pass
    return True


_log = logging.getLogger("loom")

MOST_UNMET = 16
"""Batches of commands that are put in while the workers meet; whoever adds more waits."""


class Dispatcher:
    """Sends commands to all workers of a mesh, and reads from them. Any thread may use it.

    Args:
        workers: the mesh of `loom.tensors.worker.actor.TensorWorker`.
        told: takes the layouts that the workers tell, each with the id of the first result of its command.
    """

    def __init__(self, workers: Any, told: Callable[[Sequence[Any]], None] = lambda layouts: None) -> None:
        self._told = told
        self._program = uuid4().hex
        self.size = len(workers)
        """The number of workers."""
        self._begin(workers)
        self._joined = self.size == 1
        self._encoder = CommandEncoder()
        self._free_form = self._encoder.form(FREE)
        self._mode_forms = {mode: self._encoder.form(Form(".grad_mode", (mode,), outs=0)) for mode in (False, True)}
        self.queue: deque[Any] = deque()
        """The queue, not encoded yet: commands, and ids of tensors whose handles have died.

        A command is its form, tensors, numbers, bytes of new memory, and line. A finalizer may run at any time, and
        only appends to it."""
        self._next = self._encoder.next_id
        """The id of the next result."""
        self._sites: list[Site | None] = []
        """The lines of the commands that are encoded and not sent."""
        self._data: list[bytes] = []
        self._data_size = 0
        self._lock = threading.RLock()
        self._some = threading.Event()
        self._due = False
        """True if the thread that sends knows of what was put in."""
        self._sends = False
        self._sent: deque[Sent] = deque()
        self._reading: dict[int, list[Site | None]] = {}
        """The lines of the commands of batches that go with a read."""
        self._batch = 0
        self._failed: dict[tuple[int, int], Site | None] = {}
        """The lines of the newest commands that failed."""
        self._unsaid: list[Failure] = []
        """The first failures that `synchronize` has not raised."""
        self.limit: int | None = None
        """Bytes that tensors may have in each worker; any number if None."""
        self.held: dict[int, tuple[int, Site | None]] = {}
        """The bytes of each tensor that has memory of its own, and the line that made it.

        As the workers do everything in order, they hold as much when they come to the same command."""
        self.bytes = 0
        self._checkpoint: tuple[str | None, int] | None = None
        """The path and the number of the last whole checkpoint."""
        self._freed_since: set[int] = set()
        """Its entries that were freed since."""
        self.era = 0
        """The number of times that the workers were made anew."""
        self._meeting: Any = None
        """The future of where the workers find each other, until they have been told to become a group."""

    def _begin(self, workers: Any) -> None:
        self._workers = workers
        self._mode = True
        """True if the last command that was put in builds a graph."""
        self._first = workers if self.size == 1 else workers.slice(**dict.fromkeys(workers.sizes, 0))
        self.began = self._call(workers.begin)
        """The future of the workers' devices."""

    def _call(self, endpoint: Any, *args: Any) -> Any:
        """Call all workers. A single one is called as such, which costs less on the way."""
        return (endpoint.call_one if self.size == 1 else endpoint.call)(self._program, *args)

    def _each(self, answer: Any) -> list[Any]:
        """Return what each worker has answered to `_call`."""
        return [answer] if self.size == 1 else list(answer.values())

    def form(self, form: Form, types: tuple[type, ...] = ()) -> Numbered:
        """Return a form for `put`."""
        with self._lock:
            return self._encoder.form(form, types)

    def put(
        self,
        form: Numbered,
        tensors: Sequence[int],
        numbers: tuple[Any, ...] = (),
        sizes: Sequence[int] = (),
        data: bytes | None = None,
    ) -> int:
        """Add a command; return the id of its first result. It waits if too much is on its way.

        Args:
            sizes: the bytes of new memory of each result.

        Raises:
            LimitReached: its results are more than the limit of memory leaves room for.
            OverflowError: a number has more than 64 bits.
            TypeError: what is to be a number is none.
        """
        for each in numbers:
            if type(each) is not float:
                check_number(each)
        site = caller_site()
        queue = self.queue
        mode = grad_enabled.get()
        with self._lock:
            if mode is not self._mode:
                self._mode = mode
                queue.append((self._mode_forms[mode], (), (), (), site))
            if self.limit is not None:
                self._encode()
                if self.bytes + sum(sizes) > self.limit:
                    raise self._no_room(sum(sizes))
            ident = self._next
            self._next = ident + form.outs
            queue.append((form, tensors, numbers, sizes, site))
            if data is not None:
                self._data.append(data)
                self._data_size += len(data)
            many = len(queue)
            if (many >= MOST_COMMANDS or self._data_size >= MOST_BYTES) and self._may_flush(many):
                self.flush()
                return ident
        if not self._due:
            self._send_soon()
        return ident

    def flush(self) -> None:
        """Send what was put in."""
        with self._lock:
            self._meet()
            self._encode()
            if not self._sites:
                return
            commands, data, sites, size = self._take()
            answer = self._call(self._workers.run, self._batch, commands, data)
            self._sent.append(Sent(self._batch, answer, sites, size))
            self._batch += 1
            waiting = sum(each.size for each in self._sent) if size or data else 0
            while len(self._sent) > MOST_BATCHES or (waiting > MOST_BYTES_WAITING and len(self._sent) > 1):
                waiting -= self._sent[0].size
                self._settle(self._sent.popleft())

    def _may_flush(self, many: int) -> bool:
        """Whether to send now, or to let the thread that sends wait until the workers have met."""
        return self._meeting is None or many >= MOST_UNMET * MOST_COMMANDS

    def join(self) -> None:
        """Let the workers become a group, over which tensors can be spread. Only what is sent next waits."""
        with self._lock:
            if self._joined:
                return
            self.flush()
            self._meeting = self._first.meet.call_one(self._program)
            is_done(self._meeting, 0)  # one of Monarch's futures can be waited for by several threads only after it
            self._joined = True

    def _meet(self) -> None:
        """Tell the workers where they find each other, before whatever needs it."""
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            self._call(self._workers.join, meeting.get(), spread(self._workers.sizes))

    def read(self, idents: Sequence[int], what: str = "elements") -> list[Any]:
        """Return what the workers have for some ids, when all that was put in before is done.

        Args:
            what: as `loom.tensors.worker.values.Values.read` has it.

        Raises:
            OperationFailed: an operation on which one of them depends has failed.
        """
        asked = self.ask(idents, what)
        return self.answer(asked, asked.future.get(), said=what == "value")

    def ask(self, idents: Sequence[int], what: str = "elements") -> Asked:
        """Begin to read. `answer` makes values of what the future gives.

        All workers are asked, as each may have a part; the first one answers.
        """
        with self._lock:
            self._meet()
            self._encode()
            commands, data, sites, _ = self._take() if self._sites else (None, [], [], 0)
            number = self._batch
            self._reading[number] = sites
            self._batch += 1
            return Asked(number, self._call(self._workers.read, number, commands, data, list(idents), what))

    def kept(self) -> dict[str, Any]:
        """Return the layouts of the tensors with a name."""
        self.flush()
        found: dict[str, Any] = self._first.kept.call_one(self._program).get()
        return found

    def watched(self, wanted: Any) -> dict[str, Any]:
        """Return the histories of watched tensors by name: see `loom.tensors.watched.Wanted`."""
        self.flush()
        found: dict[str, Any] = self._first.watched.call_one(wanted).get()[0]
        return found

    def answer(self, asked: Asked, found: Any, said: bool = False) -> list[Any]:
        """Return the values of an answer.

        Args:
            said: whether `synchronize` does not raise the error as well.

        Raises:
            OperationFailed: an operation on which one of them depends has failed.
        """
        answers = self._each(found)
        values = answers[0][1]
        with self._lock:
            sites = self._reading.pop(asked.batch, [])
            self._note([of_one for of_one, _ in answers], asked.batch, sites)
            while self._sent and self._sent[0].number < asked.batch:
                self._settle(self._sent.popleft())
        for value in values:
            if isinstance(value, Failure):
                if said:
                    self._unsaid = [each for each in self._unsaid if each[:2] != value[:2]]
                raise self._error(value)
        return list(values)

    def synchronize(self) -> None:
        """Wait until everything that was put in is done.

        Raises:
            OperationFailed: an operation has failed since the last time; the first one.
        """
        self.read(())
        with self._lock:
            failures, self._unsaid = self._unsaid, []
        if failures:
            raise self._error(failures[0])

    def _take(self) -> tuple[bytes, list[bytes], list[Site | None], int]:
        taken = self._encoder.take(), self._data, self._sites, self._data_size
        self._data, self._sites, self._data_size = [], [], 0
        return taken

    def _encode(self) -> None:
        """Encode what was put in, and count its memory."""
        queue, sites, held, most = self.queue, self._sites, self.held, self._checkpoint
        put, free, free_form = self._encoder.put, self._encoder.free, self._free_form
        while queue:
            each = queue.popleft()
            if type(each) is int:
                free(free_form, each)
                sites.append(None)
                if most is not None and each < most[1]:
                    self._freed_since.add(each)
                if each in held:
                    self.bytes -= held.pop(each)[0]
                continue
            form, tensors, numbers, sizes, site = each
            result = put(form, tensors, numbers)
            sites.append(site)
            for size in sizes:
                held[result] = size, site
                self.bytes += size
                result += 1

    def _settle(self, sent: Sent) -> None:
        """Take in what became of a batch."""
        self._note(self._each(sent.answer.get()), sent.number, sent.sites)

    def _note(self, answers: Sequence[Any], batch: int, sites: list[Site | None]) -> None:
        """Remember what failed in some worker, and take in the layouts that the first one tells."""
        failures = [of_one for of_one, _ in answers if of_one]
        if layouts := answers[0][1]:
            self._told(layouts)
        for failure in {each.place: each for of_one in reversed(failures) for each in of_one}.values():
            if failure.place >= 0:
                self._failed[batch, failure.place] = sites[failure.place]
            if len(self._failed) > MOST_FAILURES:
                del self._failed[next(iter(self._failed))]
            if len(self._unsaid) < MOST_FAILURES:
                self._unsaid.append(failure)

    def _error(self, failure: Failure) -> LoomError:
        site = self._failed.get((failure.batch, failure.place))
        where = f", queued at {place_of(site)}" if site else ""
        return operation_failed(f"{failure.text}{where}", failure.like)

    def save(self, path: str | None) -> int:
        """Wait until the workers have written their tensors; return the bytes.

        Raises:
            OSError: one of them could not; the checkpoint before stays.
        """
        with self._lock:
            self.flush()
            mark, last = self._encoder.next_id, self._checkpoint[1] if self._checkpoint else 0
            answers = self._each(self._call(self._workers.save, path, mark, last).get())
            if problems := [each for each in answers if isinstance(each, str)]:
                raise OSError(f"the tensors were not saved: {'; '.join(problems)}")
            self._checkpoint, self._freed_since = (path, mark), set()
        return sum(answers)

    def restart(self, workers: Any) -> None:
        """Go on with other workers, which take the tensors of the last checkpoint.

        Raises:
            Invalid: there is no checkpoint, or the workers do not find it, or they are more or fewer.
        """
        if self._checkpoint is None:
            raise Invalid("there is no checkpoint of these tensors: call checkpoint() while their processes live")
        if workers.sizes != self._workers.sizes:
            raise Invalid(
                f"these are {dict(workers.sizes)}, not {dict(self._workers.sizes)} as the processes that saved"
            )
        with self._lock:
            path, mark = self._checkpoint
            self._begin(workers)
            self._encode()
            self._take()
            self._sent.clear()
            self._reading.clear()
            self._unsaid.clear()
            self._encode()
            self._encoder.restart()
            self._sites.clear()
            self.era += 1
            if self._joined and self.size > 1:
                self._joined = False
                self.join()
                self._meet()
            freed = sorted(self._freed_since)
            loaded = self._call(workers.load, path, mark, self._encoder.next_id, freed).get()
            if problems := [each for each in self._each(loaded) if each]:
                raise Invalid("; ".join(problems))

    def forget(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._encode()
            self.held.clear()
            self.bytes = 0

    def by_process(self) -> list[int]:
        """Wait for the bytes that each worker holds, in their order."""
        with self._lock:
            self._encode()
            asked = self.ask(list(self.held), "bytes")
        found = asked.future.get()
        self.answer(asked, found)
        return [sum(each for each in sizes if isinstance(each, int)) for _, sizes in self._each(found)]

    def by_line(self) -> dict[str, int]:
        """Return the bytes of a worker that has every tensor whole, by the line that made them, the most first."""
        with self._lock:
            self._encode()
            held = list(self.held.values())
        lines: dict[str, int] = {}
        for size, site in held:
            where = place_of(site) if site else "?"
            lines[where] = lines.get(where, 0) + size
        return dict(sorted(lines.items(), key=lambda each: -each[1]))

    def _no_room(self, size: int) -> LimitReached:
        most = "; ".join(f"{held} bytes made at {where}" for where, held in list(self.by_line().items())[:3])
        return LimitReached(
            f"out of memory: {size} bytes more than the {self.bytes} that are held are over the limit of "
            f"{self.limit} bytes in each process. The most: {most}"
        )

    def _send_soon(self) -> None:
        with self._lock:
            self._due = True
            self._some.set()
            if not self._sends:
                self._sends = True
                start_thread("loom-tensors", self._send)

    def _send(self) -> None:
        """Send what does not fill a batch, until nothing more comes."""
        while True:
            while self._some.wait(IDLE):
                time.sleep(SOON)
                await_answer(self._lock, self._sent)
                self._some.clear()  # first: whoever puts in meanwhile is sent below
                self._due = False
                meeting = self._meeting
                try:
                    if meeting is not None:
                        meeting.get()  # without the lock: who puts in more does not wait
                    self.flush()
                except Exception as error:  # noqa: BLE001 - whoever queues or reads next is told
                    _log.debug("a batch of tensor commands was not sent: %s", error)
            with self._lock:
                if not self._some.is_set():
                    self._sends = False
                    return
