"""The modules of torch that the workers make and compute: see `loom.tensors.nn.torch_module`."""

from __future__ import annotations

from typing import Any

import torch

from loom.tensors.worker.layouts import layout

MOST_MODULES = 256
"""Modules without elements that a worker keeps."""

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
    key = repr(recipe)  # which tells apart what is equal and not the same: 1 and True
    if key not in values.modules:
        if len(values.modules) >= MOST_MODULES:
            values.modules.clear()
        with torch.device("meta"):
            values.modules[key] = _built(recipe)
    found: torch.nn.Module = values.modules[key]
    return found


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
