"""Replicas, events and curves on a terminal."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loom.cli.app import app
from loom.cli.weaver_display import (
    DEVICE_COLUMNS,
    REPLICA_COLUMNS,
    Picture,
    TableRow,
    device_row,
    event_line,
    json_line,
    live,
    plot_lines,
    replica_row,
    table_rows,
)
from loom.rest_client import Gateway
from loom.weaver.views import Away, Delta, DeviceInfo, ReplicaInfo, Snapshot, WeaverEvent, read_update

GPU = DeviceInfo("GPU-0", "active", "gpu", "node-1", "H200", 141 << 30, replicas=("train_0",))


def replica(id: str, state: str = "running", **more: Any) -> ReplicaInfo:
    return ReplicaInfo(id, state, "trainers", "node-1", 7, **more)


def snapshot(*replicas: ReplicaInfo) -> Snapshot:
    return Snapshot({}, {one.id: one for one in replicas}, {"GPU-0": GPU})


def event(id: int, kind: str, about: str | None = None, **data: Any) -> WeaverEvent:
    return WeaverEvent(id, 1e9 + 0.125, kind, about, data)


def drawn(picture: Picture, height: int = 40) -> str:
    console = Console(width=160, file=io.StringIO(), height=height)
    console.print(picture.table(height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- the picture ------------------------------------------------------------------------------------------------


def test_a_picture_shows_what_the_snapshot_has() -> None:
    picture = Picture("ws://host")
    picture.apply(snapshot(replica("train_0", step=12, max_step=100, metrics={"loss": 0.25, "nan": math.nan})))

    shown = drawn(picture)

    assert "1 running; 1 device at ws://host" in shown
    for text in ("train_0", "12/100", "loss 0.25", "nan nan"):
        assert text in shown


def test_a_picture_follows_deltas() -> None:
    picture = Picture("ws://host")
    picture.apply(snapshot(replica("train_0", step=1)))

    assert not picture.apply(Delta({"train_0": {"step": 9, "metrics": {"loss": 0.5}}}, {"GPU-0": {"power": 300}}))

    assert picture.replicas["train_0"].step == 9
    assert picture.devices["GPU-0"].status == {"power": 300}
    assert "loss 0.5" in drawn(picture)


@pytest.mark.parametrize(
    "update",
    [Delta({"train_1": {"step": 1}}), event(1, "registered", "train_1"), event(2, "device_failed", device={})],
)
def test_a_picture_asks_to_look_again_where_more_has_changed(update: Any) -> None:
    picture = Picture("ws://host")
    picture.apply(snapshot(replica("train_0")))

    assert picture.apply(update)


def test_a_picture_says_who_is_away_until_there_is_a_snapshot() -> None:
    picture = Picture("ws://host")
    picture.apply(snapshot())
    picture.apply(Away("the weaver died"))
    assert "away: the weaver died" in drawn(picture)

    picture.apply(snapshot(replica("train_0")))
    assert "away" not in drawn(picture)


def test_the_worst_come_first_and_the_rest_is_counted() -> None:
    picture = Picture("ws://host")
    picture.apply(snapshot(*(replica(f"train_{n}") for n in range(100)), replica("train_x", "failed")))

    shown = drawn(picture, height=24)

    assert "train_x" in shown
    assert len(shown.splitlines()) <= 24
    assert "… 92 more" in shown


def row_of(rows: list[TableRow], name: str) -> dict[str, str]:
    (cells,) = (row.cells for row in rows if row.cells[0].strip() == name)
    return dict(zip(REPLICA_COLUMNS, cells, strict=True))


def test_a_job_of_several_ranks_is_one_row_with_its_ranks_below_it() -> None:
    about: dict[str, Any] = {"max_step": 100, "step_time": 2.0, "epoch": 1, "devices": ("GPU-0",)}
    first = replica("train_0", step=40, metrics={"loss": 0.5}, **about)
    other = replica("train_1", "stalled", step=38, **about | {"step_time": 3.0})
    alone = replace(replica("evaluate", step=1), group="evaluate")

    rows = list(table_rows([other, alone, first]))

    assert [row.cells[0] for row in rows] == ["evaluate", "trainers (2 ranks)", "  train_0", "  train_1"]
    job = row_of(rows, "trainers (2 ranks)")
    assert job["state"] == "1 stalled, 1 running"
    assert job["step"] == "38 to 40/100"
    assert (job["epoch"], job["metrics"], job["s/step"]) == ("1", "loss 0.5", "2.5")
    assert job["left"] == "0:03:06"  # by the slower rank
    assert (job["host"], job["devices"]) == ("1 host", "1")
    assert row_of(rows, "train_0")["left"] == "0:02:00"


def test_the_replicas_of_two_users_are_two_jobs() -> None:
    mine, theirs = replica("train_0", user="ann"), replica("train_0@s", user="bob")
    assert not any(row.is_job for row in table_rows([mine, theirs]))


def test_a_job_that_has_ended_or_makes_no_steps_has_no_time_left() -> None:
    known: dict[str, Any] = {"step": 3, "max_step": 9, "step_time": 1.0}
    for one in (
        replica("r", "failed", **known),
        replica("r", step=3, max_step=9),
        replica("r", **known | {"step": 9}),
    ):
        assert row_of(list(table_rows([one])), "r")["left"] == ""


@pytest.mark.parametrize("most", range(12))
def test_jobs_have_room_before_their_ranks(most: int) -> None:
    jobs = [replace(replica(f"{group}_{rank}"), group=group) for group in "abc" for rank in range(3)]
    rows = list(table_rows(jobs, most))
    assert len(rows) == most
    assert sum(row.is_job for row in rows) == min(3, most)


def test_an_event_that_comes_again_is_shown_once() -> None:
    picture = Picture("ws://host")
    picture.apply(snapshot())
    picture.apply(event(5, "stalled", "train_0"))
    picture.apply(event(5, "stalled", "train_0", stack="a stack"))

    assert drawn(picture).count("stalled") == 1


def test_live_looks_again_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    looked = {"train_0": replica("train_0", step=77)}, {"GPU-0": GPU}
    updates: list[Any] = [snapshot(), event(1, "registered", "train_0")]

    live(iter(updates), lambda: looked, "ws://host")

    assert "77" in capsys.readouterr().out


# -- lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            event(1, "command", do="update_config", params={"lr": 1}, target="*", by="me"),
            "command  update_config lr=1 to * by me",
        ),
        (
            event(2, "applied", "train_0", do="update_config", step=7, changes={"lr": {"old": 2, "new": 1}}),
            "applied  train_0  update_config at step 7 lr=1",
        ),
        (
            event(3, "refused", "train_0", do="update_config", step=0, reason="no such key"),
            "refused  train_0  update_config at step 0 no such key",
        ),
        (
            event(
                4, "device_failed", device=GPU.__dict__, reason="ECC", replicas=[{"replica": "a", "action": "stop"}]
            ),
            "device_failed  GPU-0: ECC; on it: a (stop)",
        ),
        (event(5, "stalled", "a", stack="one\ntwo", why="no step"), "stalled  a  why=no step; 2 lines of stack"),
        (event(6, "command", do="pause", params={}, target="a", by="ada"), "command  pause to a by ada"),
        (event(6, "new kind of event", x=1), "new kind of event  x=1"),
    ],
)
def test_an_event_is_one_line(one: WeaverEvent, text: str) -> None:
    line = event_line(one)

    assert line.endswith(text)
    assert ".125" in line
    assert "\n" not in line


def test_updates_are_lines_of_json() -> None:
    lines = [
        json.loads(json_line(update))
        for update in (snapshot(), Delta({}), Away("x"), event(1, "paused", "train_0", why="told"))
    ]

    assert [line["type"] for line in lines] == ["snapshot", "delta", "away", "event"]


def test_a_device_is_one_row() -> None:
    failed = DeviceInfo("GPU-1", "failed", reason="ECC", memory=2 << 30, status={"memory_used": 1 << 30})

    assert device_row(failed)[1] == "failed: ECC"
    assert device_row(failed)[4] == "1.0 of 2.0 GiB"
    assert device_row(GPU)[5] == ""
    assert len(device_row(GPU)) == len(DEVICE_COLUMNS)


def test_what_ails_a_device_is_in_its_row() -> None:
    status: dict[str, Any] = {"temperature": 91.4, "error": "GPU is lost", "xid": 79, "ecc_uncorrected": 2}
    status["throttled"] = ["thermal"]

    assert device_row(DeviceInfo("GPU-1", "active", status=status))[6:8] == [
        "91",
        "GPU is lost; Xid 79; 2 uncorrectable memory errors; throttled: thermal",
    ]


def test_what_a_newer_gateway_adds_is_passed_over() -> None:
    assert read_update({"type": "something new"}) is None
    body = {"uuid": "GPU-0", "state": "active", "colour": "green"}
    assert DeviceInfo.from_body(body).uuid == "GPU-0"


# -- curves -----------------------------------------------------------------------------------------------------


def test_a_curve_goes_from_the_first_value_to_the_last() -> None:
    lines = list(plot_lines("loss", [(n, float(n), 1.0 - n / 100) for n in range(101)], width=20, height=5))

    title, *drawing, axis, steps = lines
    assert title == "loss"
    assert drawing[0].startswith("   1 ┤")
    assert drawing[-1].lstrip().startswith("0 ┤")
    assert drawing[0].split("┤")[1].strip()
    assert drawing[-1].split("┤")[1].startswith(" ")
    assert axis.endswith("─" * 20)
    assert steps.split() == ["0", "step", "100"]
    assert all(len(line) <= 20 + 8 for line in lines)


def test_without_steps_time_goes_across() -> None:
    lines = list(plot_lines("loss", [(None, 10.0, 1.0), (3, 12.5, 2.0)], width=20, height=5))

    assert lines[-1].split() == ["0", "s", "time", "2.5", "s"]


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [5.0] * 10, [1e300, -1e300], [1e-300, 2e-300]])
def test_every_curve_can_be_drawn(values: list[float]) -> None:
    lines = list(plot_lines("x", [(n, float(n), value) for n, value in enumerate(values)]))

    assert any("⠁" <= character <= "⣿" for line in lines for character in line)


def test_values_that_are_no_numbers_are_counted() -> None:
    points: list[tuple[int | None, float, float]] = [(0, 0.0, 1.0), (1, 1.0, math.nan), (2, 2.0, math.inf)]

    assert next(iter(plot_lines("loss", points))) == "loss  (2 values are no numbers)"
    assert list(plot_lines("loss", points[1:])) == ["loss  (2 values are no numbers)", "nothing to draw"]
    assert list(plot_lines("loss", [])) == ["loss", "nothing to draw"]


# -- what is not known, and how things ended -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "used", "shown"),
    [
        (141 << 30, 9 << 30, "9.0 of 141.0 GiB"),
        (141 << 30, 0, "0.0 of 141.0 GiB"),
        (141 << 30, None, "141.0 GiB"),
        (0, 9 << 30, "9.0 GiB"),
        (0, None, ""),
    ],
)
def test_a_device_shows_of_its_memory_what_is_known(memory: int, used: int | None, shown: str) -> None:
    device = DeviceInfo("GPU-0", "active", memory=memory, status={"memory_used": used})

    assert device_row(device)[DEVICE_COLUMNS.index("memory")] == shown


@pytest.mark.parametrize(
    ("host", "pid", "shown"), [("node-1", 7, "node-1:7"), ("node-1", 0, "node-1"), ("", 7, ""), ("", 0, "")]
)
def test_a_replica_shows_of_its_host_what_is_known(host: str, pid: int, shown: str) -> None:
    assert replica_row(ReplicaInfo("r", "running", host=host, pid=pid))[REPLICA_COLUMNS.index("host")] == shown


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        ({}, "finished"),
        ({"ending": "completed"}, "finished: completed"),
        ({"ending": "stopped", "ended_by": "ada"}, "finished: stopped by ada"),
        ({"ending": "cancelled"}, "finished: cancelled"),
    ],
)
def test_a_replica_shows_how_it_ended(ended: dict[str, Any], shown: str) -> None:
    assert replica_row(replica("r", "finished", **ended))[REPLICA_COLUMNS.index("state")] == shown


def test_a_line_of_an_end_has_its_reason_and_its_last_line() -> None:
    exit = {"signal": 9, "code": None, "out_of_memory": False, "last_lines": ["before", "no room"]}
    line = event_line(event(1, "failed", "r", reason="killed by SIGKILL", ending="crashed", exit=exit))

    assert line.endswith("failed  r  reason=killed by SIGKILL ending=crashed; its last line: no room")


@pytest.mark.parametrize("reason", [None, "", " "])
def test_a_device_without_a_reason_has_no_colon(reason: str | None) -> None:
    assert device_row(DeviceInfo("GPU-0", "failed", reason=reason))[DEVICE_COLUMNS.index("state")] == "failed"


def test_a_profile_of_a_replica_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"replica": "train_0", "seconds": 1.0, "folded": "", "samples": 0, "left_out": 0, "sampler": "py-spy"}
    monkeypatch.setattr(Gateway, "ask", lambda self, operation, **arguments: empty)

    shown = CliRunner().invoke(app, ["profile", "train_0", "--seconds", "1", "--url", "ws://127.0.0.1:1"])

    assert (shown.stdout, shown.exit_code) == ("", 0)
    assert "no thread of train_0 was busy: `loom stacks train_0` shows" in shown.stderr
