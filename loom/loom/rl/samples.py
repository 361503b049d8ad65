"""`Sample`: an answer to a prompt, of one turn or several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loom.rl.generation.completions import Completion
from loom.rl.prompts import Message


@dataclass(frozen=True)
class Sample:
    """An answer to a prompt, which is judged as one, and trained on turn by turn."""

    answer: str | Sequence[Message]
    """What reward functions get."""
    turns: Sequence[Completion]
    failure: str = ""
    """Why it cannot be judged."""

    @classmethod
    def of(cls, completion: Completion) -> Sample:
        """Return the answer that is one completion."""
        return cls(completion.text, (completion,))

    @property
    def tokens(self) -> list[int]:
        """The tokens of all turns."""
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def truncated(self) -> bool:
        return any(one.truncated for one in self.turns)
