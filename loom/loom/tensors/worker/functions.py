"""The worker's own functions, whose names begin with a point: what torch has no one function for.

With them are the modules of torch that the workers make and compute: see `loom.tensors.nn.layers.TorchModule`.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from loom.tensors.layouts import contiguous_strides, is_dense
from loom.tensors.sending.encoding import Failure
from loom.tensors.worker import summaries
from loom.tensors.worker.layouts import layout

MOST_MADE = 256
"""Modules without elements, and optimizers without parameters, that a worker keeps."""

_PLAIN = (bool, int, float, str, type(None))


def described(values: Any, recipe: tuple[Any, ...]) -> Any:
    """Return the parts of a module, and the layouts of its tensors.

    A part is its path, class and attributes, and the names of its parameters and buffers, each with whether its
    gradient is wanted; None if it has none.
    """
    parts, layouts = [], []
    for path, part in _skeleton(values, recipe).named_modules():
        attributes = {key: each for key, each in vars(part).items() if not key.startswith("_") and _is_plain(each)}
        named = part._parameters.items(), part._buffers.items()
        layouts += [layout(each) for kind in named for _, each in kind if each is not None]
        wanted = [[(key, None if each is None else each.requires_grad) for key, each in kind] for kind in named]
        parts.append((path, type(part).__name__, attributes, *wanted))
    return parts, layouts


def module(values: Any, recipe: tuple[Any, ...]) -> Any:
    """Make a module; return its parameters and buffers, those of each part together."""
    with torch.device(values.device):
        made = _built(recipe)
    found = [
        each.detach()
        for part in made.modules()
        for each in (*part._parameters.values(), *part._buffers.values())
        if each is not None
    ]
    return found[0] if len(found) == 1 else found


def forward(
    values: Any,
    recipe: tuple[Any, ...],
    path: str,
    modes: Any,
    names: Any,
    tensors: Any,
    args: Any,
    /,
    **named: Any,
) -> Any:
    """Return what a module, or a part of it, gives with these parameters and buffers."""
    part = _skeleton(values, recipe).get_submodule(path)
    for each, mode in zip(part.modules(), modes, strict=True):
        each.training = mode
    try:
        return torch.func.functional_call(part, dict(zip(names, tensors, strict=True)), args, named)
    finally:
        for each in part.modules():
            if isinstance(each, torch.nn.RNNBase):
                each._init_flat_weights()  # else it keeps the weights


def _skeleton(values: Any, recipe: tuple[Any, ...]) -> torch.nn.Module:
    """Return a module without elements. While it computes it has the elements of one call."""

    def made() -> torch.nn.Module:
        with torch.device("meta"):
            return _built(recipe)

    found: torch.nn.Module = _once(values, recipe, made)
    return found


def _once(values: Any, recipe: tuple[Any, ...], make: Callable[[], Any]) -> Any:
    """Return what a recipe makes, which is made once."""
    key = repr(recipe)  # which tells apart what is equal and not the same: 1 and True
    if key not in values.made:
        if len(values.made) >= MOST_MADE:
            values.made.clear()
        values.made[key] = make()
    return values.made[key]


def _built(recipe: Any) -> torch.nn.Module:
    _, name, args, kwargs = recipe
    kind = getattr(torch.nn, name)
    if not issubclass(kind, torch.nn.Module):
        raise TypeError(f"torch.nn.{name} is no module")
    found: torch.nn.Module = kind(*map(_argument, args), **{key: _argument(each) for key, each in kwargs})
    return found


def _argument(value: Any) -> Any:
    return _built(value) if type(value) is tuple and value[:1] == (".module",) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


RESET = Failure(-1, 0, "RuntimeError", "it was freed by lt.reset(): make it again")
"""The state of a tensor after `reset`."""

NO_GRADIENT = Failure(-1, -1, "RuntimeError", "a gradient is None: backward() has added nothing to its tensor")

CHANGING_NOTHING = frozenset(
    (".backward", ".free", ".hook", ".keep", ".requires_grad", ".retain_grad", ".set_grad", ".watch")
)
"""Commands without results after whose failure their tensors are what they were."""


def own(values: Any, name: str) -> Callable[..., Any]:
    """Return a function by its name. Functions that need the worker get it first."""
    if name in _OF_WORKER:
        return partial(_OF_WORKER[name], values)
    return _OWN[name]


def torch_function(name: str) -> Callable[..., Any]:
    """Return a function of torch by its dotted name.

    Raises:
        AttributeError: torch has none of this name.
    """
    path = name.removeprefix("torch.").split(".")
    if any(part.startswith("_") and "_backward" not in part for part in path):
        raise AttributeError(f"{name} is not public")
    found: Any = torch
    for part in path:
        try:
            found = getattr(found, part)
        except AttributeError:
            if not hasattr(found, "__path__"):
                raise
            try:
                found = importlib.import_module(f"{found.__name__}.{part}")
            except ModuleNotFoundError:
                raise AttributeError(f"torch has no {name}") from None
        if isinstance(found, ModuleType) and found.__name__.partition(".")[0] != "torch":
            raise AttributeError(f"{name} is not torch's")
    if not callable(found):
        raise AttributeError(f"{name} is no function")
    return found  # type: ignore[no-any-return]


# Made


def data(values: Any, shape: Sequence[int], kind: torch.dtype) -> torch.Tensor:
    """Make a tensor of the next piece of data of the batch."""
    piece = bytearray(next(values.data))
    if not piece:
        return torch.empty(shape, dtype=kind, device=values.device)
    return torch.frombuffer(piece, dtype=kind).reshape(shape).to(values.device)


def made(values: Any, function: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call a function of torch that makes a tensor, on the worker's device."""
    found: torch.Tensor = torch_function(function)(*args, device=values.device, **kwargs)
    return found


