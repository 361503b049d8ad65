"""Measures the page beside simulated threadlets: each of its views in turn, in rounds.

Half of the cores are Chromium's, the other half is what measures on, and the threadlets have one core of it. In
each round a view is traced for a while. Gateway and weaver leave Chromium's cores alone meanwhile, as a laptop is
another machine than the cluster: an update's time is a clock's, and the weaver is busy just when it has sent one.

Then both use all cores, and how much CPU time they take is measured with one watcher and with two. Afterwards
garbage is collected and the heap is measured.
"""

# mypy: disable-error-code="misc,untyped-decorator"

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
from playwright.sync_api import Browser, CDPSession, Page, WebSocket, expect

import loom
from loom_gateway.dashboard import STATIC
from loom_proxy.local import LocalCluster
from tests.benchmarks.caller_process import CallerError, CallerProcess
from tests.benchmarks.handshakes import Echo
from tests.benchmarks.machine import cpu_seconds
from tests.benchmarks.page.plan import VIEWS, Heap, Load, PageFigures, PagePlan, ViewFigures
from tests.benchmarks.page.trace import record
from tests.benchmarks.page.watcher import Watcher
from tests.support.browser import Tab, chromium, signed_in

__all__ = ["measure_page", "missing"]

CALL_EVERY = 0.05
"""Seconds from one call's result to the next call."""

SETTLED = 1.0
"""Seconds that a second watcher is there before its cost is measured, and away before that without it is."""

BOUND = 60.0
"""Seconds that a second watcher may wait for its snapshot."""

STEPS = 100
"""Steps of a run of the past."""

BUILT = ("*.html", "assets/*")
"""Files of the page."""

_COUNT_FRAMES = """() => {
  const frames = { times: [], on: true };
  const note = (time) => {
    frames.times.push(time);
    if (frames.on) requestAnimationFrame(note);
  };
  window.benchmarkFrames = frames;
  requestAnimationFrame(note);
}"""

_COUNTED_FRAMES = """() => {
  window.benchmarkFrames.on = false;
  return window.benchmarkFrames.times;
}"""


_OPEN_RUN = """async (run) => {
  const begin = performance.now();
  const drawn = () => {
    const curve = document.querySelector('[data-testid="run-curves"] canvas');
    return curve && /last value is [-0-9]/.test(curve.closest('[role="img"]')?.ariaLabel ?? '');
  };
  location.hash = `#/runs/${run}`;
  while (!drawn()) {
    if (performance.now() > begin + 60000) throw Error('the run never had a curve');
    await new Promise(requestAnimationFrame);
  }
  await new Promise(requestAnimationFrame); // it is shown
  return performance.now() - begin;
}"""


def missing() -> str | None:
    """Return why the page cannot be measured here; None if it can."""
    if not (STATIC / "index.html").is_file():
        return "the page is not built: cd gateway/dashboard && npm ci && npm run build"
    if shutil.which("chromium") is None:
        return "the program chromium (Debian package chromium) is not installed"
    return None


