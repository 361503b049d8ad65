"""Optimizers: torch's own, which the workers run. A step is one command for each group, and waits for nothing.

An optimizer with other arguments than those before waits twice: for torch's defaults, and at its first step for the
names of its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any
from weakref import ref

from loom.errors import NotSupported
from loom.tensors import lr_scheduler as lr_scheduler
from loom.tensors.call import Waiting, changed, sent
from loom.tensors.grad_modes import enable_grad, no_grad
from loom.tensors.layouts import is_dense
from loom.tensors.names import OPTIMIZERS
from loom.tensors.sending.encoding import Form, Numbered, S, T, hashable
from loom.tensors.tensor import Tensor, Value


class Optimizer:
    """Changes parameters in place by their gradients, as the optimizer of its name under ``torch.optim``.

    Args:
        params: tensors; or groups, each a dictionary with ``params`` and arguments of its own.
        args, options: torch's.

    Raises:
        TypeError: the parameters are one tensor.
        ValueError: there are no parameters, or one is no leaf or is there twice.
        NotSupported: a step is to be differentiated, or an argument is a tensor.
        OperationFailed: torch refuses the arguments.
    """

    def __init__(self, params: Iterable[Any], *args: Any, **options: Any) -> None:
        if isinstance(params, Tensor):
            raise TypeError("params argument given to the optimizer should be an iterable of Tensors or dicts")
        given = list(params)
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        named = tuple([(name, _argument(name, each)) for name, each in options.items()])
        self._recipe = type(self).__name__, tuple([_argument("an argument", each) for each in args]), named
        self.defaults: dict[str, Any] = {}
        """The arguments of groups that have none of their own."""
        self.param_groups: list[dict[str, Any]] = []
        """The parameters, and the arguments with which they are changed, such as ``lr``."""
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._forms: dict[Any, Numbered] = {}
        """The commands of steps, by the arguments of their group and the state of its parameters."""
        for group in groups:
            self.add_param_group(group)
        if not self._params():
            raise ValueError("optimizer got an empty parameter list")
        dims = tuple(sorted({each.dim() for each in self._params()}))
        self.defaults = dict(_asked(self._params()[0]._home, ".defaults", self._recipe, dims))
        self.param_groups = [{**self.defaults, **group} for group in self.param_groups]

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Change more parameters, perhaps with other arguments."""
        params = group["params"]
        listed = [params] if isinstance(params, Tensor) else list(params)
        known = set(self._params())
        for each in listed:
            if not isinstance(each, Tensor):
                raise TypeError(f"optimizer can only optimize Tensors, not a {type(each).__name__}")
            if not each.is_leaf:
                raise ValueError("can't optimize a non-leaf Tensor")
            if each in known:
                raise ValueError("some parameters appear in more than one parameter group")
        own = {name: _argument(name, each) for name, each in group.items() if name != "params"}
        self.param_groups.append({**self.defaults, **own, "params": listed})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or set them to zero."""
        for each in self._params():
            if set_to_none:
                each.grad = None
            elif each.grad is not None:
                each.grad = each.grad.detach().mul(0)

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Change the parameters.

        Args:
            closure: computes the loss and its gradients; its result is returned.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        with no_grad():
            for group in self.param_groups:
                options = tuple([(name, each) for name, each in group.items() if name not in ("params", "lr")])
                ready = [(each, grad) for each in group["params"] if (grad := each.grad) is not None]
                known = [each for each in ready if each[0] in self.state]
                if known:
                    self._step(known, options, group["lr"])
                for param, grad in ready:
                    if param not in self.state:
                        self._first_step(param, grad, options, group["lr"])
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what a later optimizer needs to go on, in torch's form: parameters are numbered."""
        numbers = {each: number for number, each in enumerate(self._params())}
        groups = [{**group, "params": [numbers[each] for each in group["params"]]} for group in self.param_groups]
        state = {numbers[each]: dict(state) for each, state in self.state.items() if state}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            ValueError: it is of other groups.
        """
        sizes = [len(group["params"]) for group in self.param_groups]
        if sizes != [len(group["params"]) for group in state["param_groups"]]:
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        for own, group in zip(self.param_groups, state["param_groups"], strict=True):
            own.update({key: value for key, value in group.items() if key != "params"})
        params = self._params()
        self.state = {params[number]: dict(each) for number, each in state["state"].items()}

    def _params(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _first_step(self, param: Tensor, grad: Tensor, options: Any, lr: float) -> None:
        """Queue a step of a parameter that has no state yet."""
        home, meta = param._home, param.meta
        parts = _asked(home, ".state_parts", self._recipe, options, param.dim())
        metas = [meta if like and is_dense(meta.shape, meta.strides) else None for _, like in parts]
        args = (T(0), T(1), self._recipe, options, S(0))
        form = Form(".first_step", args, tensors=2, numbers=1, outs=len(parts), learns=None in metas)
        sizes = [meta.nbytes if like else 0 for _, like in parts]
        ident = home._queue(home._form(form, (type(lr),)), (param, grad), (lr,), sizes)
        made = [Tensor(home, Value(home._pending, ident + place), each) for place, each in enumerate(metas)]
        if form.learns:
            home._waiting[ident] = Waiting(None, list(map(ref, made)))
        self.state[param] = {name: each for (name, _), each in zip(parts, made, strict=True)}
        changed(param, "step", ())

    def _step(self, ready: Sequence[tuple[Tensor, Tensor]], options: Any, lr: float) -> None:
        """Queue a step of parameters with their gradients, whose state is known."""
        params, grads = zip(*ready, strict=True)
        states = [
            {name: each for name, each in self.state[param].items() if isinstance(each, Tensor)} for param in params
        ]
        parts = [each for state in states for each in state.values()]
        home, tensors = params[0]._home, [*params, *grads, *parts]
        key = type(lr), hashable(options), *map(tuple, states)
        form = self._forms.get(key)
        if form is None:
            places = map(T, count())
            holes = [[next(places) for _ in each] for each in (params, grads)]
            named = [[(name, next(places)) for name in state] for state in states]
            args = (*holes, self._recipe, options, S(0), named)
            whole = Form(".step", args, tensors=len(tensors), numbers=1, outs=0)
            form = self._forms[key] = home._form(whole, (type(lr),))
        home._queue(form, tensors, (lr,))
        for each in (*params, *parts):
            changed(each, "step", ())


def _argument(name: str, value: Any) -> Any:
    """Return an argument as it travels."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if any(isinstance(each, Tensor) for each in parts):
        raise NotSupported(f"{name} is a number of Python on lazy tensors: a step reads no tensor")
    if name == "differentiable" and value:
        raise NotSupported("a step is no part of a graph here: differentiable=False")
    return sent(value)


def _asked(home: Any, function: str, *args: Any) -> Any:
    """Return what the workers say, who are asked once."""
    key = (function, hashable(args))
    if key not in home._known:
        home._known[key] = home._asked(Form(function, args), ())
    return home._known[key]


def __getattr__(name: str) -> type[Optimizer]:
    if name not in OPTIMIZERS:
        raise AttributeError(f"there is no optimizer {name!r} here; there are {', '.join(sorted(OPTIMIZERS))}")
    made = type(name, (Optimizer,), {"__doc__": f"See ``torch.optim.{name}``."})
    found: type[Optimizer] = globals().setdefault(name, made)
    return found


def __dir__() -> list[str]:
    return [*OPTIMIZERS, "Optimizer", "lr_scheduler"]
