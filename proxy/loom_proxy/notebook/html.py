"""HTML of meshes, results, futures and jobs for Jupyter, without scripts, readable in light and dark themes.

The HTML shows only what this side knows already, and never asks the cluster. A sign and a text show each state
besides its colour.
"""

from __future__ import annotations

import itertools
import json
import reprlib
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from loom.errors import describe_error
from loom.shape import Extent, Point
from loom.terminal_text import fit_html
from loom.weaver.run_views import RunRecord
from loom_proxy.futures.timing import Timing
from loom_proxy.mesh.rank_states import RankState

_STYLE = "width:100%;height:720px;border:1px solid rgba(128,128,128,.4);border-radius:6px"

_SCRIPT = """\
<script>
addEventListener("message", (event) => {{
  const frame = document.getElementById({id});
  if (frame && event.source === frame.contentWindow && event.data && event.data.loom === "ready")
    frame.contentWindow.postMessage({{ loom_code: {code} }}, {origin});
}});
</script>"""


class Dashboard:
    """A gateway's page, which a notebook shows in a frame.

    The gateway has to allow the notebook's origin: ``--allow-origin http://localhost:8888``. The page in the frame
    may look only. ``url`` opens it in a tab of its own.
    """

    def __init__(self, address: str) -> None:
        self.url = address
        """An address that signs one browser in, once, within a minute."""

    def __repr__(self) -> str:
        return f"the page of the gateway: {self.url}"

    def _repr_html_(self) -> str:
        page, _, code = self.url.partition("#code=")
        parts = urlsplit(page)
        id = f"loom-{secrets.token_hex(6)}"
        origin = f"{parts.scheme}://{parts.netloc}"
        script = _SCRIPT.format(
            **{name: _in_script(text) for name, text in (("id", id), ("code", code), ("origin", origin))}
        )
        return (
            f'<iframe id="{id}" src="{escape(page)}" title="Loom" style="{_STYLE}"></iframe>\n{script}\n'
            f'<div style="opacity:.75;font-size:90%">Is the frame empty? The gateway has to allow this notebook: '
            f"<code>--allow-origin</code> with the notebook's address.</div>"
        )


def _in_script(text: str) -> str:
    """Return a text as a literal of JavaScript that cannot end the script."""
    return json.dumps(text).replace("<", "\\u003c")


MOST_CELLS = 512  # cells of the largest grid; the further elements of a larger mesh are only counted
METRICS_SHOWN = 4  # columns of metrics of a table of runs
MOST_COLUMNS = 32  # cells of the longest row; a longer row is broken

SHORT, LONG = 24, 400  # characters of a value in its cell, and in the cell's tooltip

# White text on each colour has a contrast of at least 4.5 (WCAG 2.1, AA), in every theme.
_COLOURS = {
    RankState.STARTING: "#8a5a00",
    RankState.ALIVE: "#1a7f37",
    RankState.FAILED: "#cf222e",
    RankState.STOPPED: "#59636e",
}
_SIGNS = {RankState.STARTING: "…", RankState.ALIVE: "", RankState.FAILED: "✕", RankState.STOPPED: "■"}
_PLURALS = {"host": "hosts", "process": "processes", "actor": "actors", "value": "values"}

_TABLE = "border-collapse:separate;border-spacing:2px;margin:2px 0"
_HEAD = "font-weight:normal;opacity:.75;padding:0 6px;text-align:right;background:transparent;border:0"
_CELL = "padding:1px 7px;text-align:center;border-radius:3px;min-width:1.6em"
_PLAIN_CELL = f"{_CELL};border:1px solid rgba(128,128,128,.5);background:transparent;font-family:monospace"
_SMALL = "opacity:.75;font-size:90%"


class Cell(NamedTuple):
    """The cell of one element of a mesh."""

    text: str  # the text in the cell
    title: str  # the tooltip, which screen readers read aloud
    colour: str | None = None  # background of white text; None for a frame around the cell


class MeshPanel(NamedTuple):
    """The panel of a mesh of hosts, processes or actors."""

    name: str
    class_name: str  # name of the proxy's class
    noun: str  # word for an element: ``host``, ``process`` or ``actor``
    of: str  # name of the actors' class; empty for other meshes
    extent: Extent
    whole: Extent  # extent of the whole mesh, which differs from ``extent`` if this is a part
    states: Sequence[tuple[RankState, str]]  # state of each element, and the reason if it has failed
    over: Exception | None  # the error that ended the connection, if it is over. The states are old then


