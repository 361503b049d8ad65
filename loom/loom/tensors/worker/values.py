"""The tensors of one worker by id, the running of commands on them, and how values travel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from loom.tensors.layouts import DType
from loom.tensors.sending.encoding import CommandDecoder, Constant, Failure, Form, S, T
from loom.tensors.worker import functions
from loom.tensors.worker.layouts import dtype_name, flat, layout
from loom.tensors.worker.summaries import Watched

Elements = tuple[str, tuple[int, ...], bytes]


def elements(value: Any) -> Elements | Failure:
    """Return a tensor's dtype, shape and bytes in row-major order; a failure as it is."""
    if isinstance(value, Failure):
        return value
    plain = value.detach().resolve_conj().resolve_neg().cpu()
    kind = dtype_name(plain)
    if plain.dtype is torch.bfloat16:
        plain = plain.view(torch.int16)  # numpy has no bfloat16
    return kind, tuple(plain.shape), plain.numpy(force=True).tobytes()


class PreparedCall(NamedTuple):
    """A command as it runs."""

    call: Callable[..., Any]
    tensors: tuple[int, ...]
    numbers: Any
    """Its numbers, if they are the same each time."""
    varying: int
    """Numbers that come along."""
    outs: int
    changes: Sequence[int]
    """The places of the tensors that it changes."""
    learns: bool


class Held(dict[int, Any]):
    """Tensors by id, and what those are that are not there: no id at all, or gone for a reason."""

    gone: Failure | None = None

    def __missing__(self, ident: int) -> Any:
        if self.gone is None:
            raise KeyError(ident)
        return self.gone


