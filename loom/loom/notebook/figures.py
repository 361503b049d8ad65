"""Matplotlib's backend in a driver: ``plt.show()``, and the end of a cell, show the open figures in the notebook.

Matplotlib imports this module, as ``MPLBACKEND`` tells it to.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg as FigureCanvas

import loom.driver_api
from loom.notebook.displays import display

__all__ = ["FigureCanvas", "show"]


def show(*_: Any, **__: Any) -> None:
    """Show the open figures and close them. Outside of a driver nobody sees them."""
    import matplotlib.pyplot as plt

    if loom.driver_api.in_driver():
        for number in plt.get_fignums():
            display(plt.figure(number))
    plt.close("all")
