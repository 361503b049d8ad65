"""`compiled`: a function of tensors whose operations are recorded, and sent as one command from then on."""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

from loom.errors import NotSupported
from loom.tensors.grad_modes import grad_enabled, grad_mode
from loom.tensors.history import link, needs_grad
from loom.tensors.layouts import Meta
from loom.tensors.sending.encoding import Form, Numbered
from loom.tensors.tensor import PRESENT, Tensor, Value

_log = logging.getLogger("loom")

WARM_UP = 1
"""Calls that are not recorded: what a function makes at its first call, such as momentum, is there then."""

MOST_TRIES = 4
"""Recordings, of which two in a row have to be the same."""

MOST_BODIES = 64
"""Recorded bodies of one function: one for each layout of its arguments."""

_OF_GRADIENTS = frozenset((".backward", ".retain_grad", ".seed", ".set_grad"))
"""Commands without results that change no elements."""

_TOUCHING = frozenset((".backward", ".grad_of", ".set_grad"))
"""Commands after which a gradient is there, or not."""

_OUTSIDE = frozenset(
    (*_OF_GRADIENTS, ".forget", ".grad_of", ".grads", ".keep", ".requires_grad", ".reset", ".threads", ".watch")
)
"""Commands that a hook may not give."""


class Recorder:
    """The commands that are queued while it is a home's ``recorder``.

    Args:
        given: the tensors that the function is given.
        mode: whether it begins with a grad mode that builds a graph.
        dry: whether the commands are only noted, and not sent: then whatever cannot be noted fails at its line.
    """

    def __init__(self, given: Sequence[Tensor], mode: bool, dry: bool = False) -> None:
        self._places: dict[int, tuple[str, int]] = {each._value.id: ("given", k) for k, each in enumerate(given)}
        self._bases = {id(each._base): k for k, each in enumerate(given)}
        self._made: set[int] = set()
        self._mode = mode
        self.dry = dry
        self.queue: deque[Any] = deque()
        """Of a dry one, the tensors whose handles died."""
        self._next = -1
        self.kept: list[Tensor] = []
        """The tensors from outside that it takes, which stay as they are but for changes in place."""
        self.commands: list[tuple[Form, tuple[tuple[str, int], ...], tuple[Any, ...]]] = []
        self.changed: list[tuple[int, Value | None]] = []
        """The tensor that it changes in place: the place of an argument, or the base of a tensor from outside."""
        self.touched: dict[int, tuple[Tensor, bool]] = {}
        """The tensors whose gradients it makes, reads or forgets, and whether they had one before."""
        self.refusal = ""
        """Why it cannot be run again; empty if it can."""

    def refuse(self, why: str) -> None:
        """Note why it cannot be run again.

        Raises:
            NotSupported: it is dry.
        """
        if self.dry:
            raise NotSupported(f"a hook's operations are recorded when it is registered, and {why}")
        self.refusal = why

    def put(self, form: Numbered, *command: Any) -> int:
        """Return the ids of results of a command that is not sent: they count down."""
        self._next -= form.outs
        return self._next

    def note(self, form: Numbered, inputs: Sequence[Tensor], numbers: tuple[Any, ...], first: int) -> None:
        """Record a command."""
        known = form.form
        if known.function == ".data":
            self.refuse("it makes a tensor of data: make it before, and give it as an argument")
        if (self.dry and known.function in _OUTSIDE) or known.function == ".hook":
            self.refuse(f"it does what only a program does: {known.function.lstrip('.')}")
        if (mode := grad_enabled.get()) is not self._mode:
            self._mode = mode
            self.commands.append((Form(".grad_mode", (mode,), outs=0), (), ()))
        for each in inputs[1:] if known.function == ".backward" else inputs[:1]:
            if known.function in _TOUCHING:
                self.touched.setdefault(id(each), (each, each._grad is not None))
        places = tuple(map(self.place, inputs))
        self.commands.append((known, places, numbers))
        for ident in range(first, first + known.outs):
            self._places[ident] = ("made", len(self._made))
            self._made.add(ident)
        if not known.outs and inputs and known.function not in _OF_GRADIENTS:
            targets = inputs if known.function == ".step" else inputs[:1]
            for base in [each._base for each in targets if each._base.id not in self._made]:
                if self.dry or (mode and any(map(needs_grad, inputs))):
                    self.refuse("it changes a tensor from outside in place")
                k = self._bases.get(id(base), -1)
                self.changed.append((k, None if k >= 0 else base))

    def place(self, tensor: Tensor) -> tuple[str, int]:
        """Return where a tensor comes from: an argument, the outside, or a command, and which one."""
        found = self._places.get(tensor._value.id)
        if found is None:
            found = self._places[tensor._value.id] = ("kept", len(self.kept))
            self.kept.append(tensor)
        return found

    def steps(self, given: int) -> tuple[Any, ...]:
        """Return the commands as they travel. Tensors are numbered: arguments, from outside, made by commands."""
        begins = {"given": 0, "kept": given, "made": given + len(self.kept)}
        return tuple(
            (
                form.function,
                form.args,
                form.kwargs,
                tuple(begins[kind] + n for kind, n in places),
                numbers,
                form.outs,
            )
            for form, places, numbers in self.commands
        )


class Hook:
    """A function that the workers call with the gradients of a tensor, until `remove`."""

    def __init__(self, tensor: Tensor, number: int, form: Numbered, kept: list[Tensor]) -> None:
        self._home = tensor._home
        self._tensor = ref(tensor)
        self.number = number
        self._form = form
        self._kept = kept

    def register(self) -> None:
        """Let the workers call it from here on."""
        tensor = self._tensor()
        if tensor is None:
            self._home._hooks.pop(self.number, None)
        else:
            self._home._queue(self._form, (tensor, *self._kept))

    def remove(self) -> None:
        """Let the workers call it no more."""
        if self._home._hooks.pop(self.number, None) is not None:
            self._home._command(".unhook", (), self.number)


