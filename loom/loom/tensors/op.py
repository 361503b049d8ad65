"""`Op`, an operation whose layout is known here: what it calls in the cluster, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from loom.tensors.grad_modes import grad_enabled, makes_leaves
from loom.tensors.history import link, needs_grad, relink
from loom.tensors.layouts import DtypeKind, Meta, plain, plain_numbers
from loom.tensors.names import WITHOUT_GRADIENT
from loom.tensors.sending.encoding import Form, S, T
from loom.tensors.tensor import Tensor, Value

MOST_KNOWN = 65_536
"""Operations whose results are remembered, by the layouts of their operands."""

ELEMENTWISE: set[str] = set()
"""The functions that compute each element of the result by those in its place alone."""

VIEWS: set[str] = set()
"""The functions whose result has the memory of their only tensor."""

Rule = Callable[[Sequence[Meta], tuple[Any, ...], Any], "Meta | tuple[Meta | None, ...] | None"]
"""What an operation gives: of the tensors' metas, the numbers and the other arguments.

None stands for a layout that depends on elements, and is asked for when it is needed. The rule raises what torch
would raise. It looks at the numbers' types only, as its results are kept by these."""

Arguments = Callable[[int, int, Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""The arguments of the call, with holes: of how many tensors and numbers there are, and the other arguments."""


def in_order(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the tensors, the numbers, and the other arguments, pairs of a name and a value, by keyword."""
    return (*map(T, range(tensors)), *map(S, range(numbers))), dict(static)


class Op:
    """An operation.

    Args:
        function: the function's name under ``torch``, or one of the worker's.
        rule: what it gives.
        arguments: the arguments of the call.
        view: whether the result has the memory of the first input.
        changes: the function that does it in place; the method of its name with an underscore if None.
        outs: how many results it has; None if that depends on layouts.
    """

    def __init__(
        self,
        function: str,
        rule: Rule,
        arguments: Arguments = in_order,
        view: bool = False,
        changes: str | None = None,
        outs: int | None = 1,
    ) -> None:
        self.function = function
        self.name = function.removesuffix(".default").rpartition(".")[2]
        self._rule = rule
        self._arguments = arguments
        self._view = view
        if view:
            VIEWS.add(function)
        self._changes = changes or f"Tensor.{self.name}_"
        self._outs = outs

    def several(
        self, inputs: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), static: Any = ()
    ) -> tuple[Tensor, ...]:
        """Queue an operation whose rule gives several metas; return its results."""
        return self(inputs, numbers, static)  # type: ignore[return-value]

    def __call__(self, inputs: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), static: Any = ()) -> Tensor:
        """Queue it; return its result.

        Args:
            inputs: at least one.
            numbers: numbers of Python that may differ each time.
            static: other arguments, hashable, which are part of the form.
        """
        try:
            home = inputs[0]._home
            metas: tuple[Any, ...]
            idents: tuple[int, ...]
            if len(inputs) == 1:  # a comprehension would be a call of its own
                metas, idents = (inputs[0]._meta,), (inputs[0]._value.id,)
            elif len(inputs) == 2:
                one, other = inputs
                metas, idents = (one._meta, other._meta), (one._value.id, other._value.id)
            else:
                metas = tuple([each._meta for each in inputs])
                idents = tuple([each._value.id for each in inputs])
        except AttributeError:
            raise self._not_tensors(inputs) from None
        key = (self, static, metas, tuple(map(type, numbers))) if numbers else (self, static, metas)
        found = home.known.get(key)
        if found is None:
            numbers, static = plain_numbers(numbers), plain(static)
            found = self._learn(home, inputs, numbers, static)
        form, out, sizes = found
        ident = home._put(form, idents, numbers, sizes)
        if home.recorder is not None:
            home.recorder.note(form, inputs, numbers, ident)
        if type(out) is tuple:
            return tuple(  # type: ignore[return-value]
                [self._result(home, ident + place, meta, inputs) for place, meta in enumerate(out)]
            )
        return self._result(home, ident, out, inputs)

    def _result(self, home: Any, ident: int, meta: Meta | None, inputs: tuple[Tensor, ...]) -> Tensor:
        if self._view:
            first = inputs[0]
            result = Tensor(home, Value(home.queue, ident), meta, first._base)
            result._root = first._root
        else:
            result = Tensor(home, Value(home.queue, ident), meta)
        if grad_enabled.get():
            link(result, self.name, inputs)
        elif makes_leaves.get():
            make_leaf(result, inputs)
        return result

    def in_place(self, inputs: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), static: Any = ()) -> Tensor:
        """Queue it, so that its result takes the place of the first input; return that.

        Raises:
            RuntimeError: the result does not fit there, or this is a leaf whose gradient is wanted.
        """
        target = inputs[0]
        home = target._home
        numbers, static = plain_numbers(numbers), plain(static)
        check_leaf(target, self.name)
        self._check_result([each.meta for each in inputs], numbers, static)
        key = (self, "in place", static, len(inputs), tuple(map(type, numbers)))
        form = home.known.get(key)
        if form is None:
            args, kwargs = self._arguments(len(inputs), len(numbers), static)
            made = Form(self._changes, args, tuple(kwargs.items()), len(inputs), len(numbers), 0)
            form = home.known[key] = home._form(made, tuple(map(type, numbers)))
        ident = home._put(form, [each._value.id for each in inputs], numbers)
        if home.recorder is not None:
            home.recorder.note(form, inputs, numbers, ident)
        changed(target, self.name, inputs[1:])
        return target

    def _check_result(self, metas: Sequence[Meta], numbers: tuple[Any, ...], static: Any) -> None:
        """Check that the result fits into the first input."""
        out = self._rule(metas, numbers, static)
        assert isinstance(out, Meta)
        own = metas[0]
        if out.shape != own.shape:
            raise RuntimeError(
                f"output with shape {list(own.shape)} doesn't match the broadcast shape {list(out.shape)}"
            )
        if out.dtype.kind > own.dtype.kind:
            raise RuntimeError(
                f"result type {out.dtype.scalar_name} can't be cast to the desired output type "
                f"{own.dtype.scalar_name}"
            )
        if out.dtype.kind is DtypeKind.FLOAT and own.dtype.kind is DtypeKind.COMPLEX:
            raise RuntimeError(f"In-place {self.name} is not supported for complex tensors.")

    def _not_tensors(self, inputs: Sequence[Any]) -> TypeError:
        place, wrong = next((place, each) for place, each in enumerate(inputs, 1) if not isinstance(each, Tensor))
        return TypeError(f"{self.name}(): argument (position {place}) must be Tensor, not {type(wrong).__name__}")

    def _learn(self, home: Any, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any) -> Any:
        check_home(home, inputs)
        types = tuple(map(type, numbers))
        known = self._outs is None or all(each._meta is not None for each in inputs)
        metas = tuple([each.meta for each in inputs]) if known else ()
        out: Any = None
        if known:
            out = self._rule(metas, numbers, static)
        elif self._outs != 1:
            out = (None,) * (self._outs or 1)
        args, kwargs = self._arguments(len(inputs), len(numbers), static)
        given = out if isinstance(out, tuple) else (out,)
        sizes = () if self._view else tuple(0 if each is None else each.nbytes for each in given)
        made = Form(self.function, args, tuple(kwargs.items()), len(inputs), len(numbers), len(given))
        form = home._form(made, types)
        if known:
            if len(home.known) >= MOST_KNOWN:
                home.known.clear()
            home.known[(self, static, metas, types) if numbers else (self, static, metas)] = form, out, sizes
        return form, out, sizes