def made_spread(
    values: Any, placements: Sequence[int], function: str, size: Sequence[int], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Call a function of torch that makes a tensor of a size, each process for its part."""
    made: torch.Tensor = values.sharding.made(values.device, placements, function, size, *args, **kwargs)
    return made


def spread(values: Any, tensor: torch.Tensor, placements: Sequence[int]) -> torch.Tensor:
    """Return a tensor of its own that is spread over the processes, or whole in each."""
    if values.sharding is None:
        return tensor.clone(memory_format=torch.contiguous_format)
    found: torch.Tensor = values.sharding.spread(tensor, placements)
    return found


def rows(values: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix of which each process has some rows; one that is spread already as it is."""
    found: torch.Tensor = values.sharding.rows(tensor)
    return found


def seed(values: Any, number: int) -> None:
    """Seed torch's generators."""
    torch.manual_seed(number)


# Gradients


def grad_mode(enabled: bool) -> None:
    """Let the commands that follow build a graph, or none."""
    torch.set_grad_enabled(enabled)


def requires_grad(values: Any, tensor: torch.Tensor, wanted: bool) -> None:
    """Say whether the gradient of a leaf is wanted."""
    tensor.requires_grad_(wanted)
    if wanted and values.sharding is not None:
        values.sharding.keep_placements(tensor)


def retain_grad(tensor: torch.Tensor) -> None:
    """Keep the gradient of a tensor that is no leaf."""
    if tensor.grad_fn is not None:  # of a view whose base was changed, torch makes it when it is asked for
        tensor.retain_grad()


def backward(
    values: Any,
    retain: bool,
    create: bool,
    root: torch.Tensor,
    grad: torch.Tensor | None,
    leaves: Sequence[torch.Tensor],
) -> None:
    """Add gradients to leaves. If that fails, each of the leaves has no gradient, but the failure."""
    try:
        _check([root, grad])
        if values.sharding is not None and grad is not None:
            grad = values.sharding.like(grad, root)
        torch.autograd.backward([root], [grad], retain_graph=retain, create_graph=create)
    except Exception as error:
        error.loom_leaves = leaves  # type: ignore[attr-defined]
        raise


def grads(
    values: Any,
    retain: bool,
    create: bool,
    allow_unused: bool,
    roots: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor | None],
) -> Any:
    """Return the gradients of some tensors by others, as torch's accumulation lays them out."""
    _check([*roots, *inputs, *seeds])
    if values.sharding is not None:
        seeds = [
            None if seed is None else values.sharding.like(seed, root)
            for seed, root in zip(seeds, roots, strict=True)
        ]
    found = torch.autograd.grad(
        roots, inputs, seeds, retain_graph=retain, create_graph=create, allow_unused=allow_unused
    )
    result = [
        torch.zeros_like(each) if grad is None else grad if create else _laid_out(grad, each)
        for grad, each in zip(found, inputs, strict=True)
    ]
    if values.sharding is not None:
        result = [values.sharding.like(grad, each) for grad, each in zip(result, inputs, strict=True)]
    return result[0] if len(result) == 1 else result