def record_hook(home: Any, tensor: Tensor, function: Callable[[Tensor], Tensor | None], number: int) -> Hook:
    """Call a function with a gradient that stands for all of a tensor's; return the hook that does the same.

    Raises:
        NotSupported: it reads a tensor, changes one from outside, or keeps a gradient.
    """
    if home._recorder is not None:
        home._recorder.refuse("it registers a hook: register it outside")
    queue: deque[Any] = deque()
    gradient = Tensor(home, Value(queue, 0), tensor.meta)
    recorder = Recorder([gradient], mode=False, dry=True)
    recorder.queue = queue
    with home._recording(recorder), grad_mode(False):
        found = function(gradient)
    made: tuple[int, ...] = ()
    if found is not None:
        if not isinstance(found, Tensor):
            raise TypeError(f"a hook returns a tensor or None, not {type(found).__name__}")
        kind, place = recorder.place(found)
        begins = {"given": 0, "kept": 1, "made": 1 + len(recorder.kept)}
        made = (begins[kind] + place,)
    results = sum(form.outs for form, *_ in recorder.commands)
    steps = recorder.steps(1)
    del found, gradient
    if len(queue) < results + 1:  # a handle of what exists only in the workers was kept
        raise NotSupported(
            "a hook's operations are recorded when it is registered, and it keeps its gradient: return it instead"
        )
    kept = recorder.kept
    form = Form(".hook", (number, steps, made), tensors=1 + len(kept), outs=0)
    return Hook(tensor, number, home._form(form), kept)


class _Body(NamedTuple):
    """A recorded function."""

    form: Numbered
    kept: list[Tensor]
    changed: list[tuple[int, Value | None]]
    touched: list[_Touched]
    results: Any
    """Its return value, with places for tensors."""
    made: list[tuple[Meta, bool]]
    """The layouts of the tensors that it makes and returns, and whether gradients pass through them."""


class _Touched(NamedTuple):
    """A tensor whose gradient a recorded function makes, or forgets."""

    place: tuple[str, int]
    before: bool
    """True if it had one before."""
    after: Any
    """Its layout afterwards."""


class _Place(NamedTuple):
    kind: str
    number: int


class Compiled:
    """A function whose operations are sent as one command, when it has done the same twice.

    Arguments may be tensors, and what can be a key of a dictionary; for each layout of the tensors, each other
    argument and each grad mode it is recorded anew. Each run builds a graph of its own, as the function would.
    """

    def __init__(self, home: Any, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._home = home
        self._function = function
        self._bodies: dict[Any, _Body] = {}
        self._tries: dict[Any, tuple[int, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._home._recorder is not None:  # it is part of another one
            return self._function(*args, **kwargs)
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        key = (
            grad_enabled.get(),
            *map(_key, args),
            *((name, _key(each)) for name, each in kwargs.items()),
        )
        body = self._bodies.get(key)
        if body is None:
            return self._record(key, given, args, kwargs)
        sources = {"given": given, "kept": body.kept}
        if any((_at(sources, each)._grad is not None) is not each.before for each in body.touched):
            return self._function(*args, **kwargs)
        return self._run(body, given, sources)

    def _run(self, body: _Body, given: list[Tensor], sources: dict[str, list[Tensor]]) -> Any:
        home = self._home
        inputs = [*given, *body.kept]
        sizes = [meta.nbytes for meta, _ in body.made]
        first = home._put(body.form, [each._value.id for each in inputs], (), sizes)
        for k, base in body.changed:
            (given[k]._base if base is None else base).version += 1
        for touched in body.touched:
            _at(sources, touched)._grad = touched.after
        made = [Tensor(home, Value(home._pending, first + n), meta) for n, (meta, _) in enumerate(body.made)]
        for each, (_, needs) in zip(made, body.made, strict=True):
            if needs:
                link(each, getattr(self, "__name__", "compiled"), inputs)
        return _filled(body.results, {**sources, "made": made})

    def _record(self, key: Any, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        tries, before = self._tries.get(key, (0, None))
        if tries < WARM_UP or tries > WARM_UP + MOST_TRIES:
            self._tries[key] = tries + 1, None
            return self._function(*args, **kwargs)
        recorder = Recorder(given, grad_enabled.get())
        with self._home._recording(recorder):
            found = self._function(*args, **kwargs)
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
        """Make one form of the commands."""
        tensors = given + len(recorder.kept)
        made = tuple(tensors + recorder.place(each)[1] for each in returned)
        changed = {k if base is None else _place_of(base, recorder.kept) + given for k, base in recorder.changed}
        steps = recorder.steps(given)
        form = Form(".body", (steps, made, tuple(sorted(changed))), tensors=tensors, outs=len(made))
        touched = [
            _Touched(place, before, _after(tensor))
            for tensor, before in recorder.touched.values()
            if (place := recorder.place(tensor))[0] != "made"
        ]
        metas = [(each.meta, needs_grad(each)) for each in returned]
        return _Body(self._home._form(form), recorder.kept, recorder.changed, touched, results, metas)


def _key(value: Any) -> Any:
    return (value._meta, needs_grad(value)) if isinstance(value, Tensor) else value


def _at(sources: Mapping[str, Sequence[Tensor]], touched: _Touched) -> Tensor:
    kind, number = touched.place
    return sources[kind][number]


def _after(tensor: Tensor) -> Any:
    return PRESENT if isinstance(tensor._grad, Tensor) else tensor._grad


def _place_of(base: Value, tensors: Sequence[Tensor]) -> int:
    return next(place for place, each in enumerate(tensors) if each._base is base)


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
