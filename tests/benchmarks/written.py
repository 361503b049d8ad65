"""The budgets that are written down in ``docs/design/budgets.md``, as ``--check`` uses them.

A test compares this table with the page.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["BUDGETS", "Budget"]


class Budget(NamedTuple):
    """A bound on a figure or a ratio."""

    bound: Literal["at most", "at least"]
    value: float
    aim: float | None = None
    """What is aimed at beyond the budget."""


BUDGETS = {
    "one call": Budget("at most", 1.15, 1.10),
    "pipelined calls, one actor": Budget("at least", 1.0),
    "pipelined calls, 100 actors": Budget("at least", 1.0),
    "pipelined calls, mesh of 8": Budget("at least", 1.0),
    "64 MiB echo": Budget("at most", 1.25),
    "one call against Ray Client": Budget("at most", 0.2),
    "pipelined calls against Ray Client": Budget("at least", 5.0),
    "bytes a second against Ray Client": Budget("at least", 3.0),
    "small call beside 1 GiB": Budget("at most", 3.0),
    "small call beside bad handshakes": Budget("at most", 3.0),
    "call beside 2,000 hostile connections": Budget("at most", 3.0),
    "dead process to failed": Budget("at most", 0.5),
    "status report": Budget("at most", 1.0),
    "check for updates": Budget("at most", 0.3),
    "hooks of a step under loom run": Budget("at most", 50.0),
    "later start under loom run": Budget("at most", 0.3),
    "update of the page": Budget("at most", 16.0),
    "growth of the page's memory": Budget("at most", 256.0),
    "bytes a second to the page": Budget("at most", 200.0),
    "second watcher": Budget("at most", 5.0),
    "size of the page": Budget("at most", 150.0),
    "one group killed, one spare": Budget("at most", 1.2),
    "two groups killed, one spare": Budget("at most", 4.0),
    "all groups killed, a checkpoint": Budget("at most", 6.0),
    "successor of a group that was cut off": Budget("at most", 3.0),
    "analysis of 1 GB of log": Budget("at most", 60.0),
    "memory of an analysis": Budget("at most", 256.0),
    "completions through Loom": Budget("at most", 1.03),
    "pause for weights": Budget("at most", 1.2),
    "order beside a full pool": Budget("at most", 0.05),
    "order beside a full accept queue": Budget("at most", 0.05),
    "order beside a busy event loop": Budget("at most", 0.05),
    "event to a file": Budget("at most", 20.0),
    "event, nothing listens": Budget("at most", 1.0),
    "instrumentation of a step": Budget("at most", 0.005),
    "instrumentation of the shipped task": Budget("at most", 0.005),
    "operation on a tensor": Budget("at most", 25.0),
    "operation of a sequence that repeats": Budget("at most", 10.0),
    "operation of a compiled function": Budget("at most", 2.0),
    "operations a second through the gateway": Budget("at least", 20_000.0),
    "read of an element": Budget("at most", 1.15),
    "training step": Budget("at most", 1.2),
}
"""By the name in the page's first column."""
