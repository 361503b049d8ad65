"""Reads the Dockerfiles of `images/`: as much of their language as these use."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

FILES = [ROOT / "images" / "Dockerfile", ROOT / "images" / "Dockerfile.gpu"]


@dataclass(frozen=True)
class Step:
    """One instruction, such as ``RUN`` and what is behind it."""

    instruction: str
    text: str

    @property
    def words(self) -> list[str]:
        """The text as a list: of the JSON form, or of words."""
        return list(json.loads(self.text)) if self.text.startswith("[") else shlex.split(self.text)

    @property
    def command(self) -> list[str]:
        """What a ``HEALTHCHECK`` runs."""
        return list(json.loads(self.text.partition("CMD ")[2]))


def read(path: Path) -> list[Step]:
    """The instructions of a Dockerfile, in order."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [Step(*line.split(maxsplit=1)) for line in whole.splitlines() if line.strip()]


def only(steps: list[Step], instruction: str) -> Step:
    """The one instruction of a kind."""
    (found,) = [step for step in steps if step.instruction == instruction]
    return found


def arguments(steps: list[Step]) -> dict[str, str]:
    """The defaults of the build arguments."""
    pairs = (step.text.partition("=") for step in steps if step.instruction == "ARG")
    return {name: value for name, _, value in pairs}


def base(steps: list[Step]) -> str:
    """The image that is built on, as ``FROM`` names it."""
    name = only(steps, "FROM").text
    for argument, value in arguments(steps).items():
        name = name.replace(f"${{{argument}}}", value)
    return name
