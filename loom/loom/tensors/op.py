"""`Op`, an operation: what it calls in the cluster, what it gives, and how its gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from loom.tensors.autograd import Backward, Node, of_part
from loom.tensors.commands import Form, S, T
from loom.tensors.dtypes import Kind, plain, plain_numbers
from loom.tensors.grad_modes import grad_enabled
from loom.tensors.metas import Meta
from loom.tensors.tensor import Tensor, Value
from loom.tensors.views import current, give_history, origin_of, whole_of

MOST_KNOWN = 65_536
"""Operations whose results are remembered, by the layouts of their operands."""

ELEMENTWISE: set[str] = set()
"""The functions that compute each element of the result by those in its place alone."""

VIEWS: set[str] = set()
"""The functions whose result has the memory of their only tensor."""

NO_COMPLEX: dict[str, type[Exception]] = {}
"""The operations, by name, that torch does not have for complex numbers, and the error that it raises."""

Rule = Callable[[Sequence[Meta], tuple[Any, ...], Any], "Meta | tuple[Meta | None, ...] | None"]
"""What an operation gives: of the tensors' metas, the numbers and the other arguments.

None stands for a layout that depends on elements, and is asked for when it is needed; if there is a gradient, the
dtype of the first result is the first tensor's. The rule raises what torch would raise. It looks at the numbers'
types only, as its results are kept by these."""

Arguments = Callable[[int, int, Any], tuple[tuple[Any, ...], dict[str, Any]]]
"""The arguments of the call, with holes: of how many tensors and numbers there are, and the other arguments."""


def in_order(tensors: int, numbers: int, static: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the tensors, the numbers, and the other arguments, pairs of a name and a value, by keyword."""
    return (*map(T, range(tensors)), *map(S, range(numbers))), dict(static)