def grid_html(extent: Extent, cells: Sequence[Cell], label: str) -> str:
    """Return a table of a mesh's first cells: a row for each index of all dimensions but the last."""
    columns = extent.sizes[-1] if extent.sizes else 1
    rows = []
    if 1 < columns <= MOST_COLUMNS:
        heads = "".join(_head(str(column), "col") for column in range(columns))
        rows.append(f"<tr>{_head(extent.labels[-1], 'col')}{heads}</tr>")
    outer = itertools.product(*map(range, extent.sizes[:-1]))
    for start, indices in zip(range(0, len(cells), columns), outer, strict=False):
        name = ", ".join(f"{label} {index}" for label, index in zip(extent.labels, indices, strict=False))
        for first in range(start, min(start + columns, len(cells)), MOST_COLUMNS):
            last = min(first + MOST_COLUMNS, start + columns, len(cells))
            span = name
            if columns > MOST_COLUMNS:
                span = f"{name} {extent.labels[-1]} {first - start} to {last - 1 - start}".strip()
            rows.append(f"<tr>{_head(span, 'row')}{''.join(map(_cell, cells[first:last]))}</tr>")
    table = f'<table style="{_TABLE}" aria-label="{fit_html(label)}">{"".join(rows)}</table>'
    rest = extent.nelements - len(cells)
    more = f'<div style="{_SMALL}">… and {rest:,} more</div>' if rest > 0 else ""
    return f'<div style="overflow-x:auto">{table}</div>{more}'


def _head(text: str, scope: str) -> str:
    return f'<th scope="{scope}" style="{_HEAD}">{fit_html(text)}</th>'


def _cell(cell: Cell) -> str:
    style = _PLAIN_CELL if cell.colour is None else f"{_CELL};color:#fff;background:{cell.colour}"
    title = fit_html(cell.title)
    return f'<td style="{style}" title="{title}" aria-label="{title}">{fit_html(cell.text)}</td>'


def _block(*parts: str) -> str:
    return f'<div style="margin:2px 0">{"".join(parts)}</div>'


def _line(text: str, small: str = "") -> str:
    """Return a heading of escaped text, with smaller text behind it."""
    behind = f' <span style="{_SMALL}">{small}</span>' if small else ""
    return f"<div>{text}{behind}</div>"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else _PLURALS[noun]}"


def _coordinates(extent: Extent, rank: int) -> str:
    return ", ".join(f"{label} {index}" for label, index in Point(rank, extent).items()) or "the only one"


def mesh_html(mesh: MeshPanel) -> str:
    """Return a mesh of hosts, processes or actors as a grid coloured by state."""
    of = f" of {fit_html(mesh.of)}" if mesh.of else ""
    part = "" if mesh.extent == mesh.whole else f", part of {fit_html(repr(mesh.whole))}"
    summary = _summary(mesh.states, mesh.noun)
    return _block(
        _line(f"<b>{fit_html(mesh.name)}</b>{of}", f"{mesh.class_name} {fit_html(repr(mesh.extent))}{part}"),
        grid_html(mesh.extent, _state_cells(mesh), f"{mesh.name}: {summary}"),
        f"<div>{summary}</div>",
        "" if mesh.over is None else f'<div style="{_SMALL}">as last seen: {fit_html(str(mesh.over))}</div>',
    )


def _state_cells(mesh: MeshPanel) -> list[Cell]:
    cells = []
    for rank, (state, reason) in enumerate(mesh.states[:MOST_CELLS]):
        title = f"{_coordinates(mesh.extent, rank)}: {state.value}{f' ({reason})' if reason else ''}"
        cells.append(Cell(f"{_SIGNS[state]}{rank}", title, _COLOURS[state]))
    return cells


def _summary(states: Sequence[tuple[RankState, str]], noun: str) -> str:
    counts = Counter(state for state, _ in states)
    found = ", ".join(f"{counts[state]:,} {state.value}" for state in RankState if counts[state])
    return f"{_count(len(states), noun)}: {found}"


def endpoint_html(signature: str, mesh: str) -> str:
    """Return an endpoint: its signature, its mesh, and the ways to call it."""
    return _block(
        _line(f"<b>{fit_html(signature)}</b>", f"endpoint of {fit_html(mesh)}"),
        f'<div style="{_SMALL}">.call(…), .call_one(…), .choose(…), .stream(…), .broadcast(…)</div>',
    )


class _Short(reprlib.Repr):
    """Reprs of bounded length, which are cheap even for large values and never raise."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.maxstring = self.maxother = limit
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = max(4, limit // 20)

    def of(self, value: Any) -> str:
        try:
            text = _without_data(value) or self.repr(value)
        except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise
            text = f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}>"
        return _cut(text, self.limit)


def _without_data(value: Any) -> str | None:
    """Return the type and size of an array, a tensor or many bytes, whose own repr may take long; else None."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and shape and dtype is not None:
        return f"{type(value).__name__}{tuple(shape)} {dtype}"
    if isinstance(value, (bytes, bytearray)) and len(value) > LONG:
        return f"{type(value).__name__} of {len(value):,} bytes"
    return None


_short, _long = _Short(SHORT), _Short(LONG)