def measure_page(plan: PagePlan, say: Callable[[str], object]) -> PageFigures:
    """Measure everything.

    Raises:
        CallerError: there is no page or no Chromium, or a process failed.
    """
    if why_not := missing():
        raise CallerError(why_not)
    cores = sorted(os.sched_getaffinity(0))
    clusters = cores[: max(len(cores) // 2, 1)]
    browsers = cores[len(clusters) :] or cores
    figures = PageFigures({name: ViewFigures() for name in VIEWS}, size=_size())
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(1))
        stack.enter_context(_held_to(clusters))
        job = stack.enter_context(loom.connect(cluster.url, cluster.token))
        with _held_to(clusters[:1]):
            crowd = CallerProcess("threadlets", "tests.benchmarks.crowd", (job.weaver.address(),))
            stack.enter_context(crowd).await_ready()
        say(f"{plan.runs:,} runs end, and another one has {plan.points:,} points")
        crowd.ask("leave_runs", count=plan.runs, steps=STEPS)
        crowd.ask("run_long", points=plan.points)
        say(f"{plan.replicas:,} threadlets register")
        for joined in range(0, plan.replicas, plan.group):
            crowd.ask("join", count=min(plan.group, plan.replicas - joined), group_size=plan.group)
        crowd.ask("keep_reporting")
        servers = _Servers(cluster.pids[0], crowd, clusters)

        say("calls of a session without a page")
        echo = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("echo", Echo)
        echo.echo.call_one(0).get()
        with _Calls(echo) as calls:
            time.sleep(plan.window)
        figures.calls_without.extend(calls.milliseconds)

        with _held_to(browsers):
            browser = stack.enter_context(chromium())
        _hold_driver_to(clusters)
        tab = stack.enter_context(signed_in(browser, cluster.url, cluster.token))
        runs = {name: job.weaver.runs(name)[0].info.id for name in ("train0", "past_0", "long")}
        _Measuring(plan, figures, cluster, servers, browser, tab, echo, runs, say).run()
    return figures


class _Servers:
    """The processes that serve the page."""

    def __init__(self, gateway: int, crowd: CallerProcess, cores: list[int]) -> None:
        children = psutil.Process(gateway).children()
        (weaver,) = [one.pid for one in children if "loom.weaver" in one.cmdline()]
        self._pids = (gateway, weaver, crowd.pid)
        self._crowd = crowd
        self._cores = cores

    @contextmanager
    def on_their_cores(self) -> Iterator[None]:
        """Have gateway and weaver use half of the cores only."""
        gateway, weaver, _ = self._pids
        before = sorted(os.sched_getaffinity(weaver))
        try:
            for pid in (gateway, weaver):
                _hold(psutil.Process(pid), self._cores)
            yield
        finally:
            for pid in (gateway, weaver):
                _hold(psutil.Process(pid), before)

    @contextmanager
    def loaded(self) -> Iterator[list[Load]]:
        """Measure a time; what was measured is in the list afterwards."""
        found: list[Load] = []
        cpu, start = self._cpu(), time.monotonic()
        yield found
        gateway, weaver, crowd = (now - before for now, before in zip(self._cpu(), cpu, strict=True))
        found.append(Load(time.monotonic() - start, gateway, weaver, crowd))

    def stored(self) -> tuple[int, float]:
        """Return how many reports the weaver has stored so far, and when that was asked."""
        return self._crowd.ask("stored"), time.monotonic()

    def _cpu(self) -> list[float]:
        return [cpu_seconds(pid) for pid in self._pids]


class _Calls:
    """Calls of a session, one after the other in a thread of their own; a context manager."""

    def __init__(self, echo: Any) -> None:
        self.milliseconds: list[float] = []
        self._echo = echo
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="calls", daemon=True)

    def _run(self) -> None:
        while not self._over.wait(CALL_EVERY) or not self.milliseconds:
            start = time.perf_counter()
            self._echo.echo.call_one(0).get()
            self.milliseconds.append((time.perf_counter() - start) * 1e3)

    def __enter__(self) -> _Calls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


