"""Whether an error of Loom's says what Monarch's says, for programs that match on texts."""

from __future__ import annotations

import re

_OF_BINDINGS = re.compile(
    r"^argument '|^'.*' object |can't convert negative int|failed to extract|takes \d+ positional"
)
"""Texts of Python's bindings for Rust, of which nothing is about meshes."""


def says_it_too(ours: BaseException | None, monarchs: BaseException) -> bool:
    """Return whether the text of an error contains that of Monarch's for the same mistake."""
    text = str(monarchs.args[0]) if isinstance(monarchs, KeyError) else str(monarchs)
    return ours is not None and (bool(_OF_BINDINGS.search(text)) or text in str(ours))
