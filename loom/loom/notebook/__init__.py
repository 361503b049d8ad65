"""Cells of a notebook that run in a session's driver, which ``%%cluster`` sends; see `loom.notebook.execution`."""

from loom.notebook.displays import Record
from loom.notebook.execution import run_cell

__all__ = ["RUN_NAME", "Record", "run_cell"]

RUN_NAME = "%%cluster"
"""The name of the run of every cell, so that a session runs one cell at a time."""
