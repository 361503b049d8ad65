"""``NAME=VALUE`` on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from loom.errors import WrongArguments


def read_assignments(texts: Iterable[str], form: str) -> dict[str, Any]:
    """Values by name; a value is JSON, or else the text as it stands.

    Args:
        texts: each ``NAME=VALUE``.
        form: what one looks like, with an example, for whoever wrote another.

    Raises:
        WrongArguments: one has another form.
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