class Op:
    """An operation.

    Args:
        function: the function's name under ``torch``, or one of the backend's.
        rule: what it gives.
        backward: how its gradients are computed; None if its results have none.
        saves: which of the inputs the gradients need.
        saves_results: which of the results.
        arguments: the arguments of the call.
        view: whether the result has the memory of the first input.
        changes: the function that does it in place; the method of its name with an underscore if None.
    """

    def __init__(
        self,
        function: str,
        rule: Rule,
        backward: Backward | None = None,
        saves: Sequence[int] = (),
        saves_results: Sequence[int] = (),
        arguments: Arguments = in_order,
        view: bool = False,
        changes: str | None = None,
    ) -> None:
        self.function = function
        self.name = function.removesuffix(".default").rpartition(".")[2]
        self._rule = rule
        self._backward = backward
        self._saves = saves
        self._saves_results = saves_results
        self._arguments = arguments
        self._view = view
        if view:
            VIEWS.add(function)
        self._changes = changes or f"Tensor.{self.name}_"

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
            metas = tuple([each.meta for each in inputs])
        form, out, sizes = found
        ident = home.put(form, idents, numbers, sizes)
        if home.recorder is not None:
            home.recorder.note(form, inputs, numbers, ident)
        queue = home.queue
        if type(out) is Meta:
            backward = self._backward if grad_enabled.get() else None
            if self._view:
                base = inputs[0]._base
                result = Tensor(home, Value(queue, ident), out, base)
                result._rebased = base.rebased
                if backward is not None:
                    result._origin = origin_of(self, inputs, numbers, static)
            else:
                result = Tensor(home, Value(queue, ident), out)
            if backward is not None:
                needs = False
                for each in inputs:
                    if each._rebased >= 0 and each._rebased != each._base.rebased:
                        current(each)
                    needs = needs or each._needs
                if needs and out.dtype.kind >= 2:
                    node = Node(self.name, backward, inputs, metas, self._saves, numbers, static, False)
                    result._needs, result._node = True, node
                    if self._saves_results:
                        value = result._value
                        node.out = [(value, out, result._base, result._base.version)]
            return result
        found = self._several(inputs, numbers, static, ident, (None,) if out is None else out)
        return found[0] if out is None else found  # type: ignore[return-value]

    def _several(
        self,
        inputs: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        static: Any,
        ident: int,
        metas: tuple[Meta | None, ...],
    ) -> tuple[Tensor, ...]:
        """Return the results of an operation that has several, or whose layout depends on elements."""
        home = inputs[0]._home
        if home.recorder is not None and None in metas:
            home.recorder.refusal = f"the shape of what {self.name} gives depends on elements"
        base = inputs[0]._base if self._view else None
        results = tuple(
            Tensor(home, Value(home.queue, ident + place), meta, base) for place, meta in enumerate(metas)
        )
        if base is not None:
            for each in results:
                each._rebased = base.rebased
        if self._backward is not None and grad_enabled.get() and any(current(each)._needs for each in inputs):
            self._differentiate(inputs, numbers, static, results)
        return results

    def in_place(self, inputs: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), static: Any = ()) -> Tensor:
        """Queue it, so that its result takes the place of the first input; return that.

        Raises:
            RuntimeError: the result does not fit there, or this is a leaf whose gradient is wanted.
        """
        target = whole = inputs[0]
        home = target._home
        numbers, static = plain_numbers(numbers), plain(static)
        needed = False
        if grad_enabled.get():
            needs = any(list(map(_needs, inputs)))
            needed = self._backward is not None and needs and target.meta.dtype.kind >= 2
            if target._needs and target._node is None:
                raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
            if needed or target._needs:
                whole, views = whole_of(target)
                if whole._needs and whole._node is None:
                    raise RuntimeError(
                        "a view of a leaf Variable that requires grad is being used in an in-place operation."
                    )
        metas = [each.meta for each in inputs]
        out = self._rule(metas, numbers, static)
        assert isinstance(out, Meta)
        own = target.meta
        if out.shape != own.shape:
            raise RuntimeError(
                f"output with shape {list(own.shape)} doesn't match the broadcast shape {list(out.shape)}"
            )
        if out.dtype.kind > own.dtype.kind:
            raise RuntimeError(
                f"result type {out.dtype.scalar_name} can't be cast to the desired output type "
                f"{own.dtype.scalar_name}"
            )
        if out.dtype.kind is Kind.FLOAT and own.dtype.kind is Kind.COMPLEX:
            raise RuntimeError(f"In-place {self.name} is not supported for complex tensors.")
        self._check_complex(metas, numbers)
        before = _as_it_was(target, 0 in self._saves) if needed else target
        key = (self, "in place", static, len(inputs), tuple(map(type, numbers)))
        form = home.known.get(key)
        if form is None:
            args, kwargs = self._arguments(len(inputs), len(numbers), static)
            made = Form(self._changes, args, tuple(kwargs.items()), len(inputs), len(numbers), 0)
            form = home.known[key] = home.form(made, tuple(map(type, numbers)))
        ident = home.put(form, [each._value.id for each in inputs], numbers)
        if home.recorder is not None:
            home.recorder.note(form, inputs, numbers, ident)
        if needed:
            change = node = self.node((before, *inputs[1:]), numbers, static)
            if whole is not target:
                part = of_part(change, views)
                of = (_as_it_was(whole), *inputs[1:])
                node = Node(self.name, part, of, [each.meta for each in of], (), (), (), False)
        target._base.version += 1
        if needed:
            target._base.rebased += 1
            change.out = [(target._value, own, target._base, target._base.version) for _ in self._saves_results]
            give_history(whole, node)
            current(target)
        return target

    def _not_tensors(self, inputs: Sequence[Any]) -> TypeError:
        place, wrong = next((place, each) for place, each in enumerate(inputs, 1) if not isinstance(each, Tensor))
        return TypeError(f"{self.name}(): argument (position {place}) must be Tensor, not {type(wrong).__name__}")

    def _check_complex(self, metas: Sequence[Meta], numbers: tuple[Any, ...]) -> None:
        error = NO_COMPLEX.get(self.name)
        if error is None:
            return
        if any(each.dtype.kind is Kind.COMPLEX for each in metas) or any(type(each) is complex for each in numbers):
            raise error(f'"{self.name}" not implemented for complex numbers')

    def _learn(self, home: Any, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any) -> Any:
        for each in inputs:
            if each._home is not home:
                raise RuntimeError("Expected all tensors to be on the same mesh, but found those of two")
        metas = tuple([each.meta for each in inputs])
        out = self._rule(metas, numbers, static)
        self._check_complex(metas, numbers)
        args, kwargs = self._arguments(len(inputs), len(numbers), static)
        given = out if isinstance(out, tuple) else (out,)
        outs = len(given)
        types = tuple(map(type, numbers))
        sizes = () if self._view else tuple(0 if each is None else each.nbytes for each in given)
        form = home.form(Form(self.function, args, tuple(kwargs.items()), len(inputs), len(numbers), outs), types)
        if all(each._meta is not None for each in inputs):
            if len(home.known) >= MOST_KNOWN:
                home.known.clear()
            home.known[(self, static, metas, types) if numbers else (self, static, metas)] = form, out, sizes
        return form, out, sizes

    def node(self, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any, several: bool = False) -> Node:
        """Return the operation as a part of a history."""
        assert self._backward is not None
        metas = [each.meta for each in inputs]
        return Node(self.name, self._backward, inputs, metas, self._saves, numbers, static, several)

    def _differentiate(
        self, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any, results: Sequence[Tensor]
    ) -> None:
        node = self.node(inputs, numbers, static, len(results) > 1)
        for place, each in enumerate(results):
            meta = each._meta or (inputs[0].meta if place == 0 else None)
            if meta is not None and meta.dtype.kind >= 2:
                each._needs, each._node, each._place = True, node, place
        node.out = [
            (each._value, each.meta, each._base, each._base.version)
            for each in (results[place] for place in self._saves_results)
        ]


def _needs(tensor: Tensor) -> bool:
    return bool(current(tensor)._needs)


def _as_it_was(tensor: Tensor, elements: bool = False) -> Tensor:
    """Return a handle with the history that a tensor has before it changes.

    Args:
        tensor: the tensor.
        elements: whether the handle is of a copy of its elements.
    """
    copy = tensor.detach().clone() if elements else tensor
    before = Tensor(tensor._home, copy._value, tensor._meta, copy._base)
    before._needs, before._node, before._place = tensor._needs, tensor._node, tensor._place
    return before


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
