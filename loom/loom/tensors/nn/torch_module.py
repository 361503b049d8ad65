"""`TorchModule`: a module of torch's that the workers compute, such as ``LSTM`` or ``Transformer``."""

from __future__ import annotations

from inspect import isroutine
from typing import Any

from loom.errors import NotSupported
from loom.tensors.call import call, function_at, sendable, sent
from loom.tensors.grad_modes import no_grad
from loom.tensors.layouts import Meta, dtype_named
from loom.tensors.nn.module import Module, ModuleList, Parameter, Sequential
from loom.tensors.sending.encoding import Form, hashable
from loom.tensors.tensor import Tensor, Value

CONTAINERS: dict[str, type[Module]] = {"ModuleList": ModuleList, "Sequential": Sequential}


class TorchModule(Module):
    """A module whose parameters and parts have torch's names, and are tensors and modules here.

    The workers make the parameters, as the class of its name under ``torch.nn`` does. For their names, the first
    module of these arguments waits once.

    Raises:
        NotSupported: an argument is a tensor, a function, or a module of another kind.
        OperationFailed: torch refuses the arguments.
    """

    _lt: Any
    """The lazy tensors among which the parameters are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        named = tuple([(name, _recipe(each)) for name, each in sendable(kwargs).items()])
        recipe = (".module", type(self).__name__, tuple(map(_recipe, args)), named)
        parts, layouts = _described(self._lt, recipe)
        metas = [Meta(tuple(shape), dtype_named(kind), tuple(strides)) for kind, shape, strides, _ in layouts]
        made = iter(_made(self._lt, recipe, metas))
        known: dict[str, Module] = {"": self}
        for path, kind, attributes, parameters, buffers in parts:
            part = known.setdefault(path, CONTAINERS.get(kind, type(kind, (_Part,), {"_lt": self._lt}))())
            part.__dict__.update(attributes)
            if isinstance(part, TorchModule):
                part.__dict__["_made"] = recipe, path
            if path:
                before, _, name = path.rpartition(".")
                known[before].add_module(name, part)
            for key, wanted in parameters:
                part.register_parameter(key, None if wanted is None else Parameter(next(made), wanted))
            for key, wanted in buffers:
                part.register_buffer(key, None if wanted is None else next(made))
        for each in (*args, *kwargs.values()):
            if isinstance(each, Module):
                self._copy(each)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            raise NotSupported(f"the workers compute this module: it has no part {name!r} of yours")
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what torch's module gives. The first call of its kind waits once for how many tensors that are."""
        names, tensors, modes = [], [], []
        for path, module in self.named_modules():
            modes.append(module.training)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    names.append(f"{path}.{key}" if path else key)
                    tensors.append(tensor)
        given = (*self.__dict__["_made"], tuple(modes), tuple(names), tensors, args)
        return call(self._lt, function_at(".forward", "?"), given, kwargs)

    def _copy(self, given: Module) -> None:
        """Give the parts that torch copies of a module the elements of that."""
        state = given.state_dict()
        with no_grad():
            for part in self.modules():
                own = part.state_dict() if type(part).__name__ == type(given).__name__ else {}
                for key, tensor in own.items():
                    tensor.copy_(state[key])


class _Part(TorchModule):
    """A part of a module that the workers compute."""

    def __init__(self) -> None:
        Module.__init__(self)


def _recipe(value: Any) -> Any:
    """Return an argument of a module as it travels: a module is its class and its arguments."""
    if isinstance(value, TorchModule) and value.__dict__["_made"][1] == "":
        return value.__dict__["_made"][0]
    if isinstance(value, (Tensor, Module)) or isroutine(value):
        raise NotSupported(f"a {type(value).__name__} is no argument of a module that the workers make")
    return tuple(map(_recipe, value)) if isinstance(value, (tuple, list)) else sent(value)


def _described(lt: Any, recipe: tuple[Any, ...]) -> Any:
    """Return the parts of a module and the layouts of its tensors: see `loom.tensors.worker.modules.described`."""
    key = (".described", hashable(recipe))
    if key not in lt._known:
        lt._known[key] = lt._asked(Form(".described", (recipe,)), ())
    return lt._known[key]


def _made(lt: Any, recipe: tuple[Any, ...], metas: list[Meta]) -> list[Tensor]:
    """Return the parameters and buffers of a module, which the workers make."""
    form = lt._form(Form(".module", (recipe,), outs=len(metas)))
    first = lt._queue(form, (), (), [each.nbytes for each in metas]) if metas else 0
    return [Tensor(lt, Value(lt._pending, first + place), meta) for place, meta in enumerate(metas)]
