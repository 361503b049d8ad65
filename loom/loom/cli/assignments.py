"""``NAME=VALUE`` arguments of the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from loom.errors import WrongArguments


def read_assignments(texts: Iterable[str], form: str) -> dict[str, Any]:
    """Return the values by name; a value is parsed as JSON, or else taken as text.

    Args:
        texts: each ``NAME=VALUE``.
        form: the form with an example, for the error about a text of another form.

    Raises:
        WrongArguments: a text has another form.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise WrongArguments(f"{text!r} is not {form}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values
