"""Cells of a notebook that run in a session's driver, which ``%%cluster`` sends; see `loom.cells.execution`."""

from loom.cells.execution import run_cell
from loom.cells.records import Record

__all__ = ["RUN_NAME", "Record", "run_cell"]

RUN_NAME = "%%cluster"
"""The name of the run of every cell, so that a session runs one cell at a time."""
