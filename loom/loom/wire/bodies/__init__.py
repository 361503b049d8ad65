"""The bodies of messages: a frozen dataclass for each kind, whose docstring documents that part of the protocol.

This package exports the ``__all__`` of each of its modules. `BODIES` has the class of each kind. `Hello` and
`Welcome` are in `loom.wire.handshake`.
"""

# ruff: noqa: F403 - as in asyncio/__init__.py: each module says in its __all__ what can be imported from here

from __future__ import annotations

from loom.wire.bodies.answers import *
from loom.wire.bodies.base import BODIES as BODIES
from loom.wire.bodies.base import Body as Body
from loom.wire.bodies.base import Id as Id
from loom.wire.bodies.calls import *
from loom.wire.bodies.connection import *
from loom.wire.bodies.lifeline import *
from loom.wire.bodies.meshes import *
from loom.wire.bodies.ports import *
from loom.wire.bodies.ranks import *
from loom.wire.bodies.runs import *
from loom.wire.bodies.sync import *
from loom.wire.bodies.tracing import *
