"""The exporter: each point and mark of a replica is once in TensorBoard's files, whatever is killed meanwhile."""

from __future__ import annotations

import errno
import math
import random
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loom.control.frame import pack_value
from loom.errors import Conflict, Denied, MissingDependency, Unavailable, WeaverUnavailable
from loom.exporters import exporter, naming, tracker
from loom.exporters.exporter import HistoryExporter, export_to, held
from loom.exporters.tracker import Destination, TrackedRun, TrackerKind, TrackerMark, TrackerSink, open_tracker
from loom.token_file import ADMIN
from loom.weaver.persistent_state import Registry
from loom.weaver.states import ReplicaState
from loom.weaver.storage.store import Store, journal_head
from loom.weaver.views import ReplicaInfo, to_json
from tests.support.trackers import environment, read_marks, read_points

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

    def report(self, step: int, at: float, /, **metrics: float) -> None:
        known = self.registry
        known.history.record("train_0", known.journal_id, at, step, metrics)
        self.replica.seq += 1
        self.replica.journal_head = journal_head("train_0", "process")
        rows = [[self.replica.seq, at, step, None, None, metrics, None]]
        known.keep_reports(self.replica, pack_value(rows), at)
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
                coarse = known.history.is_coarse_after("train_0", arguments["cursor"])
                found, cursor, more = known.history.after("train_0", arguments["cursor"], limit=20)
                return {"metrics": found, "cursor": cursor, "more": more, "coarse": coarse}
            case "events":
                of = arguments.get("replica")
                return to_json(known.events.after(arguments["after"], arguments["limit"], replica=of))
            case "link":
                self.links[arguments["tracker"]] = arguments["url"]
        return None


class Killed(BaseException):
    """The exporter's process was killed."""


class Mortal(TrackerSink):
    """A tracker, in a process that is killed at some time while it writes."""

    def __init__(self, kind: TrackerKind, folder: Path, rng: random.Random, deadly: float) -> None:
        self._tracker = open_tracker(kind, Destination(folder=folder))
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which trackers keep everything."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    if (trackio := sys.modules.get("trackio.sqlite_storage")) is not None:
        monkeypatch.setattr(trackio, "TRACKIO_DIR", tmp_path / "trackio")
    return tmp_path


def exporter_of(weaver: Weaver, folder: Path, tracker: TrackerSink) -> HistoryExporter:
    return HistoryExporter(weaver, tracker, "tracker", folder / "places.json")


@pytest.mark.parametrize(
    ("kind", "seed"),
    [*((KIND, seed) for seed in range(4)), (TrackerKind.MLFLOW, 4), (TrackerKind.TRACKIO, 5)],
)
def test_each_point_and_mark_is_there_once_over_cuts_kills_and_restarts(
    folder: Path, kind: TrackerKind, seed: int
) -> None:
    pytest.importorskip(kind.value)
    rng = random.Random(seed)
    weaver = Weaver(folder / "w.sqlite")
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
                exported = exporter_of(weaver, folder, Mortal(kind, folder, rng, 0.3))
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
    last = exporter_of(weaver, folder, open_tracker(kind, Destination(folder=folder)))
    last.export()
    last.export()

    assert kills > 2
    # The order of the files of one second is TensorBoard's.
    losses, others = (sorted(read_points(kind.value, folder, "train_0", one)) for one in ("loss", "val/loss"))
    marks = read_marks(kind.value, folder, "train_0")
    assert losses == [(step, float(step)) for step in range(400)]
    assert others == [(step, float(step)) for step in range(0, 400, 10)]
    assert sorted(map(naming.event_of, marks)) == list(range(1, 17))


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


ODD = (
    *(
        "_step",
        "metric_step",
        "_runtime",
        "_wandb",
        "__x",
        "step",
        "__step",
        "time",
        "run",
        "project",
        "system/cpu",
    ),
    *("loom/step", "loom/event", "loom/events", "loom/config", "metric/loom/events", "metricloom/mark", "loss"),
    *(
        "/a",
        "c//d",
        ".",
        "..",
        "..e",
        "f/../g",
        "h/",
        "i b",
        "j%k",
        "ü",
        "日本",
        "x" * 200,
        "ü" * 200,
        "Loss",
        "l/m",
    ),
)
"""Names of metrics that a tracker reserves, or does not take as they are."""