class Values:
    """The tensors of one worker by id."""

    def __init__(self, device: torch.device, kept: dict[str, Any], group: Any = None, answers: bool = True) -> None:
        self.device = device
        self.sharding = _sharding(group)
        """The calls where tensors may be spread over several processes; None where there is one."""
        self._answers = answers
        self.kept = kept
        """The tensors with a name, which another program may take over, and whether they require gradients."""
        self.watched = Watched()
        self.tensors = Held()
        self.data: Iterator[bytes] = iter(())
        """The data of the batch that runs, in the order in which its commands take it."""
        self.grad_mode = True
        """True if commands build a graph, until one says otherwise."""
        self.made: dict[str, Any] = {}
        """Modules without elements, and optimizers without parameters: see `loom.tensors.worker.functions`."""
        self.handles: dict[Any, Any] = {}
        """The hooks of tensors, by their number, or by the name under which a tensor is watched."""
        self._told: list[tuple[int, list[Any]]] = []
        """The layouts that the program does not know yet, by the id of the first result of their command."""
        self._decoder = CommandDecoder()
        self._calls: list[Callable[..., Any]] = []
        self._steps: list[PreparedCall] = []
        self._buried: Held | None = None
        """The tensors of a GPU that computes no more. To free them there could end this process."""

    def run(
        self, batch: int, commands: bytes, data: Sequence[bytes]
    ) -> tuple[list[Failure], list[tuple[int, list[Any]]]]:
        """Run a batch; return the commands that failed first, and layouts that were asked for.

        A command that depends on a failed one fails with the same cause.
        """
        now, anew, sequence, numbers = self._decoder.take(commands)
        self._prepare(anew)
        self.data = iter(data)
        failures: list[Failure] = []
        with torch.set_grad_enabled(self.grad_mode):
            for place, number in enumerate(sequence):
                call, near, fixed, varying, outs, changes, learns = self._steps[number]
                if call is _free:
                    (ident,) = near
                    self.tensors.pop(now + ident if ident < 0 else ident, None)
                    continue
                idents = [now + ident if ident < 0 else ident for ident in near]
                values = fixed or ([next(numbers) for _ in range(varying)] if varying else ())
                tensors = self.tensors
                try:
                    result = call(list(map(tensors.__getitem__, idents)), values)
                    if outs == 1:
                        tensors[now] = result
                    elif outs:
                        tensors.update(zip(range(now, now + outs), result, strict=True))
                except Exception as error:  # noqa: BLE001 - it is told to whoever reads
                    failure = self._failed(batch, place, number, idents, error)
                    if failure.batch in (batch, -1) and failure.place in (place, -1):
                        failures.append(failure)
                    self.tensors.update(dict.fromkeys(range(now, now + outs), failure))
                    spoiled = getattr(error, "loom_spoiled", dict.fromkeys(changes, failure))
                    for k, why in spoiled.items():
                        self._spoil(idents[k], why)
                if learns:
                    self._tell(now, outs)
                now += outs
            self.grad_mode = torch.is_grad_enabled()
        told, self._told = self._told, []
        return failures, told

    def _tell(self, first: int, outs: int) -> None:
        """Note the layouts of results. A result without strides, such as a sparse one, whoever looks is told of."""
        found = [self.tensors[each] for each in range(first, first + outs)]
        if all(isinstance(each, torch.Tensor) for each in found):
            with contextlib.suppress(RuntimeError):
                self._told.append((first, [layout(each) for each in found]))

    def _failed(self, batch: int, place: int, number: int, idents: Sequence[int], error: Exception) -> Failure:
        """Return why a command failed: an operand that had failed, or an error."""
        if self.sharding is not None:
            self.sharding.failed(error)
        failure = next((each for each in map(self._known, idents) if isinstance(each, Failure)), None)
        if failure is None:
            failure = Failure(batch, place, _like(error), self._text(number, error, idents))
            failure = self._without_gpu(error, failure) or failure
        for leaf in getattr(error, "loom_leaves", ()):
            functions.spoil_gradient(self, leaf, failure)
        return failure

    def _spoil(self, ident: int, failure: Failure) -> None:
        """Put a failure in the place of a tensor that was not changed as it should be, and of its views."""
        target = self.tensors.get(ident)
        self.tensors[ident] = failure
        if isinstance(target, torch.Tensor) and (memory := _memory(target)) is not None:
            for other, value in self.tensors.items():
                if isinstance(value, torch.Tensor) and _memory(value) == memory:
                    self.tensors[other] = failure

    def _known(self, ident: int) -> Any:
        """Return a tensor, or why there is none; None if there never was one."""
        return self.tensors.get(ident, self.tensors.gone)

    def begin_at(self, first: int) -> None:
        """Expect commands of which the first result has this id."""
        self._decoder = CommandDecoder(first)

    def read(
        self, batch: int, commands: bytes | None, data: Sequence[bytes], idents: Sequence[int], what: str
    ) -> tuple[tuple[list[Failure], list[Any]], list[Any]]:
        """Run a batch, if there is one; return what `run` does, and what was asked of tensors.

        Args:
            what: the ``elements``, the ``layout``, the ``placements``, the ``value`` of what is no tensor, the
                ``bytes`` in this process, or whether there is a ``grad``.
        """
        failures, told = ([], []) if commands is None else self.run(batch, commands, data)
        if not idents and self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except torch.AcceleratorError as error:
                if (gone := self._without_gpu(error)) is not None:
                    failures.append(gone)
        found = [self._read(ident, what) for ident in idents]
        return (failures, told), found if self._answers or what == "bytes" else []

    def _read(self, ident: int, what: str) -> Any:
        try:
            return self._given(self.tensors[ident], what)
        except (RuntimeError, TypeError, MemoryError) as error:
            if self.sharding is not None:
                self.sharding.failed(error)
            return self._without_gpu(error) or Failure(-1, -1, _like(error), f"it cannot be read: {error}")

    def _without_gpu(self, error: Exception, failure: Failure | None = None) -> Failure | None:
        """Return why there are no tensors any more, if an error means that the GPU has ended this process's work.

        A GPU notices late that an index is out of range, say, and then refuses all that follows. So nobody knows
        which operation it was, but where each is waited for.
        """
        if not isinstance(error, torch.AcceleratorError):
            return None
        if self._buried is None:
            try:
                torch.cuda.synchronize(self.device)
            except torch.AcceleratorError:
                pass
            else:
                return None  # an error of one operation
            if failure is None or os.environ.get("CUDA_LAUNCH_BLOCKING") != "1":
                failure = Failure(-1, -1, "RuntimeError", str(error).strip().partition("\n")[0] + _UNKNOWN)
            self._buried, self.tensors = self.tensors, Held()
            self.tensors.gone = failure._replace(text=failure.text + _NO_GPU)
        return self.tensors.gone

    def _given(self, value: Any, what: str) -> Any:
        if isinstance(value, Failure):
            return value
        match what:
            case "layout":
                return layout(value)
            case "value":
                return value
            case "grad":
                return functions.gradient(value) is not None or hasattr(value, "loom_failed")
            case "placements":
                return self.sharding.placements_of(value) if self.sharding is not None else ()
            case "bytes":
                return self.sharding.bytes_of(value) if self.sharding is not None else value.nbytes
        return elements(value if self.sharding is None else self.sharding.whole(value))

    def _prepare(self, anew: bool) -> None:
        """Make steps of the new commands."""
        decoder = self._decoder
        if anew:
            self._calls.clear()
            self._steps.clear()
        self._calls += [self._call(form) for form in decoder.forms[len(self._calls) :]]
        for form, *rest in decoder.commands[len(self._steps) :]:
            known = decoder.forms[form]
            ids = tuple(rest[: known.tensors])
            fixed = list(rest[known.tensors]) if len(rest) > known.tensors else None
            changes: Sequence[int] = (0,) if ids and (not known.outs or known.function == ".first_step") else ()
            if known.function in (".body", ".step"):
                changes = known.args[2] if known.function == ".body" else range(len(known.args[0]))
            if known.function in functions.CHANGING_NOTHING:
                changes = ()
            call = self._calls[form]
            self._steps.append(PreparedCall(call, ids, fixed, known.numbers, known.outs, changes, known.learns))

    def _call(self, form: Form) -> Callable[..., Any]:
        """Return a function of the tensors and the numbers of a command."""
        name = form.function
        if name == ".free":
            return _free
        if name == ".body":
            return self._body(form)
        if name == ".hook":
            return self._hook(form)
        if name in (".flat", ".structure"):
            return flat(self._call(form._replace(function=form.args[0], args=form.args[1:])), name == ".structure")
        call = self._simple(form)
        return call if self.sharding is None else self.sharding.wrapped(form, call)

    def _simple(self, form: Form) -> Callable[..., Any]:
        name = form.function
        # Constant parts are made once; varying parts are put in their places each time.
        keys = [key for key, _ in form.kwargs]
        given = [*form.args, *[value for _, value in form.kwargs]]
        many = len(form.args)
        try:
            function = functions.own(self, name) if name.startswith(".") else functions.torch_function(name)
            made = [value if _has_holes(value) else self._filled(value, (), ()) for value in given]
        except Exception as error:  # noqa: BLE001 - each command with this form fails
            return _raiser(error)
        tensors_at = [(at, value.place) for at, value in enumerate(given) if type(value) is T]
        numbers_at = [(at, value.place) for at, value in enumerate(given) if type(value) is S]
        holes = [
            (at, value) for at, value in enumerate(given) if type(value) in (tuple, list) and _has_holes(value)
        ]
        if tensors_at == [(at, at) for at in range(many)] and not numbers_at and not holes:
            kwargs = dict(zip(keys, made[many:], strict=True))
            if not kwargs:
                return lambda tensors, numbers: function(*tensors)
            return lambda tensors, numbers: function(*tensors, **kwargs)

        def call(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            filled = made.copy()
            for at, place in tensors_at:
                filled[at] = tensors[place]
            for at, place in numbers_at:
                filled[at] = numbers[place]
            for at, value in holes:
                filled[at] = self._filled(value, tensors, numbers)
            return function(*filled[:many], **dict(zip(keys, filled[many:], strict=True)))

        return call

    def _body(self, form: Form) -> Callable[..., Any]:
        """Return what runs the commands of a compiled function. Its own tensors go when nothing needs them."""
        given, made = form.tensors, form.args[1]
        steps: list[tuple[Form, Callable[..., Any], tuple[int, ...], list[Any], list[int]]] = []
        last: dict[int, int] = {}
        count = given
        for place, (function, args, kwargs, tensors, numbers, outs) in enumerate(form.args[0]):
            inner = Form(function, args, kwargs, len(tensors), len(numbers), outs)
            steps.append((inner, self._call(inner), tensors, list(numbers), []))
            last.update(dict.fromkeys((*tensors, *range(count, count + outs)), place))
            count += outs
        for tensor, place in last.items():
            if tensor >= given and tensor not in made:
                steps[place][4].append(tensor)

        def run(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
            local = list(tensors)
            mode = torch.is_grad_enabled()
            try:
                walk(local)
            finally:
                torch.set_grad_enabled(mode)
            results = [local[place] for place in made]
            return results[0] if len(results) == 1 else results

        def walk(local: list[Any]) -> None:
            for inner, call, places, fixed, done in steps:
                values = [local[place] for place in places]
                try:
                    result = call(values, fixed)
                except Exception as error:
                    error.loom_operation = _named(inner, values, error)  # type: ignore[attr-defined]
                    error.__dict__.pop("loom_spoiled", None)
                    raise
                if inner.outs == 1:
                    local.append(result)
                elif inner.outs:
                    local.extend(result)
                for place in done:
                    local[place] = None

        return run

    def _hook(self, form: Form) -> Callable[..., Any]:
        """Return what registers a recorded function as a hook of the first tensor."""
        number, steps, made = form.args
        body = self._body(Form(".body", (steps, made, ()), tensors=form.tensors, outs=len(made)))

        def register(tensors: Sequence[Any], numbers: Sequence[Any]) -> None:
            tensor, *kept = tensors

            def hook(grad: Any) -> Any:
                found = body([grad, *kept], ())
                return found if made else None

            self.handles[number] = tensor.register_hook(hook)

        return register

    def _filled(self, value: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
        kind = type(value)
        if kind is T:
            return tensors[value.place]
        if kind is S:
            return numbers[value.place]
        if kind in (tuple, list):
            return kind([self._filled(each, tensors, numbers) for each in value])
        return self._made(value)

    def _made(self, value: Any) -> Any:
        return getattr(torch, value.name) if isinstance(value, (DType, Constant)) else value

    def _text(self, number: int, error: Exception, idents: Sequence[int]) -> str:
        form = self._decoder.forms[self._decoder.commands[number][0]]
        found: str | None = getattr(error, "loom_operation", None)
        return found or _named(form, [self.tensors.get(ident) for ident in idents], error)


_UNKNOWN = (
    ": an operation before had an input of which a GPU notices late that it is wrong, such as an index out of "
    "range. Processes with CUDA_LAUNCH_BLOCKING=1 in their environment tell which one it was"
)
_NO_GPU = ". The GPU computes nothing more for this process: go on from a checkpoint with lt.restore()"


def _memory(tensor: torch.Tensor) -> Any:
    """Return what tells the memory of a tensor, or of this process's part of it; None if it has none."""
    part = getattr(tensor, "_local_tensor", tensor)
    return part.untyped_storage()._cdata if part.layout is torch.strided else None


def _like(error: Exception) -> str:
    """Return the name of an error's built-in class."""
    return next(each.__name__ for each in type(error).__mro__ if each.__module__ == "builtins")


def _sharding(group: Any) -> Any:
    if group is None:
        return None
    from loom.tensors.worker.sharding import Sharding

    return Sharding(group)


def _named(form: Form, values: Sequence[Any], error: Exception) -> str:
    """Return an error with its operation and the shapes."""
    lines = str(error).strip().splitlines() or [""]
    return f"{form.name}({', '.join(map(_shape_of, values))}): {type(error).__name__}: {lines[0]}"


def _free(tensors: Any, numbers: Any) -> None:
    """Forget a tensor."""


def _raiser(error: Exception) -> Callable[..., Any]:
    def fail(tensors: Any, numbers: Any) -> None:
        raise error

    return fail


def _has_holes(value: Any) -> bool:
    return isinstance(value, (T, S)) or (isinstance(value, (tuple, list)) and any(map(_has_holes, value)))


def _shape_of(value: Any) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if hasattr(value, "dtype") else "?"
