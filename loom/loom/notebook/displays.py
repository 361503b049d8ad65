"""Rich displays: the forms of a value by MIME type, made where the value is, without IPython."""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import loom.driver_api
from loom.errors import describe_error


@dataclass(frozen=True)
class Record:
    """A display, or the traceback with which a cell ended."""

    data: Mapping[str, Any] = field(default_factory=dict)
    """The forms of a display by MIME type; binary ones in base64, as Jupyter has them. Empty for a traceback."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Jupyter's metadata of the forms, by MIME type."""
    traceback: str = ""
    """The text of a traceback; empty for a display."""

    def to_text(self) -> str:
        """Return the record as JSON.

        Raises:
            TypeError: a form has parts that JSON has not.
            ValueError: a form contains itself.
        """
        return json.dumps([self.data, self.metadata, self.traceback])  # in ASCII: a character is a byte

    @classmethod
    def from_text(cls, text: str) -> Record:
        """Return the record of a text from `to_text`."""
        return cls(*json.loads(text))


LARGEST = 4 << 20
"""Bytes of all forms of a display together, as JSON; a form over that is left out, and a note says so."""

LARGEST_TEXT = 64 << 10
"""Characters of the plain text of a value; the rest is cut off."""

_METHODS = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "text/latex": "_repr_latex_",
    "application/json": "_repr_json_",
    "application/javascript": "_repr_javascript_",
    "application/pdf": "_repr_pdf_",
}
"""IPython's methods that return a form."""


def display(*values: Any) -> None:
    """Show values in the notebook's cell, in their richest form. The counterpart of IPython's ``display``."""
    session = loom.driver_api.session()
    for value in values:
        session.show(_record_of(value).to_text())


def _record_of(value: Any) -> Record:
    data, metadata = _forms(value)
    shown: dict[str, object] = {}
    text = [_plain(value)]
    room = LARGEST
    for mime, form in data.items():
        if isinstance(form, (bytes, bytearray)):
            form = base64.b64encode(form).decode()
        if not isinstance(form, str) and not _is_json(form):
            text.append(f"[{mime} left out: a {type(form).__name__} is neither text nor bytes nor JSON]")
            continue
        size = len(json.dumps(form))
        if size > room:
            text.append(f"[{mime} left out: with its {size:,} bytes the display is over {LARGEST:,}]")
            continue
        shown[mime] = form
        room -= size
    shown["text/plain"] = "\n".join(text)
    return Record(shown, {mime: about for mime, about in metadata.items() if mime in shown and _is_json(about)})


def _is_json(form: Any) -> bool:
    try:
        json.dumps(form)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _forms(value: Any) -> tuple[dict[str, object], Mapping[str, Any]]:
    """Return the rich forms of a value, and Jupyter's metadata of them. A method that raises gives no form."""
    if isinstance(value, type):
        return {}, {}  # the methods are those of its instances
    if (picture := _picture(value)) is not None:
        return {"image/png": picture}, {}
    found, metadata = _called(value, "_repr_mimebundle_", include=None, exclude=None)
    data = {str(mime): form for mime, form in found.items()} if isinstance(found, Mapping) else {}
    metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
    for mime, name in _METHODS.items():
        if mime not in data:
            form, about = _called(value, name)
            if form is not None:
                data[mime] = form
                if isinstance(about, Mapping):
                    metadata[mime] = dict(about)
    data.pop("text/plain", None)
    return data, metadata


def _called(value: Any, name: str, **arguments: Any) -> tuple[Any, Any]:
    """Return the form that a method returns, and its metadata; (None, None) without such a method."""
    try:
        method = getattr(value, name, None)
        # An object whose every attribute exists, as a mock's or an actor mesh's, has no forms.
        form = method(**arguments) if callable(getattr(type(value), name, None)) and callable(method) else None
    except Exception as error:  # noqa: BLE001 - a user's method may raise anything
        sys.stderr.write(f"{type(value).__name__}.{name} raised {describe_error(error)}\n")
        return None, None
    return form if isinstance(form, tuple) and len(form) == 2 else (form, None)


def _picture(value: Any) -> bytes | None:
    """Return a matplotlib figure as PNG; None for anything else."""
    figures: Any = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, figures.Figure):
        return None
    file = io.BytesIO()
    value.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _plain(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        text = f"<{type(value).__name__}: its __repr__ raised {describe_error(error)}>"
    if len(text) > LARGEST_TEXT:
        return f"{text[:LARGEST_TEXT]}… and {len(text) - LARGEST_TEXT:,} more characters"
    return text
