"""`examples/notebook.ipynb` with other lines in place of those that open and close its job, as a program.

``python example_notebook.py OPEN CLOSE`` runs it, and says on standard output, as JSON, what the cells have printed
and what they have shown as HTML.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebook.ipynb"

OPEN, CLOSE = "job = loom.local(hosts=2)", "job.close()"


def check_elsewhere(run: Callable[[Sequence[str]], str], opens: str, closes: str = CLOSE) -> None:
    """Run the example on a machine, on which ``run`` runs a program and returns its output."""
    said = json.loads(run([sys.executable, __file__, opens, closes]).splitlines()[-1])
    assert "learned 3.000, the data says 3\nafter 20 steps: " in said["printed"]
    assert "4 actors: 3 alive, 1 failed" in said["html"]
    assert said["html"].count('<div style="background:#1a7f37;height') == 20


def main(opens: str, closes: str) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, line, other in ((cells[0], OPEN, opens), (cells[-1], CLOSE, closes)):
        assert line in cell.source, f"the example has no {line}"
        cell.source = cell.source.replace(line, other)
    # With sockets that are files: the kernel and this program may be in a network of their own. Two kernels of one
    # working directory would share the files that are there by default.
    with TemporaryDirectory() as folder:
        kernels = AsyncKernelManager(transport="ipc", connection_file=f"{folder}/kernel.json")
        NotebookClient(notebook, timeout=200, km=kernels).execute()
    outputs = [output for cell in cells for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    html = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    print(json.dumps({"printed": printed, "html": html}))


if __name__ == "__main__":
    main(*sys.argv[1:])