@pytest.mark.parametrize("kind", TrackerKind)
def test_a_metric_of_any_name_and_value_is_there_once(folder: Path, kind: TrackerKind) -> None:
    pytest.importorskip(kind.value)
    weaver = Weaver(folder / "w.sqlite")
    weaver.replica.config = {"": 1, "..": 2, "a//b": [1, {"c": None}], "x" * 200: "y" * 9000, "_wandb": {"z": 1}}
    for step in range(3):
        weaver.report(step, START + step, **dict.fromkeys(ODD, step))
    odd = [math.nan, math.inf, -math.inf, 1e308, 5e-324]
    for number, value in enumerate(odd):
        weaver.report(2**53 - 1, START + 10 + number, odd=value)
    weaver.report(1, START + 20, odd=1.0)  # after a restart from a checkpoint
    weaver.registry.events.append(START, "applied", "train_0", do="pause", by="a\nb<script>", reason="z" * 5000)
    weaver.commit(START + 60)
    for _ in range(2):  # the second one reads back what the first one has written
        tracker = open_tracker(kind, Destination(folder=folder))
        exported = exporter_of(weaver, folder, tracker)
        exported.export()
        exported.export()
        exported.close()
        (folder / "places.json").unlink()

    written = tracker.open(ReplicaInfo.from_body(weaver.ask("replicas")[0])).written()

    assert written.points == {tracker.name_of(name): 3 for name in ODD} | {"odd": len(odd) + 1}
    assert len(written.points) == len(ODD) + 1
    assert written.event == 1
    assert written.times["odd"] == pytest.approx(START + 20, abs=0.01)


@pytest.mark.parametrize("kind", [KIND, TrackerKind.MLFLOW, TrackerKind.TRACKIO])
def test_a_run_of_long_ago_goes_on_though_the_notes_are_gone(folder: Path, kind: TrackerKind) -> None:
    pytest.importorskip(kind.value)
    weaver, day = Weaver(folder / "w.sqlite"), 86_400.0
    for step in range(300):
        weaver.report(step, START + step, loss=float(step))
    weaver.commit(START + 300)
    exporter_of(weaver, folder, open_tracker(kind, Destination(folder=folder))).export()
    for step in range(300, 900):
        weaver.report(step, START + 10 * day + step, loss=float(step))
        weaver.commit(START + 10 * day + step)  # by which the first ones become means
    (folder / "places.json").unlink()
    assert weaver.registry.history.is_coarse_after("train_0", "")

    exporter_of(weaver, folder, open_tracker(kind, Destination(folder=folder))).export()

    assert sorted(read_points(kind.value, folder, "train_0", "loss")) == [
        (step, float(step)) for step in range(900)
    ]


class Recording(TrackerSink):
    """A stand-in for a tracker that has addresses, and refuses what it is told to."""

    def __init__(self) -> None:
        self.refuses = False
        self.refused: set[str] = set()
        """Metrics."""
        self.calls: list[object] = []

    def open(self, replica: ReplicaInfo) -> TrackedRun:
        outer = self

        class Run(TrackedRun):
            url = f"https://tracker/{replica.id}"

            def written(self) -> tracker.Written:
                return tracker.Written()

            def log(self, rows: Any) -> None:
                if outer.refuses or any(outer.refused & row.values.keys() for row in rows):
                    raise RuntimeError("the tracker is full")
                outer.calls.append([dict(row.values) for row in rows])

            def mark(self, marks: Any) -> None:
                outer.calls.append([mark.line for mark in marks])

            def set_config(self, config: Mapping[str, Any]) -> None:
                if outer.refused & config.keys():
                    raise RuntimeError("no such key")
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


