"""What a cell shows besides its text: displays and the traceback, as lines of JSON in the output of its run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