def _check(tensors: Sequence[Any]) -> None:
    for each in tensors:
        if isinstance(each, Failure):
            raise RuntimeError(each.text)


def _laid_out(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides of its tensor if that is dense, else with those of its order."""
    shape, strides = tuple(tensor.shape), tensor.stride()
    wanted = strides if is_dense(shape, strides) else contiguous_strides(shape)
    if grad.stride() == wanted or type(grad) is not torch.Tensor:
        return grad
    return grad.new_empty_strided(shape, wanted).copy_(grad)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor, also if it is no leaf."""
    with _quiet() if not tensor.is_leaf else contextlib.nullcontext():
        return tensor.grad


def grad_of(tensor: Any) -> Any:
    """Return the gradient of a tensor, or why it has none."""
    failed = getattr(tensor, "loom_failed", None)
    if failed is not None:
        return failed
    grad = gradient(tensor)
    if grad is None:
        return NO_GRADIENT
    if not tensor.is_leaf:
        laid_out = _laid_out(grad, tensor)
        if laid_out is not grad:
            grad = tensor.grad = laid_out
    return grad


def set_grad(values: Any, tensor: torch.Tensor, grad: torch.Tensor | None = None) -> None:
    """Replace the gradient of a tensor."""
    tensor.__dict__.pop("loom_failed", None)
    if grad is not None and values.sharding is not None:
        grad = values.sharding.like(grad, tensor)
    tensor.grad = grad


def spoil_gradient(values: Any, tensor: Any, failure: Failure) -> None:
    """Put a failure in the place of a tensor's gradient."""
    if isinstance(tensor, torch.Tensor):
        tensor.loom_failed = failure
        if hasattr(tensor, "loom_watch"):
            summaries.arrived(values, tensor, failure)


def unhook(values: Any, number: int) -> None:
    """Remove a hook."""
    if (handle := values.handles.pop(number, None)) is not None:
        handle.remove()


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor without history."""
    return tensor.data


# Optimizers


def defaults(values: Any, recipe: tuple[Any, ...], dims: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of an optimizer: a recipe is its class, and arguments without and with names.

    Args:
        dims: how many dimensions its parameters have.
    """
    found: dict[str, Any] = _optimizer([_one(each) for each in dims], recipe).defaults
    return found


def state_parts(values: Any, recipe: tuple[Any, ...], options: Any, dim: int) -> list[tuple[str, bool]]:
    """Return the names of the tensors that an optimizer keeps of a parameter, and whether they are laid out so.

    Args:
        dim: how many dimensions the parameter has.
    """
    param = _one(dim)
    optimizer = _optimizer([param], recipe)
    _do_step(optimizer, [param], [_one(dim)], options, 0.5)
    state = optimizer.state[param].items()
    return [(name, each.shape == param.shape) for name, each in state if isinstance(each, torch.Tensor)]


def first_step(
    values: Any, param: torch.Tensor, grad: torch.Tensor, recipe: tuple[Any, ...], options: Any, lr: float
) -> Any:
    """Change a parameter as an optimizer of torch does; return the tensors that it keeps of it."""
    optimizer = _optimizer([param], recipe)
    _do_step(optimizer, [param], [grad], options, lr)
    state = [each for each in optimizer.state[param].values() if isinstance(each, torch.Tensor)]
    return state[0] if len(state) == 1 else state


def step(
    values: Any,
    params: Sequence[Any],
    grads: Sequence[Any],
    recipe: tuple[Any, ...],
    options: Any,
    lr: float,
    states: Sequence[Sequence[tuple[str, Any]]],
) -> None:
    """Change parameters and their states as an optimizer of torch does, but for those that have failed.

    Raises:
        RuntimeError: some have failed: ``loom_spoiled`` has why, by their places.
    """
    optimizer = _once(values, recipe, lambda: _optimizer([_one(2)], recipe))
    good, failed = [], {}
    for place, (param, grad, state) in enumerate(zip(params, grads, map(dict, states), strict=True)):
        found = [each for each in (param, grad, *state.values()) if isinstance(each, Failure)]
        if found:
            failed[place] = found[0]
        else:
            good.append((param, grad, state))
    optimizer.state.update((param, dict(state)) for param, _, state in good)
    try:
        _do_step(optimizer, [param for param, _, _ in good], [grad for _, grad, _ in good], options, lr)
        for param, _, state in good:
            for name, own in state.items():
                if (found := optimizer.state[param][name]) is not own:
                    own.copy_(found)
    finally:  # it keeps no tensors
        optimizer.param_groups[0]["params"] = []
        optimizer.state.clear()
    if failed:
        error = RuntimeError("a gradient has failed")
        error.loom_spoiled = failed  # type: ignore[attr-defined]
        raise error


def _one(dim: int) -> torch.Tensor:
    return torch.zeros((2,) * dim)


def _optimizer(params: list[Any], recipe: tuple[Any, ...]) -> Any:
    kind, args, kwargs = recipe
    return getattr(torch.optim, kind)(params, *args, **dict(kwargs))


def _do_step(optimizer: Any, params: list[Any], grads: list[Any], options: Any, lr: float) -> None:
    optimizer.param_groups[0].update(options, lr=lr, params=params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()


# Parts


def getitem(tensor: torch.Tensor, index: Sequence[Any]) -> torch.Tensor:
    """Return a part of a tensor."""
    return tensor[_index(index)]


def setitem(tensor: torch.Tensor, index: Sequence[Any], value: Any) -> None:
    """Give a part of a tensor other values, in place."""
    tensor[_index(index)] = value


def places(tensor: torch.Tensor) -> Any:
    """Return the places of elements that are not 0, a tensor for each dimension."""
    found = torch.nonzero(tensor, as_tuple=True)
    return found if len(found) > 1 else found[0]


def _index(index: Sequence[Any]) -> tuple[Any, ...]:
    """Return an index of torch: a slice travels as its start, length and step."""
    return tuple(
        slice(each[0], each[0] + each[1] * each[2], each[2]) if isinstance(each, tuple) else each for each in index
    )


def reshaped(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the elements in another shape, in which they have to lie in memory otherwise."""
    return tensor.reshape(shape)


# The worker


def keep(values: Any, tensor: torch.Tensor, name: str, needs: bool) -> None:
    """Give a tensor a name, by which another program finds it."""
    values.kept[name] = tensor.detach(), needs


def kept(values: Any, name: str) -> torch.Tensor:
    """Return the tensor of a name."""
    found: torch.Tensor = values.kept[name][0].detach()
    return found


def forget(values: Any, name: str) -> None:
    """Take a name back."""
    values.kept.pop(name, None)


def reset(values: Any) -> None:
    """Forget every tensor that has no name."""
    values.tensors.clear()
    values.tensors.gone = RESET


def threads(number: int) -> None:
    """Compute one operation with so many threads."""
    torch.set_num_threads(number)


_OF_WORKER: dict[str, Callable[..., Any]] = {
    f".{each.__name__}": each
    for each in (
        backward, data, defaults, described, first_step, forget, forward, grads, keep, kept, made, made_spread,
        module, requires_grad, reset, rows, seed, set_grad, spread, state_parts, step, unhook,
        summaries.unwatch, summaries.watch, summaries.watch_clear,
    )
}  # fmt: skip
_OWN: dict[str, Callable[..., Any]] = {
    f".{each.__name__}": each
    for each in (data_of, getitem, grad_mode, grad_of, places, reshaped, retain_grad, setitem, threads)
}
