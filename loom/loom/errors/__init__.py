"""Every public exception of Loom.

All of them derive from `LoomError`, so that ``except loom.LoomError`` catches Loom's exceptions and nothing else.
If Monarch or Python raises a built-in class in the same situation (`IndexError` for a slice out of range,
`TimeoutError` for a wait that took too long), the exception derives from that class too, so that a program written
for Monarch keeps working.

An error that crosses the wire carries its ``code``; `error_for_code` finds the class again on the other side.
"""

# ruff: noqa: F403

from typing import TYPE_CHECKING

from loom.errors.base import *
from loom.errors.base import LoomError
from loom.errors.control import *
from loom.errors.gateway import *
from loom.errors.mesh import *
from loom.errors.remote import *
from loom.errors.session import *

if not TYPE_CHECKING:  # a type checker takes all names from the imports
    _classes = {name for name, value in vars().items() if isinstance(value, type) and issubclass(value, LoomError)}
    __all__ = sorted(_classes | {"error_for_code", "operation_failed"})