def test_a_tracker_that_fails_for_a_week_costs_little_and_gets_its_marks_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(exporter.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(exporter, "PAGE", 2)
    weaver, recording = Weaver(tmp_path / "w.sqlite"), Recording()
    opened: list[str] = []
    monkeypatch.setattr(recording, "open", lambda one, before=recording.open: opened.append(one.id) or before(one))
    exported = HistoryExporter(weaver, recording, "mine", tmp_path / "places.json")
    exported.export()
    recording.refuses = True
    for number in range(1, 200):
        now[0] += 600.0
        if number % 40 == 1:
            weaver.registry.events.append(START + number, "applied", "train_0", do="pause")
        if number == 100:  # the exporter's notes know, too
            exported = HistoryExporter(weaver, recording, "mine", tmp_path / "places.json")
        weaver.report(number, START + number, loss=0.5)
        exported.export()
        exported.export()
    tried, said = len(opened), caplog.text.count("takes nothing of train_0")
    recording.refuses, now[0] = False, now[0] + 600.0
    exported.export()

    assert tried < 210
    assert said == 2
    assert [one for one in recording.calls[-1] if "applied" in one] == [
        f"#{id} applied pause" for id in range(1, 6)
    ]
    assert sum(len(rows) for rows in recording.calls if isinstance(rows, list)) == 199 + 5


def test_a_refused_metric_or_configuration_keeps_nothing_else_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_REFUSED", exporter.Backoff(0.0, 0.0))
    weaver, recording = Weaver(tmp_path / "w.sqlite"), Recording()
    recording.refused = {"bad", "worse"}
    weaver.replica.config = {"worse": 1}
    exported = HistoryExporter(weaver, recording, "mine", tmp_path / "places.json")
    for step in range(5):
        weaver.report(step, START + step, good=float(step), bad=1.0)
        exported.export()

    assert [row for rows in recording.calls if isinstance(rows, list) for row in rows] == [
        {"good": float(step)} for step in range(5)
    ]
    assert caplog.text.count("refuses the metric bad of train_0") == 1
    assert "the configuration of train_0 is not in the tracker: RuntimeError('no such key')" in caplog.text


def test_an_export_whose_notes_cannot_be_written_waits_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weaver, recording = Weaver(tmp_path / "w.sqlite"), Recording()
    exported = HistoryExporter(weaver, recording, "mine", tmp_path / "places.json")
    weaver.report(1, START, loss=0.5)

    def full(path: Path, value: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(exporter, "write_json", full)
        with pytest.raises(Unavailable, match="No space left on device"):
            exported.export()
    exported.export()

    assert recording.calls[1:] == [[{"loss": 0.5}]]
    assert (tmp_path / "places.json").exists()


def test_an_export_that_ends_with_something_refused_says_so(tmp_path: Path) -> None:
    weaver, recording, ended = Weaver(tmp_path / "w.sqlite"), Recording(), threading.Event()
    weaver.report(1, START, loss=0.5)
    recording.refuses = True
    ended.set()

    with pytest.raises(Unavailable, match="mine has not taken everything of train_0: RuntimeError"):
        HistoryExporter(weaver, recording, "mine", tmp_path / "places.json").run(ended)


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


def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "loom.exporters.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(MissingDependency, match=r"cannot be imported: .*pip install --force-reinstall"):
        open_tracker(KIND, Destination())


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("https://ann:secret@mlflow.example/base/", "https://mlflow.example/base/#/x"),
        ("http://localhost:5000", "http://localhost:5000/#/x"),
        ("sqlite:////var/mlflow.db", f"file://{socket.gethostname()}/var/mlflow.db"),
        ("databricks", None),
    ],
)
def test_the_address_of_a_run_has_no_password(uri: str, address: str | None) -> None:
    pytest.importorskip("mlflow")
    from loom.exporters.mlflow import _address

    assert _address(uri, "/#/x") == address


def test_the_event_of_a_mark_is_read_back() -> None:
    assert naming.event_of(TrackerMark(12, START, None, "applied", "pause").line) == 12
    assert [naming.event_of(text) for text in ("", "12", "#x", "#1x y")] == [0, 12, 0, 0]


def test_a_refused_character_becomes_its_number() -> None:
    assert naming.escaped("a%b", str.isalnum) == "a_25_b"
