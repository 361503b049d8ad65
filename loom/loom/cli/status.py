"""``loom status``: the state of a gateway, and why its last sessions ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loom.cli.options import Access, Json, asking
from loom.cli.output import counted, print_json, print_table, say, when
from loom.errors import WeaverUnavailable, because

if TYPE_CHECKING:
    from loom.weaver.views import ReplicaInfo

LINKS_SHOWN = 20  # replicas whose runs in trackers `status` shows
NOT_OFFERED_SHOWN = 8  # reasons for which living replicas do not carry out commands that `status` shows
ENDED_SHOWN = 10  # ended sessions that `status` shows; as JSON it prints all that the gateway remembers


@asking
def status(access: Access, as_json: Json = False) -> None:
    """Show a gateway's version, its workers, sessions and replicas, and why the last sessions ended."""
    gateway = access.gateway()
    answer, ended = gateway.status(), gateway.ended_sessions()
    away: str | None = None
    weaver_status: Mapping[str, Any] = {}
    try:
        weaver_status, replicas, devices, goodput = (
            gateway.ask(one) for one in ("status", "replicas", "devices", "goodput")
        )
    except WeaverUnavailable as error:
        replicas, devices, goodput, away = [], [], [], str(error)
    if as_json:
        weaver = {
            "replicas": replicas,
            "devices": devices,
            "goodput": [{**job, "course": []} for job in goodput],
            "weaver_away": away,
            "weaver_undurable_since": weaver_status.get("undurable_since"),
        }
        print_json({**answer, "ended": ended, **weaver})
        return
    # No title of a table, which would fold it to the table's width.
    say(f"gateway {answer.get('version', '?')} at {access.chosen}, {counted(answer.get('sessions', 0), 'session')}")
    print_table(
        "workers",
        ["worker", "reachable"],
        [[worker["address"], "yes" if worker["reachable"] else "no"] for worker in answer["workers"]],
    )
    if missing := answer.get("workers_missing"):
        say(missing)
    if isolation := answer.get("isolation"):
        own = (
            "a user id for each session"
            if isolation["drivers"] == "user ids"
            else "none, all have the gateway's user id"
        )
        per_user = "a user's own" if isolation["workers"] == "per user" else "shared by all users"
        say(f"isolation of drivers: {own}; workers: {per_user}")
    if refused := answer.get("refused"):
        each = ", ".join(
            f"{count} x {reason}" for reason, count in sorted(refused.items(), key=lambda one: -one[1])
        )
        say(f"refused since it started: {each}")
    if away is not None:
        say(away)
    if (since := weaver_status.get("undurable_since")) is not None:
        say(
            f"the weaver refuses commands, and has stored nothing since {when(since)}: "
            f"{weaver_status['undurable_reason']}"
        )
    if replicas:
        _print_replicas(replicas)
    _print_unwell(devices)
    for job in goodput:
        if job["ratio"] is not None:
            say(_goodput_line(job))
    if ended:
        lately = reversed(ended[-ENDED_SHOWN:])
        rows = [[one["name"], when(one["ended_at"]), one["reason"], _exit_code(one)] for one in lately]
        print_table("sessions that have ended, the last first", ["name", "ended", "why", "exit code"], rows)


def _print_replicas(replicas: list[Mapping[str, Any]]) -> None:
    from loom.cli.weaver_display import REPLICA_COLUMNS, table_rows
    from loom.weaver.states import ReplicaEnding
    from loom.weaver.views import ReplicaInfo, few, how_ended

    known = sorted(map(ReplicaInfo.from_body, replicas), key=lambda one: one.place)
    rows = (row.cells for row in table_rows(known))
    print_table(counted(len(replicas), "replica"), REPLICA_COLUMNS, rows)
    for one in [one for one in known if one.links][:LINKS_SHOWN]:
        say(f"{one.id}: {', '.join(f'{tracker} {url}' for tracker, url in one.links.items())}")
    for reason, ids in _not_offered(known):
        say(f"not offered by {few(ids)}: {reason}")
    ended = [one for one in known if one.ending not in (None, ReplicaEnding.COMPLETED)]
    for one in sorted(ended, key=lambda one: one.changed)[-ENDED_SHOWN:]:
        say(because(f"{one.id} {how_ended(one)}", one.end_reason))
        for line in (one.exit or {}).get("last_lines", ()):
            say(f"    {line}")


def _not_offered(known: list[ReplicaInfo]) -> list[tuple[str, list[str]]]:
    """Return the commands that living replicas do not carry out, by reason, with the replicas."""
    found: dict[str, list[str]] = {}
    for one in known:
        for reason in dict.fromkeys(one.not_offered.values()) if one.ending is None else ():
            found.setdefault(reason, []).append(one.id)
    return list(found.items())[:NOT_OFFERED_SHOWN]


def _print_unwell(devices: list[Mapping[str, Any]]) -> None:
    """Print the devices that are not active or whose reports are alarming; `loom devices` lists all."""
    from loom.cli.weaver_display import DEVICE_COLUMNS, ailments, device_row
    from loom.weaver.states import DeviceState
    from loom.weaver.views import DeviceInfo

    found = [DeviceInfo.from_body(one) for one in devices]
    unwell = [one for one in found if one.state is not DeviceState.ACTIVE or ailments(one)]
    if unwell:
        title = f"{len(unwell)} of {counted(len(found), 'device')} need attention"
        print_table(title, DEVICE_COLUMNS, map(device_row, unwell))


def _exit_code(session: Mapping[str, Any]) -> object:
    return "unknown" if session["exit_code"] is None else session["exit_code"]


def _goodput_line(job: Mapping[str, Any]) -> str:
    """Return a line such as ``goodput of train: 91.2 % (compute); lost 1.0 %, idle 7.8 %; 1 death``."""
    whole = sum(job["seconds"].values())
    lost = {reason: seconds / whole for reason, seconds in job["seconds"].items() if reason != "compute"}
    shown = ", ".join(f"{reason} {share:.1%}" for reason, share in lost.items() if share >= 0.0005)
    deaths = f"; {counted(len(job['faults']), 'death')}" if job["faults"] else ""
    return (
        f"goodput of {job['job']}: {job['ratio']:.1%} of {whole:.0f} s" + (f"; {shown}" if shown else "") + deaths
    )
