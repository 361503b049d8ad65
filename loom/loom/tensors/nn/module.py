"""`Module`, a part of a network, and what parts are put together with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partialmethod
from typing import Any

from loom.tensors.grad_modes import no_grad
from loom.tensors.layouts import DtypeKind, dtype_named
from loom.tensors.tensor import Tensor


class Parameter(Tensor):
    """A tensor that a module learns. As an attribute of a module it is one of its parameters.

    Args:
        data: the tensor, whose memory it takes.
    """

    __slots__ = ()

    def __init__(self, data: Tensor, requires_grad: bool = True) -> None:
        own = data.detach()
        super().__init__(own._home, own._value, own._meta, own._base)
        self._root = own._root
        self.requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        copy = memo[id(self)] = Parameter(super().__deepcopy__(memo), self._needs)
        return copy


class Module:
    """A part of a network: its attributes that are `Parameter`s and modules are found by name, as in torch."""

    training: bool
    _parameters: dict[str, Parameter | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module]

    def __init__(self) -> None:
        self.__dict__.update(training=True, _parameters={}, _buffers={}, _modules={})

    def __setattr__(self, name: str, value: Any) -> None:
        if "_modules" not in self.__dict__:
            raise AttributeError(f"cannot assign {name!r} before Module.__init__() call")
        for kind in (self._parameters, self._buffers, self._modules):
            kind.pop(name, None)
        self.__dict__.pop(name, None)
        if isinstance(value, Parameter):
            self._parameters[name] = value
        elif isinstance(value, Module):
            self._modules[name] = value
        else:
            self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        for kind in ("_parameters", "_buffers", "_modules"):
            found = self.__dict__.get(kind, {})
            if name in found:
                return found[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __delattr__(self, name: str) -> None:
        for kind in (self._parameters, self._buffers, self._modules):
            if kind.pop(name, None) is not None:
                return
        super().__delattr__(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result of this part."""
        raise NotImplementedError(f'Module [{type(self).__name__}] is missing the required "forward" function')

    def register_buffer(self, name: str, tensor: Tensor | None) -> None:
        """Keep a tensor that is part of the state, but not learned."""
        self._buffers[name] = tensor

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Keep a parameter under a name."""
        self._parameters[name] = parameter

    def add_module(self, name: str, module: Module) -> None:
        """Keep a part under a name."""
        self._modules[name] = module

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all within, each once, with their dotted names."""
        seen: set[int] = set()
        waiting: list[tuple[str, Module]] = [(prefix, self)]
        while waiting:
            name, module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            yield name, module
            parts = [(f"{name}.{key}" if name else key, each) for key, each in module._modules.items()]
            waiting.extend(reversed(parts))

    def modules(self) -> Iterator[Module]:
        return (module for _, module in self.named_modules())

    def children(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of this module and of all within, each once, with their dotted names."""
        return self._named("_parameters", prefix)

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this module and of all within, each once, with their dotted names."""
        return self._named("_buffers", prefix)

    def _named(self, kind: str, prefix: str) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for name, module in self.named_modules(prefix):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield f"{name}.{key}" if name else key, tensor

    def parameters(self) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def train(self, mode: bool = True) -> Module:
        """Say whether this is training, which `Dropout` looks at."""
        for module in self.modules():
            module.__dict__["training"] = mode
        return self

    def eval(self) -> Module:
        return self.train(False)

    def to(self, *args: Any, dtype: Any = None, **kwargs: Any) -> Module:
        """Give floating point parameters and buffers another dtype, in place. A device is the mesh, whatever it is.

        Args:
            args: a dtype, a device, or a tensor whose dtype is taken.
        """
        kinds = [each.dtype if isinstance(each, Tensor) else each for each in (*args, dtype)]
        named = [dtype_named(each) for each in kinds if type(each).__name__ in ("DType", "dtype")]
        if not named:
            return self
        kind = named[-1]
        if kind.kind < DtypeKind.FLOAT:
            raise TypeError(f"nn.Module.to only accepts floating point or complex dtypes, but got {kind.name}")
        for each in [*self.parameters(), *self.buffers()]:
            if each.dtype.kind >= DtypeKind.FLOAT and each.dtype is not kind:
                each.become(each.detach().to(kind))
        return self

    def cuda(self, device: Any = None) -> Module:
        return self

    def cpu(self) -> Module:
        return self

    def buffers(self) -> Iterator[Tensor]:
        return (buffer for _, buffer in self.named_buffers())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return iter(self._modules.items())

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Say whether the gradients of the parameters are wanted."""
        for each in self.parameters():
            each.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters, or set them to zero."""
        for each in self.parameters():
            if each.grad is not None:
                each.grad = None if set_to_none else each.grad.detach().mul(0)

    def apply(self, work: Callable[[Module], object]) -> Module:
        """Call a function with each module within, and then with this one."""
        for each in self.children():
            each.apply(work)
        work(self)
        return self

    def state_dict(self) -> OrderedDict[str, Tensor]:
        """Return the parameters and buffers by their dotted names, which are torch's.

        A module of torch's takes them by its own ``load_state_dict``.
        """
        found: list[tuple[str, Tensor]] = []
        for name, module in self.named_modules():
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    found.append((f"{name}.{key}" if name else key, tensor.detach()))
        return OrderedDict(found)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy a state into the parameters and buffers: lazy tensors, tensors of torch, or numpy arrays.

        Raises:
            RuntimeError: a name is missing or unknown, unless ``strict`` is false, or a shape is another.
        """
        own = self.state_dict()
        missing, unexpected = [key for key in own if key not in state], [key for key in state if key not in own]
        problems = []
        if strict and unexpected:
            problems.append(f"Unexpected key(s) in state_dict: {', '.join(map(repr, unexpected))}.")
        if strict and missing:
            problems.append(f"Missing key(s) in state_dict: {', '.join(map(repr, missing))}.")
        found = {
            key: each if isinstance(each, Tensor) else own[key]._home.tensor(each)
            for key, each in state.items()
            if key in own
        }
        for key, each in found.items():
            if each.shape != own[key].shape:
                problems.append(
                    f"size mismatch for {key}: copying a param with shape {list(each.shape)} from checkpoint, the "
                    f"shape in current model is {list(own[key].shape)}."
                )
        if problems:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self).__name__}:\n\t" + "\n\t".join(problems)
            )
        with no_grad():
            for key, each in found.items():
                own[key].copy_(each)

    def __repr__(self) -> str:
        inside = [f"  ({name}): {each!r}".replace("\n", "\n  ") for name, each in self._modules.items()]
        return f"{type(self).__name__}(\n" + "\n".join(inside) + "\n)" if inside else f"{type(self).__name__}()"


for _alias, _dtype in (("float", "float32"), ("double", "float64"), ("half", "float16"), ("bfloat16", "bfloat16")):
    setattr(Module, _alias, partialmethod(Module.to, dtype=dtype_named(_dtype)))


class Sequential(Module):
    """Modules, each of which takes what the one before it gives."""

    def __init__(self, *modules: Any) -> None:
        super().__init__()
        given = modules[0].items() if modules and isinstance(modules[0], Mapping) else enumerate(modules)
        for name, module in given:
            self.add_module(str(name), module)

    def forward(self, x: Any) -> Any:
        for module in self._modules.values():
            x = module(x)
        return x

    def __getitem__(self, place: int) -> Module:
        return list(self._modules.values())[place]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())


class ModuleList(Module):
    """A list of modules."""

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        self.add_module(str(len(self._modules)), module)
        return self

    def __getitem__(self, place: int) -> Module:
        return list(self._modules.values())[place]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())
