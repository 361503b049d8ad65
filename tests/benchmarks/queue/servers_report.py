"""The tables of orders beside streams on several servers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loom.rl.generation.weight_client import NOTICED_MS
from tests.benchmarks.machine import Machine
from tests.benchmarks.queue.load import Window
from tests.benchmarks.queue.plan import SERVER_SET_UPS, SERVER_WAYS, SERVERS, ServersPlan, SetUp
from tests.benchmarks.queue.report import HELPS, short_number, spread
from tests.benchmarks.queue.servers import Cell, Cells

TITLES = {
    "shared": "shared pool",
    "kept": "admin client, connection kept",
    "admin": "fresh connection, 1/0",
    "lane": "endpoint call",
}


@dataclass(frozen=True)
class ServersReport:
    """What one run found out."""

    plan: ServersPlan
    command: str
    machine: Machine
    cells: Cells
    notes: tuple[str, ...] = ()

    def orders(self, server: str, set_up: SetUp, way: str, of: Callable[[Window], list[float]]) -> list[float]:
        """Return a figure of each order, in all rounds."""
        return [figure for cell in self.cells[server][set_up.name][way] for figure in of(cell.window)]

    def median(self, server: str, set_up: SetUp, way: str) -> float:
        """Return the median queue_ms of a way."""
        return statistics.median(self.orders(server, set_up, way, queue_ms))

    @property
    def within_budgets(self) -> bool:
        return True

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "queue-servers",
            "command": self.command,
            "machine": asdict(self.machine),
            "plan": asdict(self.plan),
            "set_ups": [asdict(set_up) for set_up in SERVER_SET_UPS],
            "servers": {
                server: {
                    name: {way: [asdict(cell) for cell in cells] for way, cells in ways.items()}
                    for name, ways in set_ups.items()
                }
                for server, set_ups in self.cells.items()
            },
            "notes": list(self.notes),
        }

    def as_table(self) -> RenderableType:
        lines = [*self.notes, str(self.machine), self.command]
        tables = [self._set_up_table(set_up) for set_up in SERVER_SET_UPS]
        texts = (Text(line, style="dim") for line in lines)
        return Group(*tables, self._places(), self._verdicts(), self._second(), *texts)

    def _set_up_table(self, set_up: SetUp) -> Table:
        load = f"{set_up.streams} streams, {set_up.tokens} tokens of {1000 * set_up.step_s:g} ms each"
        title = f"{set_up.name}: {load}; median (min to max) of all orders, in ms"
        table = Table(title=title, title_justify="left")
        for heading in ("order to load weights", "server"):
            table.add_column(heading)
        for heading in ("wall_ms", "queue_ms", "rpc_ms", "orders"):
            table.add_column(heading, justify="right")
        for way in SERVER_WAYS:
            for server in self.cells:
                queue, rpc = (self.orders(server, set_up, way, of) for of in (queue_ms, rpc_ms))
                wall = [one + other for one, other in zip(queue, rpc, strict=True)]
                table.add_row(TITLES[way], server, *map(spread, (wall, queue, rpc)), str(len(queue)))
        return table

    def _places(self) -> Table:
        title = "what `loom analyze` says of the logs of client and server; means of the orders, in ms"
        table = Table(title=title, title_justify="left")
        for heading in ("set-up", "server", "order to load weights", "primary finding", "most of it is"):
            table.add_column(heading)
        for heading in ("client's pool", "to the server's first line", "the rest of queue_ms"):
            table.add_column(heading, justify="right")
        for set_up in SERVER_SET_UPS:
            for server in self.cells:
                for way in SERVER_WAYS:
                    cells = self.cells[server][set_up.name][way]
                    parts = [statistics.fmean(each) for each in zip(*(cell.parts for cell in cells), strict=True)]
                    says = [_most(cells, of) for of in (lambda cell: cell.primary, lambda cell: cell.place)]
                    table.add_row(set_up.name, server, TITLES[way], *says, *map(short_number, parts))
        return table

    def _verdicts(self) -> Table:
        table = Table(title="what helps", title_justify="left")
        for heading in ("set-up", "server", "helps", "does not help"):
            table.add_column(heading)
        for set_up in SERVER_SET_UPS:
            for server in self.cells:
                table.add_row(set_up.name, server, *self._helps(server, set_up))
        return table

    def _helps(self, server: str, set_up: SetUp) -> tuple[str, str]:
        """Return the ways that help, and those that do not."""
        shared = self.median(server, set_up, "shared")
        if shared < NOTICED_MS:
            return "", f"orders over the shared pool wait for {short_number(shared)} ms only"
        helps = [way for way in SERVER_WAYS[1:] if self.median(server, set_up, way) <= HELPS * shared]
        rest = [way for way in SERVER_WAYS[1:] if way not in helps]
        return "; ".join(TITLES[way] for way in helps), "; ".join(TITLES[way] for way in rest)

    def _second(self) -> Table:
        """Return what a second API server makes of the delay."""
        title = "queue_ms with two API servers, in that with one: medians"
        table = Table(title=title, title_justify="left")
        table.add_column("order to load weights")
        for set_up in SERVER_SET_UPS:
            table.add_column(set_up.name, justify="right")
        one, two = (name for name, api_servers in SERVERS.items() if api_servers)
        for way in SERVER_WAYS if {one, two} <= self.cells.keys() else ():
            ratios = [self.median(two, each, way) / self.median(one, each, way) for each in SERVER_SET_UPS]
            table.add_row(TITLES[way], *(f"{ratio:.2f}" for ratio in ratios))
        return table


def queue_ms(window: Window) -> list[float]:
    return window.queue_ms


def rpc_ms(window: Window) -> list[float]:
    return window.rpc_ms


def _most(cells: list[Cell], of: Callable[[Cell], str]) -> str:
    return Counter(map(of, cells)).most_common(1)[0][0]
