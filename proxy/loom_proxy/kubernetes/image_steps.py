"""The steps of a pod's image that have failed.

Kubetorch's server does the steps as it starts, writes those that fail into the pod's log, and goes on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

TAIL = 10_000  # lines of a pod's log that are read
TOLD = 3  # lines of a failed step's output that are told

_LINE = re.compile(r"\b(?P<level>INFO|ERROR)\b[\W|]*(?P<text>.*)")
_RUNS = re.compile(r"Running: (?P<command>.*)")
_FAILED = re.compile(r"Failed to run command '(?P<command>.*)' with stderr:")
_INSTALLS = "$KT_PIP_INSTALL_CMD"


def steps_of(image: str) -> list[str]:
    """Return the commands of an image, given its Dockerfile. Those of pip are without the command's beginning."""
    lines = (line.strip() for line in image.splitlines())
    return [line[len("RUN ") :].removeprefix(_INSTALLS).strip() for line in lines if line.startswith("RUN ")]


def failures(log: str, steps: Sequence[str]) -> list[str]:
    """Return a text for each step that has failed in a pod, and has not been done again since."""
    found: dict[str, list[str]] = {}
    output: list[str] | None = None  # of the failed step that the lines belong to
    for level, text in _messages(log.splitlines()):
        if failed := _FAILED.match(text):
            output = found[failed["command"]] = []
        elif level == "ERROR" and output is not None:
            output.append(text)
        else:
            output = None
            if runs := _RUNS.match(text):
                found.pop(runs["command"], None)
    return [
        f"the image's step `{command:.200}` failed: {'; '.join(lines[-TOLD:]):.500}"
        for command, lines in found.items()
        if any(command.endswith(step) for step in steps)
    ]


def _messages(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        if message := _LINE.search(line):
            yield message["level"], message["text"]