def value_mesh_html(extent: Extent, values: Sequence[Any]) -> str:
    """Return a value mesh as a grid of the values' short reprs."""
    cells = [
        Cell(_short.of(value), f"{_coordinates(extent, rank)}: {_long.of(value)}")
        for rank, value in enumerate(itertools.islice(values, MOST_CELLS))
    ]
    count = _count(len(values), "value")
    return _block(
        _line("<b>ValueMesh</b>", f"{fit_html(repr(extent))}, {count}"),
        grid_html(extent, cells, f"values: {count}"),
    )


def future_html(state: str, timing: Timing | None, error: BaseException | None, value: Any) -> str:
    """Return a future: its state (``pending``, ``arrived``, ``done``, ``failed``), result or error, and timing."""
    colour = {"pending": RankState.STARTING, "failed": RankState.FAILED}.get(state, RankState.ALIVE)
    badge = f'<span style="{_CELL};color:#fff;background:{_COLOURS[colour]}">{fit_html(state)}</span>'
    small = "" if timing is None else f"{timing.wall_ms:,.1f} ms, of which {timing.rpc_ms:,.1f} ms in the cluster"
    parts = [_line(f"<b>FutureProxy</b> {badge}", small)]
    if error is not None:
        text = describe_error(error)
        parts.append(f'<div style="white-space:pre-wrap">{fit_html(_cut(text, 4 * LONG))}</div>')
    elif state == "done":
        is_ours = type(value).__module__.startswith("loom_proxy.") and hasattr(type(value), "_repr_html_")
        parts.append(value._repr_html_() if is_ours else f"<code>{fit_html(_long.of(value))}</code>")
    elif state == "pending":
        parts.append(f'<div style="{_SMALL}">.get(timeout) waits for it, and so does await</div>')
    return _block(*parts)


def run_html(name: str, status: str, started: float | None, finished: float | None, more: str = "") -> str:
    """Return a function that runs, or has run, in the driver: name, state, start or duration, and ``more``."""
    colour = {"running": RankState.STARTING, "done": RankState.ALIVE, "failed": RankState.FAILED}
    shade = _COLOURS[colour.get(status, RankState.STOPPED)]
    badge = f'<span style="{_CELL};color:#fff;background:{shade}">{fit_html(status)}</span>'
    since = "" if started is None else f"since {time.strftime('%H:%M:%S', time.localtime(started))}"
    small = since if started is None or finished is None else f"{finished - started:,.1f} s"
    return _block(_line(f"<b>{fit_html(name)}</b> {badge}", "; ".join(filter(None, [small, fit_html(more)]))))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def job_html(title: str, details: str, hosts: MeshPanel, meshes: Mapping[str, tuple[str, MeshPanel]]) -> str:
    """Return a job: its gateway, its hosts, and the reprs and panels of the meshes known to this program."""
    rows = "".join(
        f'<tr><th scope="row" style="{_HEAD};text-align:left">{fit_html(name)}</th>'
        f'<td style="border:0;text-align:left;background:transparent">'
        f"{fit_html(f'{text}: {_summary(mesh.states, mesh.noun)}')}</td></tr>"
        for name, (text, mesh) in itertools.islice(meshes.items(), MOST_COLUMNS)
    )
    more = len(meshes) - MOST_COLUMNS
    return _block(
        _line(f"<b>{fit_html(title)}</b>", fit_html(details)),
        mesh_html(hosts),
        f'<table style="{_TABLE}" aria-label="meshes">{rows}</table>' if rows else "",
        f'<div style="{_SMALL}">… and {more:,} more meshes</div>' if more > 0 else "",
    )


def runs_html(runs: Sequence[RunRecord]) -> str:
    """Return runs of trainings as a table: name, state, step, and the last value of the first metrics."""
    metrics = list(dict.fromkeys(name for run in runs[:MOST_CELLS] for name in run.summary))[:METRICS_SHOWN]
    heads = "".join(_head(name, "col") for name in ("run", "name", "state", "step", *metrics))
    rows = []
    for run in runs[:MOST_CELLS]:
        values = (f"{run.summary[name].last:.4g}" if name in run.summary else "" for name in metrics)
        step = "" if run.step is None else f"{run.step:,}{f' of {run.max_step:,}' if run.max_step else ''}"
        texts = (run.id, run.name, run.state, step, *values)
        cells = "".join(
            f'<td style="{_PLAIN_CELL}" title="{fit_html(run.reason or "")}">{fit_html(text)}</td>'
            for text in texts
        )
        rows.append(f"<tr>{cells}</tr>")
    more = f'<div style="{_SMALL}">… and {len(runs) - MOST_CELLS:,} more</div>' if len(runs) > MOST_CELLS else ""
    table = f'<table style="{_TABLE}" aria-label="runs"><tr>{heads}</tr>{"".join(rows)}</table>'
    return _block(
        _line(f"{len(runs):,} run{'s' * (len(runs) != 1)}"), f'<div style="overflow-x:auto">{table}</div>', more
    )
