"""`compiled`: a function of tensors whose operations are recorded, and sent as one command from then on."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from loom.tensors.commands import Form, Numbered
from loom.tensors.metas import Meta
from loom.tensors.tensor import Tensor, Value

_log = logging.getLogger("loom")

WARM_UP = 1
"""Calls that are not recorded: what a function makes at its first call, such as momentum, is there then."""

MOST_TRIES = 4
"""Recordings, of which two in a row have to be the same."""

MOST_BODIES = 64
"""Recorded bodies of one function: one for each layout of its arguments."""


class Recorder:
    """The commands that are queued while it is a home's ``recorder``."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._places: dict[int, tuple[str, int]] = {each._value.id: ("given", k) for k, each in enumerate(given)}
        self._bases = {id(each._base): k for k, each in enumerate(given)}
        self._made: set[int] = set()
        self.kept: list[Tensor] = []
        """The tensors from outside that it takes, which stay as they are but for changes in place."""
        self.commands: list[tuple[Form, tuple[tuple[str, int], ...], tuple[Any, ...]]] = []
        self.changed: list[tuple[int, Value | None]] = []
        """What it changes in place: the place of an argument, or the base of a tensor from outside."""
        self.refusal = ""
        """Why it cannot be run again; empty if it can."""

    def note(self, form: Numbered, inputs: Sequence[Tensor], numbers: tuple[Any, ...], first: int) -> None:
        """Record a command."""
        known = form.form
        if known.function == ".data":
            self.refusal = "it makes a tensor of data: make it before, and give it as an argument"
        places = tuple(map(self.place, inputs))
        self.commands.append((known, places, numbers))
        for ident in range(first, first + known.outs):
            self._places[ident] = ("made", len(self._made))
            self._made.add(ident)
        if not known.outs and inputs and inputs[0]._base.id not in self._made:
            base = inputs[0]._base
            k = self._bases.get(id(base), -1)
            self.changed.append((k, None if k >= 0 else base))

    def place(self, tensor: Tensor) -> tuple[str, int]:
        """Return where a tensor comes from: an argument, the outside, or a command, and which one."""
        found = self._places.get(tensor._value.id)
        if found is None:
            found = self._places[tensor._value.id] = ("kept", len(self.kept))
            self.kept.append(tensor)
        return found


class _Body(NamedTuple):
    """A recorded function."""

    form: Numbered
    kept: list[Tensor]
    changed: list[tuple[int, Value | None]]
    results: Any
    """What it returns, with places for tensors."""
    metas: list[Meta]
    """Of the tensors that it makes and returns."""


class _Place(NamedTuple):
    kind: str
    number: int


class Compiled:
    """A function whose operations are sent as one command, when it has done the same twice.

    Arguments may be tensors, and what can be a key of a dictionary; for each layout of the tensors, and each other
    argument, it is recorded anew. Its results have no history: gradients are computed within.
    """

    def __init__(self, home: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._home = home
        self._function = function
        self._bodies: dict[Any, _Body] = {}
        self._tries: dict[Any, tuple[int, Any]] = {}
        self._watching = home.watching.version

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        home = self._home
        if home.recorder is not None:  # it is part of another one
            return self._function(*args, **kwargs)
        if self._watching != home.watching.version:  # other summaries are queued than were recorded
            self._watching = home.watching.version
            self._bodies.clear()
            self._tries.clear()
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = (
            *((each._meta, each._needs) if isinstance(each, Tensor) else each for each in args),
            *(
                (name, (each._meta, each._needs) if isinstance(each, Tensor) else each)
                for name, each in kwargs.items()
            ),
        )
        body = self._bodies.get(key)
        return self._record(key, given, args, kwargs) if body is None else self._run(body, given)

    def _run(self, body: _Body, given: list[Tensor]) -> Any:
        home = self._home
        first = home.put(
            body.form,
            [each._value.id for each in (*given, *body.kept)],
            (),
            [meta.nbytes for meta in body.metas],
        )
        for k, base in body.changed:
            (given[k]._base if base is None else base).version += 1
        made = [Tensor(home, Value(home.queue, first + n), meta) for n, meta in enumerate(body.metas)]
        sources = {"given": given, "kept": body.kept, "made": made}
        return _filled(body.results, sources)

    def _record(self, key: Any, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        tries, before = self._tries.get(key, (0, None))
        if tries < WARM_UP or tries > WARM_UP + MOST_TRIES:
            self._tries[key] = tries + 1, None
            return _detached(self._function(*args, **kwargs))
        recorder = self._home.recorder = Recorder(given)
        try:
            found = _detached(self._function(*args, **kwargs))
        finally:
            self._home.recorder = None
        returned: list[Tensor] = []
        results = _placed(found, recorder, returned)
        now = (recorder.commands, [each._value.id for each in recorder.kept], results, recorder.refusal)
        if before is not None and repr(before) == repr(now) and not recorder.refusal:
            if len(self._bodies) >= MOST_BODIES:
                self._bodies.clear()
            self._bodies[key] = self._body(recorder, len(given), results, returned)
            self._tries.pop(key, None)
        else:
            self._tries[key] = tries + 1, now
            if tries == WARM_UP + MOST_TRIES:
                why = recorder.refusal or "it does not do the same each time"
                _log.warning("%s is not compiled: %s", getattr(self, "__qualname__", "a function"), why)
        return found

    def _body(self, recorder: Recorder, given: int, results: Any, returned: list[Tensor]) -> _Body:
        """Make one form of the commands. Tensors are numbered: arguments, from outside, made by commands."""
        begins = {"given": 0, "kept": given, "made": given + len(recorder.kept)}
        steps = tuple(
            (
                form.function,
                form.args,
                form.kwargs,
                tuple(begins[kind] + n for kind, n in places),
                numbers,
                form.outs,
            )
            for form, places, numbers in recorder.commands
        )
        made = tuple(begins["made"] + recorder.place(each)[1] for each in returned)
        tensors = begins["made"]
        changed = {k if base is None else _place_of(base, recorder.kept) + given for k, base in recorder.changed}
        form = Form(".body", (steps, made, tuple(sorted(changed))), tensors=tensors, outs=len(made))
        metas = [each.meta for each in returned]
        return _Body(self._home.form(form), recorder.kept, recorder.changed, results, metas)


def _place_of(base: Value, tensors: Sequence[Tensor]) -> int:
    return next(place for place, each in enumerate(tensors) if each._base is base)


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach() if value._node is not None else value
    if isinstance(value, dict):
        return {key: _detached(each) for key, each in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (tuple, list) else value


def _placed(value: Any, recorder: Recorder, returned: list[Tensor]) -> Any:
    """Return results with places for tensors; those that commands made are counted in the order of ``returned``."""
    if isinstance(value, Tensor):
        kind, number = recorder.place(value)
        if kind == "made":
            if value._meta is None:
                recorder.refusal = "the layout of a result is not known here"
            returned.append(value)
            number = len(returned) - 1
        return _Place(kind, number)
    if isinstance(value, dict):
        return {key: _placed(each, recorder, returned) for key, each in value.items()}
    return (
        type(value)(_placed(each, recorder, returned) for each in value) if type(value) in (tuple, list) else value
    )


def _filled(value: Any, sources: Mapping[str, Sequence[Tensor]]) -> Any:
    if isinstance(value, _Place):
        return sources[value.kind][value.number]
    if isinstance(value, dict):
        return {key: _filled(each, sources) for key, each in value.items()}
    return type(value)(_filled(each, sources) for each in value) if type(value) in (tuple, list) else value