class _Measuring:
    """The page in a browser, and the rounds."""

    def __init__(
        self,
        plan: PagePlan,
        figures: PageFigures,
        cluster: LocalCluster,
        servers: _Servers,
        browser: Browser,
        tab: Tab,
        echo: Any,
        runs: Mapping[str, str],
        say: Callable[[str], object],
    ) -> None:
        self._runs = runs
        self._plan = plan
        self._figures = figures
        self._cluster = cluster
        self._servers = servers
        self._browser = browser
        self._tab = tab
        self._page: Page = tab.page
        self._devtools: CDPSession = tab.page.context.new_cdp_session(tab.page)
        self._echo = echo
        self._say = say
        self._received = 0
        self._subscription: dict[str, Any] | None = None

    def run(self) -> None:
        self._page.on("websocket", self._heed)
        start = time.monotonic()
        with _Calls(self._echo) as calls:
            self._page.reload()  # only now are its messages seen
            self._tab.live()
            self._figures.opened = time.monotonic() - start
            expect(self._page.get_by_test_id("job").first).to_be_visible(timeout=BOUND * 1e3)
            self._figures.shown = time.monotonic() - start
        self._figures.calls_opening.extend(calls.milliseconds)
        self._began = time.monotonic()
        for number in range(self._plan.rounds):
            stored, start = self._servers.stored()
            for place, view in enumerate(VIEWS):
                self._say(f"round {number + 1} of {self._plan.rounds}: {view}")
                self._tab.open(
                    VIEWS[view].format(replica="train_0", run=self._runs["train0"], other=self._runs["past_0"])
                )
                expect(self._page.locator("h1")).to_be_visible()
                self._wait(self._plan.settle)
                # The second watcher is there first half of the times: what slowly changes is no cost of it.
                self._of_view(view, watched_first=bool((number + place) % 2))
            self._figures.opened_long.append(self._open_long())
            with _Calls(self._echo) as calls:
                self._wait(self._plan.window)
            self._figures.calls_with.extend(calls.milliseconds)
            stored_now, now = self._servers.stored()
            self._figures.stored.append((stored_now - stored) / (now - start) / self._plan.replicas)

    def _open_long(self) -> float:
        """Open the long run from the list of runs; return after how many milliseconds its curve was shown."""
        self._tab.open("runs")
        expect(self._page.get_by_test_id("run-table")).to_be_visible()
        self._wait(self._plan.settle)
        took = self._page.evaluate(_OPEN_RUN, self._runs["long"])
        expect(self._page.locator("h1")).to_contain_text("long")
        return float(took)

    def _heed(self, socket: WebSocket) -> None:
        """Note the page's subscription, and count what it receives."""

        def sent(payload: str | bytes) -> None:
            message = json.loads(payload)
            if message.get("type") == "subscribe":
                self._subscription = message

        def received(payload: str | bytes) -> None:
            self._received += len(payload.encode() if isinstance(payload, str) else payload)

        socket.on("framesent", sent)
        socket.on("framereceived", received)

    def _wait(self, seconds: float) -> None:
        self._page.wait_for_timeout(seconds * 1e3)

    def _of_view(self, view: str, watched_first: bool) -> None:
        figures = self._figures.views[view]
        loads: dict[bool, Load] = {}
        with self._servers.on_their_cores():
            figures.traces.append(record(self._browser, self._plan.traced, self._wait))
        for watched in (watched_first, not watched_first):
            loads[watched] = self._watched_twice(figures) if watched else self._watched_once(figures)
        self._figures.loads.append(loads[False])
        figures.second_watcher.append(loads[True].serving - loads[False].serving)
        figures.heaps.append(self._heap())

    def _watched_once(self, figures: ViewFigures) -> Load:
        """Measure the bytes to the page meanwhile."""
        self._wait(min(SETTLED, self._plan.settle))
        received = self._received
        with self._servers.loaded() as found:
            self._wait(self._plan.window)
        figures.received.append((self._received - received) / found[0].seconds)
        return found[0]

    def _watched_twice(self, figures: ViewFigures) -> Load:
        """Have a second watcher, and measure the frames of the page meanwhile."""
        start = time.monotonic()
        with Watcher(self._cluster.url, self._cluster.token, self._subscription) as watcher:
            while not watcher.there:
                if time.monotonic() > start + BOUND:
                    raise CallerError(f"a second watcher got no snapshot within {BOUND:g} s")
                self._wait(0.02)
            self._figures.watcher_there.append(time.monotonic() - start)
            self._wait(min(SETTLED, self._plan.settle))
            self._page.evaluate(_COUNT_FRAMES)
            with self._servers.loaded() as found:
                self._wait(self._plan.window)
            times = self._page.evaluate(_COUNTED_FRAMES)
        figures.frames.extend(later - sooner for sooner, later in itertools.pairwise(times))
        return found[0]

    def _heap(self) -> Heap:
        for _ in range(2):  # what the first finalises, the second frees
            self._devtools.send("HeapProfiler.collectGarbage")
        usage = self._devtools.send("Runtime.getHeapUsage")
        used = sum(usage[name] for name in ("usedSize", "embedderHeapUsedSize", "backingStorageSize"))
        return Heap(time.monotonic() - self._began, used)


@contextmanager
def _held_to(cores: list[int]) -> Iterator[None]:
    """Hold this thread, and what it starts meanwhile, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(0, before)


def _hold_driver_to(cores: list[int]) -> None:
    """Hold Playwright's driver, the parent of Chromium, to some cores.

    It gets a copy of each message to the page, and takes it apart at the very time at which the page shows it.
    """
    (driver,) = [one for one in psutil.Process().children() if "run-driver" in one.cmdline()]
    _hold(driver, cores)


def _hold(process: psutil.Process, cores: list[int]) -> None:
    """Hold all threads of a process to some cores."""
    for thread in process.threads():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread.id, cores)


def _size() -> int:
    """Bytes of the page's files, each of them gzipped."""
    files = [file for pattern in BUILT for file in STATIC.glob(pattern)]
    return sum(len(gzip.compress(file.read_bytes(), 6)) for file in files)
