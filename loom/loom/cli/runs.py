"""``loom runs``: the runs of trainings: lists, one with its timeline, comparisons, notes and tags."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.options import Json, Since, Until, UserAccess, asking, read_moment, weaver_clock
from loom.cli.output import counted, print_json, print_table, say, say_lines, show, when
from loom.errors import NotFound, WrongArguments

if TYPE_CHECKING:
    from loom.weaver.run_views import MetricSummary, RunDetails, RunRecord
    from loom_proxy.weaver.client import WeaverProxy

MAX_TREE = 100
"""Runs in the tree of a run's parents and children."""

app = typer.Typer(help="The runs of your trainings, also ended ones.", no_args_is_help=True)

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Id, the beginning of an id, or a name: the latest run.")
]


@app.command("list")
@asking
def list_(
    access: UserAccess,
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="A name, an id, or a glob over both.")] = None,
    state: Annotated[str | None, typer.Option(help="running, completed, crashed, stopped, …")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    since: Since = None,
    until: Until = None,
    archived: Annotated[bool, typer.Option("--archived", help="The archived runs instead.")] = False,
    sort: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="began, ended, name, state, step, summary.METRIC or config.KEY; - reverses."
        ),
    ] = "-began",
    column: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="A further column: summary.METRIC or config.KEY.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
    as_json: Json = False,
) -> None:
    """List runs, the latest first."""
    weaver = access.weaver()
    clock = weaver_clock(weaver)
    began = {
        name: None if text is None else read_moment(text, clock)
        for name, text in (("since", since), ("until", until))
    }
    found = [
        one.info
        for one in weaver.runs(run, state=state, tag=tag, archived=archived, sort=sort, limit=limit, **began)
    ]
    columns = list(column or _loss_of(found))
    show(
        as_json,
        {"runs": [one.to_body() for one in found]},
        counted(len(found), "run"),
        ["run", "name", "state", "step", "began", *columns, "tags"],
        [
            [_id(one, access.user), one.name, one.state, _steps(one), when(one.began)]
            + [_value(one, key) for key in columns]
            + [", ".join(one.tags)]
            for one in found
        ],
    )


@app.command("show")
@asking
def show_(access: UserAccess, run: RunName, as_json: Json = False) -> None:
    """Show a run: how it was started, what has changed while it ran, and how it ended."""
    weaver = access.weaver()
    one = weaver.run(run).details()
    if as_json:
        print_json(one.to_body())
        return
    cause = " ".join(filter(None, [one.reason and f"({one.reason})", one.by and f"by {one.by}"]))
    say(f"{one.id} {one.name!r}: {one.state} {cause}".strip())
    facts: dict[str, Any] = {
        "step": _steps(one),
        "began": when(one.began),
        "ended": when(one.ended),
        "ranks": one.ranks,
        "restarts": one.restarts or None,
        "command": shlex.join(one.command) or None,
        "code": _code(one),
        "session": one.session,
        **{name: _text(one.start.get(name)) for name in ("folder", "user", "host", "gpus", "versions")},
        "tags": ", ".join(one.tags) or None,
    }
    print_table("start", ["", ""], [[name, value] for name, value in facts.items() if value not in (None, "")])
    if one.parent or one.children:
        print_table("runs", ["", "run", "state", "from"], _tree(weaver, one))
    if one.config:
        print_table(
            "configuration at the start",
            ["key", "value"],
            [[key, _text(value)] for key, value in one.config.items()],
        )
    if one.summary:
        print_table(
            "metrics",
            ["metric", "last", "min", "max"],
            [[name, *_numbers(each)] for name, each in one.summary.items()],
        )
    print_table(
        "timeline",
        ["time", "step", "what"],
        [[when(each["time"]), each.get("step"), _told(each)] for each in one.timeline],
    )
    if one.note:
        say_lines(one.note)


@app.command()
@asking
def compare(
    access: UserAccess,
    run: RunName,
    other: Annotated[str, typer.Argument(metavar="RUN", help="The other run.")],
    step: Annotated[int | None, typer.Option(min=0, help="Compare the metrics at this step.")] = None,
    as_json: Json = False,
) -> None:
    """Compare two runs: their starts, configurations and metrics."""
    found = access.weaver().run(run).compare(other, step)
    if as_json:
        print_json(found.to_body())
        return
    names = [f"{one.name} {one.id}" for one in found.runs]
    start = {
        key: map(shlex.join, pair) if key == "command" and all(pair) else pair for key, pair in found.start.items()
    }
    changed = {**{f"config.{key}": pair for key, pair in found.config.items()}, **start}
    print_table("differences", ["", *names], [[key, *map(_text, pair)] for key, pair in changed.items()])
    pairs: Mapping[str, Any] = found.at_step
    if step is None:
        pairs = {name: [one and one.last for one in pair] for name, pair in found.summary.items()}
    title = "metrics, last values" if step is None else f"metrics at step {step:,}"
    print_table(
        title,
        ["metric", *names, "difference"],
        [[name, *map(_number, pair), _difference(*pair)] for name, pair in pairs.items()],
    )


@app.command()
@asking
def note(
    access: UserAccess, run: RunName, text: Annotated[str, typer.Argument(help="Markdown; empty removes the note.")]
) -> None:
    """Set the note of a run."""
    one = access.weaver().run(run)
    one.set_note(text)
    say(f"noted on {one.id}")


