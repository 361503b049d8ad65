"""Live cells: runs, jobs, meshes and futures in a notebook, which are kept up to date after the cell has ended.

They are widgets of anywidget, for Jupyter, VS Code and marimo. Without it, and in saved notebooks, the static HTML
is shown. Commands go through the kernel's own connection, and so with
the scope of its token.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from loom_proxy.progress import in_notebook

logger = logging.getLogger(__name__)

EVERY = 1.0
"""Seconds between two states of a cell."""

MOST = 64
"""Cells that are kept up to date; then the oldest stay as they are."""

State = dict[str, Any]


class LiveSource(Protocol):
    """The subject of a live cell."""

    def state(self) -> State:
        """Return the values that the front end draws: ``html``, ``run``, ``runs``, ``may`` and ``said``."""

    def ended(self) -> bool:
        """Return whether the state changes no more."""

    def message(self, content: Mapping[str, Any]) -> None:
        """Take in a message of the front end."""


class LiveHtml:
    """HTML that changes.

    Args:
        html: returns it, without waiting for the cluster.
        over: returns whether it changes no more.
    """

    def __init__(self, html: Callable[[], str], over: Callable[[], bool]) -> None:
        self._html = html
        self._over = over

    def state(self) -> State:
        return {"html": self._html()}

    def ended(self) -> bool:
        return self._over()

    def message(self, content: Mapping[str, Any]) -> None: ...


class LiveCell:
    """A widget, and a thread of its own that keeps it up to date: a cluster that is away holds up no other cell."""

    def __init__(self, source: LiveSource) -> None:
        self._source = source
        self._lock = threading.Lock()  # one state, or one message, at a time
        self._stopped = threading.Event()
        self._visible = True
        self.widget = _widget_class()(state=source.state())
        self.widget.on_msg(self._receive)
        threading.Thread(target=self._work, name="loom-live", daemon=True).start()

    def stop(self) -> None:
        """Leave the cell as it is."""
        self._stopped.set()

    def _work(self) -> None:
        while not self._stopped.wait(EVERY):
            if self._visible:
                self._guarded(self._refresh)

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        """Take in a message, on the kernel's thread, which must not wait for the cluster."""
        if not isinstance(content, Mapping):
            return
        if "visible" in content:
            self._visible = bool(content["visible"])
            return

        def act() -> None:
            self._source.message(content)
            self._refresh()

        threading.Thread(target=self._guarded, args=(act,), name="loom-live-message", daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with self._lock:
                work()
        except Exception:
            logger.exception("a live cell is not kept up to date any more")
            self.stop()

    def _refresh(self) -> None:
        ended = self._source.ended()
        state = self._source.state()
        if state != self.widget.state:
            self.widget.state = state
        if ended:
            self.stop()


_shown: deque[LiveCell] = deque()
"""The cells that are kept up to date, the oldest first."""


def is_live() -> bool:
    """Return whether this program's displays can be live: it is a notebook, and anywidget is installed."""
    return (in_notebook() or in_marimo()) and importlib.util.find_spec("anywidget") is not None


def in_marimo() -> bool:
    """Return whether this process runs cells of marimo."""
    marimo = sys.modules.get("marimo")
    return marimo is not None and bool(marimo.running_in_notebook())


def show(source: LiveSource) -> LiveCell:
    """Return a cell that is kept up to date."""
    cell = LiveCell(source)
    _shown.append(cell)
    if len(_shown) > MOST:
        _shown.popleft().stop()
    return cell


@functools.cache
def _widget_class() -> Any:
    import anywidget
    import traitlets

    class LiveWidget(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("live.js").read_text()
        state = traitlets.Dict().tag(sync=True)

    return LiveWidget


class Shown:
    """An object that a notebook shows, live if it can be."""

    def _live(self) -> LiveSource:
        """Return what is shown live."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        raise NotImplementedError

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """Return what IPython shows: a widget, and the static HTML for a front end without widgets."""
        if not is_live() or in_marimo():
            return {}
        bundle = show(self._live()).widget._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {"text/html": self._repr_html_(), **data, "text/plain": repr(self)}, metadata

    def _display_(self) -> Any:
        """Return what marimo shows."""
        if is_live():
            return show(self._live()).widget
        return sys.modules["marimo"].Html(self._repr_html_())
