"""An image: this machine's file system, and what it says of how its containers start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Image"]


@dataclass(frozen=True)
class Image:
    """What an image says.

    Args:
        environment: of its containers, such as PATH.
        working_dir: where they start, which this machine may lack, and the home of the image's user. Without one, a
            pod has a folder of its own for both.
        user: their user and group id, unless a manifest has others.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    user: int = 0