@app.command()
@asking
def tag(
    access: UserAccess,
    run: RunName,
    tags: Annotated[list[str] | None, typer.Argument(metavar="TAG")] = None,
    remove: Annotated[list[str] | None, typer.Option(metavar="TAG", help="A tag to remove.")] = None,
) -> None:
    """Add tags to a run, and remove others."""
    one = access.weaver().run(run)
    one.tag(*(tags or ()), remove=remove or ())
    say(f"{one.id}: {', '.join(one.tags) or 'no tags'}")


@app.command()
@asking
def archive(
    access: UserAccess,
    run: RunName,
    back: Annotated[bool, typer.Option("--back", help="Take it in again.")] = False,
) -> None:
    """Leave a run out of the list."""
    one = access.weaver().run(run)
    one.archive(back)
    say(f"{one.id} is {'listed again' if back else 'archived'}")


@app.command()
@asking
def rm(
    access: UserAccess,
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Ids, or the beginnings of ids.")],
) -> None:
    """Remove ended runs with their points."""
    weaver = access.weaver()
    meant = [weaver.run(name) for name in runs]
    for name, one in zip(runs, meant, strict=True):
        if not one.info.id.startswith(name):
            raise WrongArguments(
                f"{name!r:.80} is a name; its latest run is {one.info.id}: name the id to remove it"
            )
    for one in meant:
        one.remove()
        say(f"{one.info.id} is removed")


def _loss_of(runs: Iterable[RunRecord]) -> list[str]:
    """Return the first metric that may be a loss, as a column."""
    names = [name for one in runs for name in one.summary if fnmatch.fnmatch(name.lower(), "*loss*")]
    return [f"summary.{names[0]}"] if names else []


def _id(run: RunRecord, user: str | None) -> str:
    return f"{run.user}/{run.id}" if user == "*" else run.id


def _steps(run: RunRecord) -> str:
    of = "" if run.max_step is None else f" of {run.max_step:,}"
    return "" if run.step is None else f"{run.step:,}{of}"


def _value(run: RunRecord, key: str) -> str | None:
    kind, _, name = key.partition(".")
    if kind == "summary":
        return None if name not in run.summary else f"{run.summary[name].last:.6g}"
    if kind == "config":
        return _text(run.config.get(name))
    raise WrongArguments(f"--column {key!r:.80}: write summary.METRIC or config.KEY")


def _code(run: RunRecord) -> str | None:
    if run.commit is None:
        return None
    return run.commit[:12] + {True: "", False: ", with changes", None: ""}[run.clean]


def _text(value: Any) -> str | None:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return None if value is None else str(value)


def _tree(weaver: WeaverProxy, shown: RunDetails) -> list[list[Any]]:
    """Return a row for each run that a run continues, for itself, and for those that continue it, as a tree."""
    above: list[RunDetails] = []
    found, seen = shown, {shown.id}
    while found.parent is not None and len(above) < MAX_TREE and found.parent["run"] not in seen:
        try:
            found = weaver.run(found.parent["run"]).details()
        except NotFound:  # it was removed
            break
        above.append(found)
        seen.add(found.id)
    rows = []
    for depth, one in enumerate([*reversed(above), shown]):
        rows.append([_branch(depth, one.name), one.id, one.state, _from(one.parent)])
    below = [(len(above) + 1, child) for child in reversed(shown.children)]
    while below and len(rows) < MAX_TREE:
        depth, child = below.pop()
        rows.append([_branch(depth, child["name"]), child["run"], child["state"], _from(child)])
        if child["run"] not in seen:
            seen.add(child["run"])
            further = weaver.run(child["run"]).details().children
            below += [(depth + 1, each) for each in reversed(further)]
    return rows


def _branch(depth: int, name: str) -> str:
    return f"{'   ' * (depth - 1)}└─ {name}" if depth else name


def _from(parent: Mapping[str, Any] | None) -> str | None:
    return None if parent is None else f"{parent['kind']} at step {parent['step']:,}"


def _numbers(summary: MetricSummary) -> list[str]:
    return [f"{value:.6g}" for value in summary[:3]]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


def _difference(first: float | None, second: float | None) -> str | None:
    return None if first is None or second is None else f"{second - first:+.6g}"


def _told(mark: Mapping[str, Any]) -> str:
    """Return a mark of a timeline as text."""
    match mark:
        case {"kind": "command", "do": do, "applied": applied, "refused": refused}:
            changes = [f"{key} {one['old']} → {one['new']}" for key, one in mark["changes"].items()]
            what = ", ".join(changes) or do
            parts = [
                f"applied by {applied}" if applied else "",
                f"refused by {refused} ({mark.get('reason')})" if refused else "",
            ]
            return f"{what}, by {mark.get('by')}: {', '.join(filter(None, parts))}"
        case {"kind": "ended", "state": state}:
            return " ".join(filter(None, [state, mark.get("by") and f"by {mark['by']}", mark.get("reason")]))
        case {"kind": kind, "count": count}:
            who = mark.get("replica") if count == 1 else f"{count} replicas"
            return ": ".join(filter(None, [f"{kind} {who}", mark.get("reason")]))
    return str(mark.get("kind"))
