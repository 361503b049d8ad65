"""`Prompt`: what is completed, and what its reward needs to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loom.errors import WrongArguments

Message = Mapping[str, str]
"""A message of a chat: ``role`` and ``content``."""


@dataclass(frozen=True)
class Prompt:
    """A prompt, and what its reward needs to know."""

    content: str | Sequence[Message]
    """A text, or the messages of a chat."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Further values by name, such as ``answer``: reward functions get them."""

    @classmethod
    def of(cls, given: str | Sequence[Message] | Prompt) -> Prompt:
        """Return a prompt of what a task gives.

        Raises:
            WrongArguments: it is neither a text nor messages.
        """
        found = given if isinstance(given, Prompt) else cls(given)
        content = found.content
        if isinstance(content, str):
            return found
        if not isinstance(content, Sequence) or not content or not all(_is_message(one) for one in content):
            raise WrongArguments(f"a prompt is a text, or messages with role and content, not {content!r:.80}")
        return found

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.content, str)

    @property
    def text(self) -> str:
        """The text, or that of the last message."""
        return self.content if isinstance(self.content, str) else self.content[-1]["content"]


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(one), str) for one in ("role", "content"))
