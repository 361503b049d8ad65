"""Optimizers, with torch's names, arguments and arithmetic. A step queues operations and waits for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from loom.errors import NotSupported
from loom.tensors import lr_scheduler as lr_scheduler
from loom.tensors.grad_modes import enable_grad, no_grad
from loom.tensors.tensor import Tensor


class Optimizer:
    """Changes parameters in place by their gradients.

    Args:
        params: tensors; or groups, each a dictionary with ``params`` and arguments of its own.
        defaults: the arguments of groups that have none of their own.

    Raises:
        TypeError: the parameters are one tensor.
        ValueError: there are no parameters, one is no leaf or is there twice, or an argument is out of range.
        NotSupported: a step is to be differentiated, or a learning rate is a tensor.
    """

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if isinstance(params, Tensor):
            raise TypeError("params argument given to the optimizer should be an iterable of Tensors or dicts")
        _check(defaults)
        given = list(params)
        if not given:
            raise ValueError("optimizer got an empty parameter list")
        groups = given if isinstance(given[0], dict) else [{"params": given}]
        self.defaults = defaults
        self.param_groups: list[dict[str, Any]] = []
        """The parameters, and the arguments with which they are changed, such as ``lr``."""
        self.state: dict[Tensor, dict[str, Any]] = {}
        for group in groups:
            self.add_param_group(group)

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
        self.param_groups.append({**self.defaults, **group, "params": listed})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or set them to zero."""
        for group in self.param_groups:
            for each in group["params"]:
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
                for each in group["params"]:
                    if each.grad is not None:
                        self._change(each, each.grad, self.state.setdefault(each, {}), group)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return what a later optimizer needs to go on, in torch's form: parameters are numbered."""
        numbers = {each: number for number, each in enumerate(self._params())}
        groups = [{**group, "params": [numbers[each] for each in group["params"]]} for group in self.param_groups]
        return {"state": {numbers[each]: dict(state) for each, state in self.state.items()}, "param_groups": groups}

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

    def _change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


_RANGES = {"lr": "learning rate", "eps": "epsilon value", "momentum": "momentum value",
           "weight_decay": "weight_decay value", "alpha": "alpha value"}  # fmt: skip


def _check(defaults: dict[str, Any]) -> None:
    for key, name in _RANGES.items():
        value = defaults.get(key, 0)
        if isinstance(value, Tensor):
            raise NotSupported(f"{key} is a number of Python on lazy tensors: a step reads no tensor")
        if value < 0:
            raise ValueError(f"Invalid {name}: {value}")
    for place, beta in enumerate(defaults.get("betas", ())):
        if isinstance(beta, Tensor):
            raise NotSupported("betas are numbers of Python on lazy tensors: a step reads no tensor")
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {place}: {beta}")
    if defaults.pop("differentiable", False):
        raise NotSupported("a step is no part of a graph here: differentiable=False")
    for key in ("foreach", "fused", "capturable"):  # how torch computes a step
        defaults.pop(key, None)


def _directed(grad: Tensor, param: Tensor, group: dict[str, Any], decay: bool = True) -> Tensor:
    """Return a gradient to go down by: its negative to go up, and with the decay of the weights if that is part."""
    if group["maximize"]:
        grad = grad.neg()
    return grad.add(param, alpha=group["weight_decay"]) if decay and group["weight_decay"] else grad


class SGD(Optimizer):
    """Stochastic gradient descent, as `torch.optim.SGD`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **how: Any,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        super().__init__(
            params,
            {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
             "nesterov": nesterov, "maximize": maximize, **how},
        )  # fmt: skip

    def _change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = _directed(grad, param, group)
        momentum = group["momentum"]
        if momentum:
            buffer = state.get("momentum_buffer")
            if buffer is None:
                buffer = state["momentum_buffer"] = grad.clone()
            else:
                buffer.mul_(momentum).add_(grad, alpha=1 - group["dampening"])
            grad = grad.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        param.add_(grad, alpha=-group["lr"])


class Adam(Optimizer):
    """Adam, as `torch.optim.Adam`: its weight decay is part of the gradient."""

    decoupled = False
    """True if the weights decay beside the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
             "maximize": maximize, **how},
        )  # fmt: skip

    def _change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
        if not state:
            state.update(step=0, exp_avg=param.detach().mul(0), exp_avg_sq=param.detach().mul(0))
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = param.detach().mul(0)
        state["step"] = step = int(state["step"]) + 1
        if decay and self.decoupled:
            param.mul_(1 - lr * decay)
        grad = _directed(grad, param, group, not self.decoupled)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if group["amsgrad"]:
            square = state["max_exp_avg_sq"].copy_(state["max_exp_avg_sq"].maximum(square))
        scale = (1 - beta2**step) ** 0.5
        param.addcdiv_(mean, square.sqrt().div_(scale).add_(group["eps"]), value=-lr / (1 - beta1**step))


class AdamW(Adam):
    """Adam whose weights decay beside the gradient, as `torch.optim.AdamW`."""

    decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **how)


class RMSprop(Optimizer):
    """RMSprop, as `torch.optim.RMSprop`: steps are divided by the root of a mean of squared gradients."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        **how: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
             "centered": centered, "maximize": maximize, **how},
        )  # fmt: skip

    def _change(self, param: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        grad = _directed(grad, param, group)
        if not state:
            state.update(step=0, square_avg=param.detach().mul(0))
            if group["momentum"]:
                state["momentum_buffer"] = param.detach().mul(0)
            if group["centered"]:
                state["grad_avg"] = param.detach().mul(0)
        state["step"] = int(state["step"]) + 1
        square = state["square_avg"].mul_(group["alpha"]).addcmul_(grad, grad, value=1 - group["alpha"])
        if group["centered"]:
            mean = state["grad_avg"].lerp_(grad, 1 - group["alpha"])
            square = square.addcmul(mean, mean, value=-1)
        root = square.sqrt().add_(group["eps"])
        if group["momentum"]:
            buffer = state["momentum_buffer"].mul_(group["momentum"]).addcdiv_(grad, root)
            param.add_(buffer, alpha=-group["lr"])
        else:
            param.addcdiv_(grad, root, value=-group["lr"])
