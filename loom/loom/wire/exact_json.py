"""JSON that every reader accepts.

A loss may be NaN or infinite. Python would write that as ``NaN``, which a browser does not read. Here such numbers
are the strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, which Python's ``float`` and JavaScript's ``Number``
convert back.
"""

from __future__ import annotations

import json
import math
from typing import Any


def exact_json(value: Any) -> str:
    """Return the JSON text of a value. Values that JSON cannot express become strings."""
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError):
        return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else _NAMES.get(value, "NaN")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return repr(value)


_NAMES = {math.inf: "Infinity", -math.inf: "-Infinity"}
