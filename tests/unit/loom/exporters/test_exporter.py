"""The exporter: each point and mark of a replica is once in TensorBoard's files, whatever is killed meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loom.errors import Conflict, Denied, MissingDependency, WeaverUnavailable
from loom.exporters import exporter, tracker
from loom.exporters.exporter import HistoryExporter, export_to, held
from loom.exporters.tracker import Destination, TrackedRun, TrackerKind, TrackerMark, TrackerSink, open_tracker
from loom.token_file import ADMIN
from loom.weaver.registry import Registry
from loom.weaver.states import ReplicaState
from loom.weaver.storage.store import Store
from loom.weaver.views import ReplicaInfo, to_json
from tests.support.trackers import read_marks, read_points

pytest.importorskip("tensorboard")

START = 1_700_000_000.0
KIND = TrackerKind.TENSORBOARD


class Weaver:
    """A stand-in for a gateway: the weaver's own registry with its store, and answers that may be lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.registry = Registry(Store(path), START)
        self.replica = self.registry.add("train_0")
        self.replica.state, self.replica.instance = ReplicaState.RUNNING, "process"
        self.lost = 0.0
        """The part of answers that is lost."""
        self.random = random.Random(1)
        self.links: dict[str, str] = {}

    def report(self, step: int, at: float, **metrics: float) -> None:
        known = self.registry
        known.history.record("train_0", known.journal_id, at, step, metrics)
        self.replica.seq += 1
        known.keep_reports(self.replica, [[self.replica.seq, at, step, None, None, metrics, None]], at)
        known.save(self.replica)

    def commit(self, now: float) -> None:
        commit, _ = self.registry.begin_commit(now)
        if commit is not None:
            self.registry.store.write(commit)
            commit.stored()

    def restart(self) -> None:
        self.registry.store.close()
        self.registry = Registry(Store(self._path), START)
        self.replica = self.registry.replicas["train_0"]

    def ask(self, operation: str, user: str | None = None, **arguments: Any) -> Any:
        if self.random.random() < self.lost:
            raise WeaverUnavailable("the line was cut")
        known = self.registry
        match operation:
            case "replicas":
                return [one.info(ADMIN, []) for one in known.replicas.values()]
            case "points":
                found, cursor, more = known.history.after("train_0", arguments["cursor"], limit=20)
                return {"metrics": found, "cursor": cursor, "more": more}
            case "events":
                return to_json(known.events.after(arguments["after"], arguments["limit"]))
            case "link":
                self.links[arguments["tracker"]] = arguments["url"]
        return None


class Killed(BaseException):
    """The exporter's process was killed."""


class Mortal(TrackerSink):
    """TensorBoard, in a process that is killed at some time while it writes."""

    def __init__(self, folder: Path, rng: random.Random, deadly: float) -> None:
        self._tracker = open_tracker(KIND, Destination(folder=folder))
        self._random, self._deadly = rng, deadly

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        run = self._tracker.open(replica)
        log, mark = run.log, run.mark

        def log_some(rows: Any) -> None:
            if self._random.random() < self._deadly:
                log(rows[: self._random.randrange(len(rows) + 1)])
                raise Killed
            log(rows)

        def mark_some(marks: Any) -> None:
            mark(marks)
            if self._random.random() < self._deadly:
                raise Killed

        run.log, run.mark = log_some, mark_some  # type: ignore[method-assign]
        return run


