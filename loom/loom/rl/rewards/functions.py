"""`RewardFunction`: a user's function, and how it is called, by the names of its parameters.

There are three forms:

* TRL's (https://huggingface.co/docs/trl/rewards): ``f(completions, **columns)`` gets all completions of a prompt,
  and each column of the dataset as a list of as many values. It returns a list of numbers; None is no opinion.
* verifiers' (https://github.com/willccbb/verifiers, rubrics): ``f(completion, answer, …)`` gets one completion, and
  returns a number.
* A task's own `Task.reward`, which gets prompt and completion in this order, as texts.

The last two may also be coroutine functions, as may TRL's.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loom.errors import WrongArguments
from loom.rl.prompts import Message, Prompt

MAX_TEXT = 500
"""Characters of a failure."""


@dataclass(frozen=True)
class Opinion:
    """The rewards of one completion by one function: a number, no opinion, or why there is none."""

    value: float | None = None
    failure: str = ""


@dataclass(frozen=True)
class RewardCall:
    """What a function is to judge: one completion of a prompt, or, if it wants them, all."""

    function: int
    """Its place in the list of functions."""
    prompt: Prompt
    answers: Sequence[str | Sequence[Message]]
    tokens: Sequence[Sequence[int]]


@dataclass(frozen=True)
class RewardFunction:
    """A function with its name. ``plain`` is true for a task's own `Task.reward`."""

    name: str
    function: Callable[..., Any]
    plain: bool = False

    @property
    def wants_all(self) -> bool:
        """Whether it judges all completions of a prompt together."""
        return not self.plain and "completions" in _parameters(self.function)

    @property
    def is_async(self) -> bool:
        called = self.function if inspect.isroutine(self.function) else type(self.function).__call__
        return inspect.iscoroutinefunction(called)

    def check(self, prompt: Prompt) -> None:
        """Raise `WrongArguments` if it has a parameter for which there is no value."""
        if self.plain:
            return
        known = self._arguments(RewardCall(0, prompt, ("",), ((),)))
        for name, one in _parameters(self.function).items():
            if one.kind is one.POSITIONAL_ONLY or (
                one.default is one.empty and name not in known and _is_single(one)
            ):
                raise WrongArguments(
                    f"the reward function {self.name} has the parameter {name}, and gets only {', '.join(known)}"
                )

    async def judge(self, call: RewardCall) -> list[Opinion]:
        """Return the opinion of each completion; an exception of the function is one of them all."""
        try:
            if self.plain:
                value = self.function(call.prompt.text, _as_text(call.answers[0]))
            else:
                value = self.function(**self._taken(self._arguments(call)))
            if inspect.isawaitable(value):
                value = await value
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - it is the user's, who reads it
            return [self._failed(f"raised {type(error).__name__}: {error}")] * len(call.answers)
        if not self.wants_all:
            return [self._opinion(value)]
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
            return [self._failed(f"returned {value!r:.80}, which is no list")] * len(call.answers)
        if len(value) != len(call.answers):
            text = f"returned {len(value)} rewards for {len(call.answers)} completions"
            return [self._failed(text)] * len(call.answers)
        return [self._opinion(one) for one in value]

    def _opinion(self, value: Any) -> Opinion:
        if value is None:
            return Opinion()
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            return self._failed(f"returned {value!r:.80}, which is no number")
        if not math.isfinite(number):
            return self._failed(f"returned {number}, which is no finite number")
        return Opinion(number)

    def _failed(self, text: str) -> Opinion:
        return Opinion(failure=f"{self.name} {text}"[:MAX_TEXT])

    def _arguments(self, call: RewardCall) -> dict[str, Any]:
        content, columns = call.prompt.content, call.prompt.data
        completions = [
            _as_messages(one) if call.prompt.is_chat and isinstance(one, str) else one for one in call.answers
        ]
        count = len(completions)
        if self.wants_all:
            own = {"prompts": [content] * count, "completions": completions, "completion_ids": list(call.tokens)}
            return {**{name: [value] * count for name, value in columns.items()}, **own}
        own = {"prompt": content, "completion": completions[0], "task": "", "state": {}}
        return {"answer": "", "info": dict(columns), **columns, **own}

    def _taken(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return those that the function takes."""
        parameters = _parameters(self.function)
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in parameters}


def reward_functions(functions: Sequence[Callable[..., Any]]) -> list[RewardFunction]:
    """Return functions under their own names, of which each is there once.

    Raises:
        WrongArguments: there is none, or one is no function.
    """
    if callable(functions):
        functions = [functions]
    if not functions:
        raise WrongArguments("rewards has no function")
    found: list[RewardFunction] = []
    for one in functions:
        if not callable(one):
            raise WrongArguments(f"a reward is a function, not {one!r:.80}")
        name = getattr(one, "__name__", type(one).__name__)
        taken = sum(name == each.name.partition("#")[0] for each in found)
        found.append(RewardFunction(f"{name}#{taken + 1}" if taken else name, one))
    return found


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _is_single(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _as_messages(answer: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def _as_text(answer: str | Sequence[Message]) -> str:
    """Return a text, or what the model wrote last."""
    if isinstance(answer, str):
        return answer
    return next((one["content"] for one in reversed(answer) if one["role"] == "assistant"), "")