def check_home(home: Any, inputs: Sequence[Tensor]) -> None:
    """Check that tensors are of one mesh.

    Raises:
        RuntimeError: they are not.
    """
    for each in inputs:
        if each._home is not home:
            raise RuntimeError("Expected all tensors to be on the same mesh, but found those of two")


def check_leaf(target: Tensor, name: str) -> None:
    """Check that a tensor may be changed in place by an operation.

    Raises:
        RuntimeError: it is a leaf whose gradient is wanted, in torch's words.
    """
    if name in WITHOUT_GRADIENT:
        return
    if grad_enabled.get() and target._needs and target._node is None and not target._root.needs:
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def changed(target: Tensor, name: str, others: Sequence[Tensor]) -> None:
    """Note that a tensor was changed in place by an operation with others."""
    target._base.version += 1
    if name not in WITHOUT_GRADIENT and grad_enabled.get() and any(map(needs_grad, (target, *others))):
        meta = target._meta
        if meta is None or meta.dtype.kind >= DtypeKind.FLOAT:
            relink(target, name, others)


def make_leaf(result: Tensor, inputs: Sequence[Tensor]) -> None:
    """Make a result a leaf again, if it was computed from one: see `loom.tensors.grad_modes.no_grad`."""
    for each in inputs:
        if each._needs and each._node is None and result.meta.dtype.kind >= DtypeKind.FLOAT:
            result.requires_grad_()
            return


methods: dict[str, Callable[..., Any]] = {}
"""The operations that tensors have as methods; all of them are functions of `Tensors` too."""

functions: dict[str, Callable[..., Any]] = {}
"""Those that are only functions of `Tensors`."""

properties: dict[str, property] = {}
"""Those that are properties of tensors."""

F = TypeVar("F", bound=Callable[..., Any])


def method(function: F) -> F:
    """Make a function whose first argument is a tensor a method of tensors, and a function of `Tensors`."""
    methods[function.__name__] = function
    return function


def function(function: F) -> F:
    """Make a function of tensors a function of `Tensors`."""
    functions[function.__name__] = function
    return function