@pytest.mark.parametrize("seed", range(4))
def test_each_point_and_mark_is_there_once_over_cuts_kills_and_restarts(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    weaver, files = Weaver(tmp_path / "w.sqlite"), tmp_path / "files"
    weaver.lost, weaver.random = 0.2, rng
    exported: HistoryExporter | None = None
    kills, at = 0, START
    for step in range(400):
        at += rng.choice([1.0, 1.0, -0.5])  # its clock goes back, too
        weaver.report(step, at, loss=float(step), **({"val/loss": float(step)} if step % 10 == 0 else {}))
        if step % 25 == 0:
            weaver.registry.events.append(START + step, "applied", "train_0", do="update_config", step=step)
        if rng.random() < 0.3:
            weaver.commit(START + step)
        if rng.random() < 0.25:
            weaver.commit(START + step)
            if exported is None:
                exported = HistoryExporter(weaver, Mortal(files, rng, 0.3), "tensorboard", tmp_path / "places.json")
            try:
                exported.export()
            except WeaverUnavailable:
                pass
            except Killed:
                kills, exported = kills + 1, None
            if rng.random() < 0.1:
                weaver.restart()
    weaver.lost = 0.0
    weaver.commit(START + 400)
    last = HistoryExporter(
        weaver, open_tracker(KIND, Destination(folder=files)), "tensorboard", tmp_path / "places.json"
    )
    last.export()
    last.export()

    assert kills > 2
    # The order of the files of one second is TensorBoard's.
    losses, others = (sorted(read_points("tensorboard", files, "train_0", one)) for one in ("loss", "val/loss"))
    marks = read_marks("tensorboard", files, "train_0")
    assert losses == [(step, float(step)) for step in range(400)]
    assert others == [(step, float(step)) for step in range(0, 400, 10)]
    assert sorted(map(tracker.event_of, marks)) == list(range(1, 17))


def test_an_exporter_without_its_notes_counts_what_the_run_holds(tmp_path: Path) -> None:
    weaver, state = Weaver(tmp_path / "w.sqlite"), tmp_path / "places.json"
    for step in range(30):
        weaver.report(step, START + step, loss=float(step))
        weaver.commit(START + step)
        if step in (9, 19, 29):
            state.write_text("{not JSON") if step == 19 else state.unlink(missing_ok=True)
            tracked = open_tracker(KIND, Destination(folder=tmp_path))
            HistoryExporter(weaver, tracked, "tensorboard", state).export()

    assert [step for step, _ in read_points("tensorboard", tmp_path, "train_0", "loss")] == list(range(30))


def test_points_that_the_tracker_has_lost_are_written_again(tmp_path: Path) -> None:
    weaver, state = Weaver(tmp_path / "w.sqlite"), tmp_path / "places.json"
    for step in range(20):
        weaver.report(step, START + step, loss=float(step))
    weaver.commit(START + 20)
    HistoryExporter(weaver, open_tracker(KIND, Destination(folder=tmp_path)), "tensorboard", state).export()
    (file,) = (tmp_path / "admin" / "train_0").glob("*tfevents*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])  # as after a loss of power

    HistoryExporter(weaver, open_tracker(KIND, Destination(folder=tmp_path)), "tensorboard", state).export()

    assert [step for step, _ in read_points("tensorboard", tmp_path, "train_0", "loss")] == list(range(20))


class Recording(TrackerSink):
    """A stand-in for a tracker that has addresses, and refuses what it is told to."""

    def __init__(self) -> None:
        self.refuses = False
        self.calls: list[object] = []

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        outer = self

        class Run(TrackedRun):
            url = f"https://tracker/{replica.id}"

            def written(self) -> tracker.Written:
                return tracker.Written()

            def log(self, rows: Any) -> None:
                if outer.refuses:
                    raise RuntimeError("the tracker is full")
                outer.calls.append([dict(row.values) for row in rows])

            def mark(self, marks: Any) -> None:
                outer.calls.append([mark.line for mark in marks])

            def set_config(self, config: Mapping[str, Any]) -> None:
                outer.calls.append(dict(config))

            def close(self, replica: ReplicaInfo) -> None:
                outer.calls.append(f"closed {replica.state.value}")

        return Run()


def test_a_run_is_linked_configured_marked_and_closed(tmp_path: Path) -> None:
    weaver, recording = Weaver(tmp_path / "w.sqlite"), Recording()
    exported = HistoryExporter(weaver, recording, "mine", tmp_path / "places.json")
    weaver.replica.config = {"lr": 0.1}
    exported.export()
    weaver.report(3, START, loss=0.5, acc=0.25)
    changes = {"lr": {"old": 0.1, "new": 0.2}}
    weaver.registry.events.append(
        START, "applied", "train_0", do="update_config", by="ann", step=3, changes=changes
    )
    weaver.replica.config = {"lr": 0.2}
    exported.export()
    weaver.replica.state = ReplicaState.FINISHED
    exported.export()
    exported.export()

    assert weaver.links == {"mine": "https://tracker/train_0"}
    assert recording.calls == [
        {"lr": 0.1},
        {"lr": 0.2},
        [{"loss": 0.5, "acc": 0.25}],
        ["#1 applied update_config by ann lr: 0.1 → 0.2"],
        "closed finished",
    ]


def test_a_tracker_that_fails_gets_everything_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weaver, recording = Weaver(tmp_path / "w.sqlite"), Recording()
    exported = HistoryExporter(weaver, recording, "mine", tmp_path / "places.json")
    weaver.report(3, START, loss=0.5)
    recording.refuses = True
    exported.export()
    recording.refuses = False
    exported.export()

    assert "takes nothing of train_0 now: RuntimeError('the tracker is full')" in caplog.text
    assert recording.calls[-1] == [{"loss": 0.5}]


def test_the_export_ends_when_it_is_refused_and_waits_while_nobody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing:
        def __init__(self) -> None:
            self.errors = [WeaverUnavailable("away"), WeaverUnavailable("away"), Denied("the token was revoked")]

        def ask(self, operation: str, user: str | None = None, **arguments: Any) -> Any:
            raise self.errors.pop(0)

    monkeypatch.setattr(exporter, "_AGAIN", exporter.Backoff(0.0, 0.0))
    refusing = Refusing()
    with pytest.raises(Denied):
        HistoryExporter(refusing, Recording(), "mine", tmp_path / "p.json").run(threading.Event())
    assert not refusing.errors


def test_two_exporters_do_not_share_their_notes(tmp_path: Path) -> None:
    weaver = Weaver(tmp_path / "w.sqlite")
    with held(tmp_path / "state"), pytest.raises(Conflict, match="another exporter"):
        export_to(KIND, Destination(folder=tmp_path), weaver, tmp_path / "state", threading.Event())


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker._NEEDED, KIND, {"no_such_module": "tensorboard"})
    with pytest.raises(MissingDependency, match=r"pip install 'monarch-loom\[tensorboard\]'"):
        open_tracker(KIND, Destination())


def test_the_event_of_a_mark_is_read_back() -> None:
    assert tracker.event_of(TrackerMark(12, START, None, "applied", "pause").line) == 12
    assert [tracker.event_of(text) for text in ("", "12", "#x", "#1x y")] == [0, 12, 0, 0]


def test_a_refused_character_becomes_its_number() -> None:
    assert tracker.escaped("a%b", str.isalnum) == "a_25_b"
