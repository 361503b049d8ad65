"""`ProcessEnd`: how a process ended, as its agent saw it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loom.terminal_text import fit_line, without_styles

KEPT_ERRORS = 8 << 10
"""Bytes of the end of a process's standard error among which the last lines are."""

_LINES, _LONGEST = 10, 300  # the last lines that are told, and the characters of one


@dataclass(frozen=True)
class ProcessEnd:
    """The end of a process."""

    signal: int | None = None
    """The signal that killed it; None if it exited, or if the machine does not tell."""
    code: int | None = None
    """The code with which it exited; None if a signal killed it, or if the machine does not tell."""
    out_of_memory: bool = False
    """True if SIGKILL ended it, and the kernel counted a process that it killed for memory."""
    last_lines: tuple[str, ...] = ()
    """The last lines of its standard error, fit for a terminal; none unless its output is captured."""

    def to_body(self) -> dict[str, object]:
        """Return the fields, as they travel and as REST has them."""
        return {**asdict(self), "last_lines": list(self.last_lines)}

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ProcessEnd:
        """Return the end that an agent has reported. Values that make no sense count as unknown."""
        number, code, lines = body.get("signal"), body.get("code"), body.get("last_lines")
        text = "\n".join(map(str, lines)) if isinstance(lines, list | tuple) else ""
        return cls(
            number if type(number) is int and 0 < number < 256 else None,
            code if type(code) is int and 0 <= code < 256 else None,
            body.get("out_of_memory") is True,
            last_lines(text[-KEPT_ERRORS:].encode(errors="replace")),
        )

    def to_row(self) -> list[Any]:
        """Return the fields in their order, as an agent reports them."""
        return list(self.to_body().values())

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> ProcessEnd:
        """Return the end that an agent has reported; fields of newer agents are ignored."""
        return cls.from_body(dict(zip(cls.__match_args__, row, strict=False)))

    @property
    def cause(self) -> str:
        """The end in a few words; "" if it is not known."""
        if self.signal is not None:
            memory = (
                ", probably out of memory: the kernel counted a process killed for that"
                if self.out_of_memory
                else ""
            )
            return f"killed by {_name(self.signal)}{memory}"
        return "" if self.code is None else f"exit code {self.code}"

    @property
    def text(self) -> str:
        """The end with the last lines; "" if nothing is known."""
        said = "\n".join(("its last lines:", *self.last_lines)) if self.last_lines else ""
        return "; ".join(part for part in (self.cause, said) if part)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_lines(data: bytes) -> tuple[str, ...]:
    """Return the last lines of an output, fit for a terminal."""
    text = without_styles(data.decode(errors="replace"))
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return tuple(fit_line(line)[:_LONGEST] for line in [line for line in lines if line][-_LINES:])
