"""No command shows a terminal the control characters that others put into names, reasons and lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import loom
import loom.cli
from loom.cli.app import app
from loom.cli.output import file_name
from loom.errors import LoomError
from loom.process.error_exit import report
from loom.rest_client import Gateway
from loom.terminal_text import fit_line, fit_lines
from loom.weaver.states import DeviceState, ReplicaState
from loom.weaver.views import DeviceInfo, FaultRecord, GoodputRecord, ReplicaInfo, WeaverEvent
from loom_proxy.logs import LogLine

EVIL = "evil\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202egpj\u2066\r\n[red]forged[/red]\x00\x1b]8;;http://x\x1b\\"
UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")

REPLICAS = [
    ReplicaInfo(
        EVIL, state, group=EVIL, host=EVIL, session=EVIL, mesh=EVIL, devices=(EVIL,), handlers={EVIL: EVIL},
        config={EVIL: EVIL}, step=1, metrics={EVIL: 1.0}, phase=EVIL, died_of=EVIL, user=EVIL, actors=EVIL,
    )
    for state in ReplicaState
]  # fmt: skip
STATUS = {"error": EVIL, "throttled": [EVIL], "by": EVIL, "time": 1.0, "utilization": 0.5}
DEVICES = [
    DeviceInfo(EVIL, state, EVIL, EVIL, EVIL, 1 << 30, EVIL, (EVIL,), STATUS, EVIL) for state in DeviceState
]  # fmt: skip
EVENTS = [
    WeaverEvent(number, 1.0, kind, EVIL, {"reason": EVIL, "by": EVIL, "host": EVIL, "changes": {EVIL: EVIL}})
    for number, kind in enumerate(("registered", "died", "command", "undurable", "supervision", EVIL))
]
JOB = GoodputRecord(EVIL, 0.0, 1.0, 1, 0.5, {"compute": 0.5, EVIL: 0.5}, (FaultRecord(EVIL, EVIL, 0.1, 0.2),))
SESSION = {
    "name": EVIL, "state": EVIL, "client_connected": True, "user": EVIL, "shared_with": {EVIL: EVIL}, "shared": {},
    "created_at": 1.0, "pid": 7, "operations": 1, "owner": EVIL, "clients": 1, "opened_by": EVIL,
}  # fmt: skip
ENDED = {"name": EVIL, "reason": EVIL, "exit_code": 1, "created_at": 1.0, "ended_at": 2.0, "user": EVIL}
LINE = {"time": 1.0, "mesh": EVIL, "rank": 0, "place": EVIL, "stream": "stdout", "text": EVIL}

ANSWERS: dict[str, Any] = {
    "status": {"undurable_since": 1.0, "undurable_reason": EVIL, "event": 1, "time": 1.0, "weaver": "w"},
    "replicas": [one.to_body() for one in REPLICAS],
    "replica": REPLICAS[0].to_body(),
    "devices": [one.to_body() for one in DEVICES],
    "goodput": [JOB.to_body()],
    "events": [one.to_body() for one in EVENTS],
    "metrics": [EVIL],
    "history": [[1.0, 1, 0.5], [2.0, 2, 0.25]],
    "stacks": EVIL,
    "profile": {"replica": EVIL, "seconds": 1.0, "folded": EVIL, "samples": 3, "left_out": 0, "sampler": EVIL},
    "policies": {EVIL: "pause"},
    "address": EVIL,
}

COMMANDS = [
    ["status"], ["status", "--json"], ["sessions", "list"], ["sessions", "list", "--json"],
    ["sessions", "end", EVIL], ["sessions", "share", EVIL, EVIL, "--scope", "view"],
    ["sessions", "unshare", EVIL, EVIL],
    ["meshes", "--session", EVIL], ["meshes", "--session", EVIL, "--json"], ["logs", "--session", EVIL],
    ["logs", "--session", EVIL, "--json"], ["devices"], ["devices", "--json"], ["events"], ["events", "--json"],
    ["metrics", EVIL], ["metrics", EVIL, EVIL], ["metrics", EVIL, EVIL, "--plot"], ["metrics", EVIL, "--json"],
    ["stacks", EVIL], ["profile", EVIL], ["profile", EVIL, "--json"], ["policy"], ["policy", "--json"],
    ["weaver"], ["config", "show", EVIL], ["pause", "--replica", "no such*"],
    ["inject", "from-events", "--since", "1h"],
]  # fmt: skip


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that tells of names, reasons and lines that would take a terminal over."""

    def logs(self: Gateway, session: str, follow: bool, **wanted: Any) -> Iterator[dict[str, Any]]:
        yield LINE

    def ask(self: Gateway, operation: str, **arguments: Any) -> Any:
        if operation not in ANSWERS:
            raise LoomError(EVIL)
        return ANSWERS[operation]

    failed = {"rank": 0, "reason": EVIL}
    endpoint = {"name": EVIL, "calls": 1, "failures": 1, "in_flight": 0, "calls_per_second": 1.0, "p50": 1.0}
    mesh = {
        "name": EVIL, "stopped": False, "extent": {EVIL: 2}, "endpoints": [{**endpoint, "p99": None}],
        "elements": {"failures": [failed], "counts": {EVIL: 1}},
    }  # fmt: skip
    hosts = {**mesh, "procs": [{**mesh, "actors": [{**mesh, "class": EVIL, "class_name": EVIL}]}]}
    worker = {"address": EVIL, "reachable": False}
    status = {
        "version": EVIL, "workers": [worker], "sessions": 1, "workers_missing": EVIL, "refused": {EVIL: 2},
        "isolation": {"drivers": "none", "workers": "shared"},
    }  # fmt: skip
    answers: dict[str, Callable[..., Any]] = {
        "status": lambda self: status,
        "sessions": lambda self: [SESSION],
        "ended_sessions": lambda self: [ENDED],
        "end_session": lambda self, name: None,
        "share_session": lambda self, name, user, scope: None,
        "unshare_session": lambda self, name, user: None,
        "meshes": lambda self, session: {"hosts": hosts, "left_out": 3},
        "logs": logs,
        "ask": ask,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(Gateway, name, answer)


@pytest.mark.guarantees(
    "laptop", "No command shows a terminal the control characters that others put into names, reasons and lines"
)
@pytest.mark.parametrize(
    "words", COMMANDS, ids=lambda words: " ".join(words)[:30].encode("ascii", "replace").decode()
)
def test_what_a_command_prints_holds_nothing_that_a_terminal_obeys(words: list[str]) -> None:
    place = words.index("--json") if "--json" in words else len(words)
    ended = CliRunner().invoke(app, [*words[:place], "--url", "ws://127.0.0.1:1", *words[place:]])

    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        assert isinstance(ended.exception, LoomError), repr(ended.exception)
    assert UNFIT.findall(ended.output) == []
    assert ended.output or ended.exception


def test_an_error_is_made_fit_too(capsys: pytest.CaptureFixture[str]) -> None:
    report(LoomError(EVIL))

    assert UNFIT.findall(capsys.readouterr().err) == []


def test_what_precedes_a_line_of_the_users_own_program_is_fit() -> None:
    shown = str(LogLine(1.0, EVIL, EVIL, (0,), "stdout", "their own \x1b[31mcolour"))

    assert UNFIT.findall(shown) == ["\x1b"]


def test_every_character_that_a_terminal_obeys_is_shown_as_its_escape() -> None:
    every = "".join(map(chr, [*range(0x100), *range(0x2000, 0x2070), 0x61C, 0xD800, 0xDFFF, 0xFFF9]))

    assert UNFIT.findall(fit_line(every)) == []
    assert "\n" not in fit_line(every)
    assert UNFIT.findall(fit_lines(every)) == []
    fit_line(every).encode()
    for plain in ("naïve", "日本語", "a\tb", "🙂", "é", "\N{FAMILY}"):
        assert fit_line(plain) == plain


@pytest.mark.parametrize(
    "name", [EVIL, "../../x", "a/../../x", "/etc/x", "..", "", ".bashrc", "a\\b", "x" * 300, "ä"]
)
def test_a_name_that_others_chose_leads_a_file_to_no_other_folder(name: str) -> None:
    found = file_name(name)

    assert Path(f"{found}.json").name == f"{found}.json"
    assert found[0] != "."
    assert len(found) <= 100
    assert fit_line(found) == found
    assert file_name("session-1a2b") == "session-1a2b"


def test_commands_print_by_the_functions_that_make_text_fit() -> None:
    folder = Path(loom.cli.__file__).parent
    found = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "typer.echo",
                "click.echo",
                "print",
                "Text",
            )
            if named and path.name != "output.py":
                found.append(f"{path.relative_to(folder)}: {ast.unparse(node)}")

    assert [one for one in found if "progress.files" not in one and "\\r\\x1b[K" not in one] == []


def test_a_text_of_several_lines_is_printed_as_such() -> None:
    folder = Path(loom.cli.__file__).parent
    calls = [
        ast.unparse(node)
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "say"
    ]

    assert len(calls) > 20
    assert [call for call in calls if "\\n" in call] == []
