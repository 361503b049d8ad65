"""The table of bounds in SECURITY.md: each of its names is an option or a constant, and each value is theirs."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib import import_module

import pytest

from loom.control import frame
from loom.weaver import commands, device_failures, persistent_state
from loom.weaver.server import guests_and_admins, threadlets
from loom_gateway.access import audit, budgets, middleware, notes, sign_ins
from loom_gateway.session_hosts import line, moves
from loom_gateway.settings import GatewaySettings, Limits
from tests.support.paths import ROOT

MODULES = [
    "loom.terminal_text",
    "loom.control.frame",
    "loom.weaver.client",
    "loom.weaver.commands",
    "loom.weaver.device_failures",
    "loom.weaver.persistent_state",
    "loom.weaver.server.guests_and_admins",
    "loom.weaver.server.threadlets",
    "loom.wire.length_prefix",
    "loom_gateway.access.audit",
    "loom_gateway.access.middleware",
    "loom_gateway.access.budgets",
    "loom_gateway.access.notes",
    "loom_gateway.access.sign_ins",
    "loom_gateway.driver.output.spool",
    "loom_gateway.offload",
    "loom_gateway.relay.links",
    "loom_gateway.relay.endpoint",
    "loom_gateway.relay.links",
    "loom_gateway.server",
    "loom_gateway.session_hosts.line",
    "loom_gateway.session_hosts.moves",
    "loom_gateway.sessions.log_reader",
    "loom_gateway.sessions.logs",
    "loom_gateway.weaver_socket.endpoint",
    "loom_gateway.weaver_socket.subscribers",
]


def rows() -> list[list[str]]:
    text = (ROOT / "SECURITY.md").read_text()
    table = text.partition("## What is bounded")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[1])


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_each_bound_is_an_option_or_a_constant(row: list[str]) -> None:
    options = {"--" + field.name.replace("_", "-") for field in fields(GatewaySettings)}
    constants = {name for module in MODULES for name in vars(import_module(module))}
    assert set(names(row)) <= options | constants
    assert row[2], "it is bounded for a user"
    assert row[4], "who exceeds it sees something"


def test_the_values_are_those_of_the_code() -> None:
    of = {name: row for row in rows() for name in names(row)}
    for name in ("MAX_BODIES", "MAX_ANSWERS"):
        of_user, in_all = getattr(budgets, name)
        assert of[name][2:4] == [f"{of_user >> 20} MiB", f"{in_all >> 20} MiB"]
    for name in ("MAX_TUNNELS", "MAX_WATCHERS"):
        of_user, in_all = getattr(budgets, name)
        assert of[name][2:4] == [str(of_user), str(in_all)]
    assert str(Limits().max_connections_per_user) in of["--max-connections-per-user"][2]
    assert str(Limits().max_sessions) in of["--max-sessions"][2]
    assert f"{middleware.BODY_TIMEOUT:g} s" in of["BODY_TIMEOUT"][2]
    assert f"{middleware.SLOWEST_BATCH >> 10} KiB" in of["BODY_TIMEOUT"][2]
    assert f"{audit.LINES:g} a second" in of["LINES"][3]
    assert f"{audit.STALLED:g} s" in of["STALLED"][2]
    assert f"{audit.MAX_LINES} lines" in of["MAX_LINES"][3]
    assert f"{1000 * threadlets.TURN:g} ms" in of["TURN"][3]
    for value in (frame.MAX_NAME, commands.MAX_IDS, guests_and_admins.MAX_GLOBS, device_failures.MAX_POLICIES):
        assert str(value) in of["MAX_IDS"][2]
    assert of["MAX_REPLICAS"][2] == str(persistent_state.MAX_REPLICAS)
    for size in (persistent_state.MAX_DESCRIPTION, persistent_state.MAX_DESCRIBED):
        assert f"{size >> 20} MiB" in of["MAX_DESCRIBED"][2]
    assert of["MAX_STRANGE"][2:4] == [
        f"frames of {line.MAX_STRANGE >> 10} KiB, {line.CONNECT_TIMEOUT:g} s",
        f"{line.MOST_STRANGERS} lines",
    ]
    assert of["MOST_KEPT"][2:4] == [
        f"{moves.MOST_BYTES >> 20} MiB a session",
        f"{moves.MOST_KEPT >> 20:,} MiB a host",
    ]
    assert of["MAX_CONTROL"][2] == f"{line.MAX_CONTROL >> 20} MiB"
    assert of["MAX_NOTES"][2] == f"{notes.MAX_NOTE >> 10} KiB; of a topic {notes.MAX_NOTES >> 20} MiB"
    assert of["MAX_CODES"][2] == f"{sign_ins.MAX_CODES} a minute at each gateway"
