"""How a process of a proc mesh is started, described where Monarch need not be installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class BootstrapCommand:
    """The command that starts a process. As Monarch's class of this name, with the cluster's defaults.

    Args:
        program: the program to execute; None is the Python that the driver runs with.
        arg0: its name for itself; None is the program's.
        args: its arguments; None are those that make it a process of Monarch.
        env: environment variables; None as a value removes one of the inherited.
        inherit_env: start from the environment of the host, not from an empty one.
    """

    program: str | None = None
    arg0: str | None = None
    args: list[str] | None = None
    env: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    inherit_env: bool = True

    def with_env(self, env: Mapping[str, str | None]) -> BootstrapCommand:
        """A copy with more environment variables, which take precedence."""
        return dataclasses.replace(self, env={**self.env, **env})

    def __call__(self, point: object) -> Any:
        """Monarch's own command. Only in the cluster, where Monarch takes this for a ``bootstrap_command``."""
        from loom.actor import monarch_bootstrap_command

        return monarch_bootstrap_command(self)


def default_bootstrap_cmd() -> BootstrapCommand:
    """What starts a process unless ``spawn_procs`` is told otherwise. As Monarch's function of this name."""
    return BootstrapCommand()
