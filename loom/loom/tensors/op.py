"""`Op`, an operation: what it calls in the cluster, what it gives, and how its gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from loom.tensors.autograd import Backward, Node
from loom.tensors.commands import Form, S, T
from loom.tensors.metas import Meta
from loom.tensors.tensor import Tensor, Value, grad_enabled

MOST_KNOWN = 65_536
"""Operations whose results are remembered, by the layouts of their operands."""

OLD_VIEW = (
    "a view of a tensor was made before that tensor was changed in place, and has the gradient of before: "
    "make the view again"
)

Rule = Callable[[Sequence[Meta], tuple[Any, ...], Any], "Meta | tuple[Meta, ...]"]
"""What an operation gives: of the tensors' metas, the numbers and the other arguments.

It raises what torch would raise. It looks at the types of the numbers only, as its results are kept by these."""

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
        home = inputs[0]._home
        metas = tuple([each._meta for each in inputs])
        key = (self, static, metas, tuple(map(type, numbers))) if numbers else (self, static, metas)
        found = home.known.get(key)
        if found is None:
            found = self._learn(home, inputs, numbers, static)
        form, out, sizes = found
        ident = home.put(form, [each._value.id for each in inputs], numbers, sizes)
        if home.recorder is not None:
            home.recorder.note(form, inputs, numbers, ident)
        freed = home.freed
        if type(out) is Meta:
            base = inputs[0]._base if self._view else None
            result = Tensor(home, Value(freed, ident), out, base)
            if self._backward is not None and grad_enabled.get():
                if base is not None:
                    result._rebased = base.rebased
                for each in inputs:
                    if each._rebased >= 0 and each._rebased != each._base.rebased:
                        raise RuntimeError(OLD_VIEW)
                for each in inputs:
                    if each._needs:
                        if out.dtype.kind >= 2:
                            self._differentiate(inputs, numbers, static, (result,))
                        break
            return result
        base = inputs[0]._base if self._view else None
        results = tuple(Tensor(home, Value(freed, ident + place), meta, base) for place, meta in enumerate(out))
        if self._backward is not None and grad_enabled.get() and any(each._needs for each in inputs):
            self._differentiate(inputs, numbers, static, results)
        return results  # type: ignore[return-value]

    def in_place(self, inputs: tuple[Tensor, ...], numbers: tuple[Any, ...] = (), static: Any = ()) -> Tensor:
        """Queue it, so that its result takes the place of the first input; return that.

        Raises:
            RuntimeError: the result does not fit there, or this is a leaf whose gradient is wanted.
        """
        target = inputs[0]
        home = target._home
        needed = (
            self._backward is not None
            and grad_enabled.get()
            and target.meta.dtype.is_differentiable
            and any(each._needs for each in inputs)
        )
        if target._needs and target._node is None and grad_enabled.get():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if needed and target._base is not target._value:
            raise RuntimeError(
                "an operation in place on a view, whose gradient is wanted, is not supported: "
                "compute a new tensor, such as with index_put or where"
            )
        out = self._rule([each.meta for each in inputs], numbers, static)
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
        before = target if not needed else _as_it_was(target, 0 in self._saves)
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
            node = self._node((before, *inputs[1:]), numbers, static, False)
            target._node, target._place, target._needs = node, 0, True
        target._base.version += 1
        if needed:
            target._base.rebased += 1
            node.out = [(target._value, own, target._base, target._base.version) for _ in self._saves_results]
        return target

    def _learn(self, home: Any, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any) -> Any:
        for each in inputs:
            if each._home is not home:
                raise RuntimeError("Expected all tensors to be on the same mesh, but found those of two")
        metas = tuple([each.meta for each in inputs])
        out = self._rule(metas, numbers, static)
        args, kwargs = self._arguments(len(inputs), len(numbers), static)
        outs = 1 if isinstance(out, Meta) else len(out)
        types = tuple(map(type, numbers))
        sizes = () if self._view else tuple(each.nbytes for each in ((out,) if isinstance(out, Meta) else out))
        form = home.form(Form(self.function, args, tuple(kwargs.items()), len(inputs), len(numbers), outs), types)
        if all(each._meta is not None for each in inputs):
            if len(home.known) >= MOST_KNOWN:
                home.known.clear()
            home.known[(self, static, metas, types) if numbers else (self, static, metas)] = form, out, sizes
        return form, out, sizes

    def _node(self, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any, several: bool) -> Node:
        assert self._backward is not None
        return Node(self.name, self._backward, inputs, self._saves, numbers, static, several)

    def _differentiate(
        self, inputs: Sequence[Tensor], numbers: tuple[Any, ...], static: Any, results: Sequence[Tensor]
    ) -> None:
        node = self._node(inputs, numbers, static, len(results) > 1)
        for place, each in enumerate(results):
            if each._meta.dtype.kind >= 2:  # type: ignore[union-attr]
                each._needs, each._node, each._place = True, node, place
        node.out = [
            (each._value, each.meta, each._base, each._base.version)
            for each in (results[place] for place in self._saves_results)
        ]


def _as_it_was(tensor: Tensor, elements: bool) -> Tensor:
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
