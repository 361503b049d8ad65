"""`DatasetTask`: prompts out of a file, and reward functions."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loom.errors import WrongArguments
from loom.extras import require
from loom.rl.prompts import Message, Prompt
from loom.rl.rewards.functions import RewardFunction, reward_functions
from loom.rl.task import Task

Row = Mapping[str, Any]


class DatasetTask(Task):
    """A task whose prompts are the rows of a dataset.

    Args:
        path: of JSON lines (``.jsonl``), a Parquet file, or a folder that ``datasets`` has saved, where the
            orchestrator runs.
        rewards: the reward functions, in the forms of TRL or verifiers. They get the row's columns by name.
        weights: of each function; 1 by default.
        prompt: the column with the prompt, a text or messages; or a function that makes it of a row.
        system: a message that is put before each prompt, which becomes a chat by that.
        evaluation: the path of the rows of an evaluation.
        seed: of the order of rows, which is another one in each pass.

    Raises:
        WrongArguments: a reward is no function, or there are not as many weights.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rewards: Sequence[Callable[..., Any]],
        *,
        weights: Sequence[float] | None = None,
        prompt: str | Callable[[Row], str | Sequence[Message]] = "prompt",
        system: str = "",
        evaluation: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        self._path = str(path)
        self._rewards = reward_functions(rewards)
        self._weights = [1.0] * len(self._rewards) if weights is None else [float(one) for one in weights]
        if len(self._weights) != len(self._rewards):
            raise WrongArguments(f"{len(self._weights)} weights for {len(self._rewards)} reward functions")
        self._prompt = prompt
        self._system = system
        self._evaluation = None if evaluation is None else str(evaluation)
        self._seed = seed
        self._rows: list[Row] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_rows": None}  # each process reads for itself what it needs

    def prompts(self, step: int, n: int) -> list[Prompt]:
        """Return rows number ``step * n`` to ``step * n + n`` of all passes, one after the other.

        Raises:
            WrongArguments: the file has no rows, or they have no prompt.
        """
        if self._rows is None:
            self._rows = read_rows(self._path)
        rows = self._rows
        orders: dict[int, list[int]] = {}
        found = []
        for number in range(step * n, step * n + n):
            turn, place = divmod(number, len(rows))
            if turn not in orders:
                orders[turn] = random.Random(f"{self._seed}.{turn}").sample(range(len(rows)), len(rows))
            found.append(self._made(self._path, rows[orders[turn][place]]))
        return found

    def rewards(self) -> Sequence[RewardFunction]:
        return self._rewards

    def weights(self) -> Sequence[float]:
        return self._weights

    def evaluation(self) -> Sequence[Prompt]:
        if self._evaluation is None:
            return ()
        return [self._made(self._evaluation, row) for row in read_rows(self._evaluation)]

    def _made(self, path: str, row: Row) -> Prompt:
        if not isinstance(self._prompt, str):
            content = self._prompt(row)
        elif self._prompt in row:
            content = row[self._prompt]
        else:
            raise WrongArguments(f"{path} has no column {self._prompt}; it has {', '.join(row)}")
        if self._system:
            own = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
            content = [{"role": "system", "content": self._system}, *own]
        return Prompt.of(Prompt(content, row))


def read_rows(path: str) -> list[Row]:
    """Return the rows of a dataset.

    Raises:
        WrongArguments: the file is not there, has no rows, or is none of the kinds; the text says which line.
        MissingDependency: the library for its kind is not installed.
    """
    where = Path(path)
    if not where.exists():
        raise WrongArguments(f"there is no dataset {path} on the orchestrator's host")
    if where.is_dir():
        rows = list(_saved(where))
    elif where.suffix == ".parquet":
        rows = list(_parquet([where]))
    elif where.suffix in (".jsonl", ".ndjson", ".json"):
        rows = list(_lines(where))
    else:
        raise WrongArguments(f"{path} is no dataset: JSON lines, Parquet, or a folder of `datasets.save_to_disk`")
    if not rows:
        raise WrongArguments(f"the dataset {path} has no rows")
    return rows


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise WrongArguments(f"line {number} of {path} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise WrongArguments(f"line {number} of {path} is no JSON object: {line:.80}")
            yield row


def _parquet(paths: Sequence[Path]) -> Iterator[Row]:
    require({"pyarrow": "pyarrow"}, "a Parquet dataset", "parquet")
    from pyarrow import ArrowException, parquet

    for path in paths:
        try:
            yield from parquet.read_table(path).to_pylist()
        except (ArrowException, OSError) as error:
            raise WrongArguments(f"{path} is no Parquet file: {error}") from None


def _saved(folder: Path) -> Iterator[Row]:
    if parts := sorted(folder.glob("*.parquet")):
        yield from _parquet(parts)
        return
    if not (folder / "dataset_info.json").is_file():
        inner = sorted(one.parent.name for one in folder.glob("*/dataset_info.json"))
        more = f"; it has the splits {', '.join(inner)}: name one of these folders" if inner else ""
        raise WrongArguments(f"{folder} is no folder of `datasets.save_to_disk`{more}")
    require({"pyarrow": "pyarrow"}, "a saved dataset", "parquet")
    from pyarrow import ArrowException, ipc

    for part in sorted(folder.glob("*.arrow")):
        try:
            with part.open("rb") as file:
                yield from ipc.open_stream(file).read_all().to_pylist()
        except (ArrowException, OSError) as error:
            raise WrongArguments(f"{part} cannot be read: {error}") from None
