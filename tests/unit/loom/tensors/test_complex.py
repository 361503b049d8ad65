"""Complex numbers: gradients by torch's convention, conjugates, and what is refused because it would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import settled

X = [[1 + 2j, 0.5 - 1.5j], [-0.25 + 0.75j, 2 - 0.5j]]
Y = [[0.5 + 1j, 1 - 1j], [2 + 0.5j, -1 + 0.25j]]
REAL = [[0.5, -1.5], [2.0, 0.25]]

HOLOMORPHIC: dict[str, Callable[[Any, Any, Any], Any]] = {
    "add": lambda m, x, y: x + y,
    "sub": lambda m, x, y: x - 2 * y,
    "mul": lambda m, x, y: x * y,
    "a complex number": lambda m, x, y: x * (2 - 1j) + y,
    "div": lambda m, x, y: x / y,
    "a number over it": lambda m, x, y: (1 + 2j) / x + y,
    "pow": lambda m, x, y: x**3 + y,
    "square": lambda m, x, y: x.square() * y,
    "exp": lambda m, x, y: x.exp() * y,
    "log": lambda m, x, y: x.log() * y,
    "sqrt": lambda m, x, y: x.sqrt() * y,
    "sin": lambda m, x, y: x.sin() * y.cos(),
    "tanh": lambda m, x, y: x.tanh() * y,
    "reciprocal": lambda m, x, y: x.reciprocal() * y,
    "matmul": lambda m, x, y: x @ y,
    "a vector": lambda m, x, y: x @ y[0],
    "einsum": lambda m, x, y: m.einsum("ij,kj->ik", x, y),
    "adjoint": lambda m, x, y: x.adjoint() @ y,
    "conj": lambda m, x, y: x.conj() * y,
    "sum": lambda m, x, y: x.sum(0) * y,
    "mean": lambda m, x, y: x.mean() * y,
    "cumsum": lambda m, x, y: x.cumsum(1) * y,
    "broadcast": lambda m, x, y: x[0] * y,
    "cat": lambda m, x, y: m.cat([x, y]) * 1j,
    "stack": lambda m, x, y: m.stack([x, y]).sum(0),
    "views": lambda m, x, y: x.t().reshape(4)[1:].sum() * y.view(-1),
    "index": lambda m, x, y: x[m.tensor([0, 0, 1])] * y[1],
    "where": lambda m, x, y: m.where(m.tensor([[True, False], [False, True]]), x, y * 2j),
    "in place": lambda m, x, y: (x * 1j).mul_(y).add_(x),
    "in place on a part": lambda m, x, y: in_part(x * 1j, y),
    "abs": lambda m, x, y: x.abs() * 2 + y.abs(),
    "abs of a function": lambda m, x, y: (x * x * y).abs().log(),
    "abs, squared": lambda m, x, y: (x @ y).abs().pow(2).sum(),
    "real and complex": lambda m, x, y: x * m.tensor(REAL) + y,
}


def in_part(x: Any, y: Any) -> Any:
    x[0].mul_(y[1])
    return x


def gradients(m: Any, work: Callable[[Any, Any, Any], Any]) -> list[Any]:
    x, y = m.tensor(X, requires_grad=True), m.tensor(Y, requires_grad=True)
    found = work(m, x, y)
    grad = m.ones_like(found) * (1 if "complex" not in str(found.dtype) else 0.5 + 2j)
    found.backward(grad)
    return [found.tolist(), x.grad.tolist(), y.grad.tolist()]


@pytest.mark.parametrize("name", HOLOMORPHIC)
def test_gradients_of_complex_numbers_are_torchs(lt: Tensors, name: str) -> None:
    for found, wanted in zip(gradients(lt, HOLOMORPHIC[name]), gradients(torch, HOLOMORPHIC[name]), strict=True):
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted), atol=1e-5)


def test_a_real_number_has_a_real_gradient(lt: Tensors) -> None:
    def gradient(m: Any) -> Any:
        x = m.tensor(REAL, requires_grad=True)
        (x * m.tensor(Y) * (1 - 3j)).abs().sum().backward()
        return x.grad

    found = gradient(lt)
    assert found.dtype.name == "float32"
    assert torch.allclose(torch.tensor(found.tolist()), gradient(torch), atol=1e-5)


def test_the_gradient_of_a_size_of_nothing_is_nothing(lt: Tensors) -> None:
    for m in (torch, lt):
        x = m.tensor([0j, 3 + 4j], requires_grad=True)
        x.abs().sum().backward()
        assert torch.allclose(torch.tensor(x.grad.tolist()), torch.tensor([0j, 0.6 + 0.8j]))


def test_gradients_of_gradients(lt: Tensors) -> None:
    def second(m: Any) -> Any:
        x = m.tensor(X, requires_grad=True)
        (first,) = (m.grad if m is lt else torch.autograd.grad)((x**3).abs().sum(), [x], create_graph=True)
        first.abs().sum().backward()
        return x.grad.tolist()

    assert torch.allclose(torch.tensor(second(lt)), torch.tensor(second(torch)), atol=1e-4)


@pytest.mark.parametrize("name", ["norm", "std", "var"])
def test_what_is_not_holomorphic_has_torchs_gradient(lt: Tensors, name: str) -> None:
    def gradient(m: Any) -> Any:
        x = m.tensor(X, requires_grad=True)
        getattr(x, name)().backward()
        return torch.tensor(x.grad.tolist())

    assert torch.allclose(gradient(lt), gradient(torch))


@pytest.mark.parametrize("work", [lambda x: x.adjoint(), lambda x: x.mH, lambda x: x.H, lambda x: x.cov()])
def test_conjugates(lt: Tensors, work: Callable[[Any], Any]) -> None:
    assert torch.allclose(torch.tensor(work(lt.tensor(X)).tolist()), work(torch.tensor(X)), atol=1e-5)
    assert torch.allclose(torch.tensor(work(lt.tensor(REAL)).tolist()), work(torch.tensor(REAL)), atol=1e-5)


def test_functions_of_complex_numbers_are_torchs(lt: Tensors) -> None:
    for work in (lambda m, x: x.corrcoef(), lambda m, x: x.logdet(), lambda m, x: m.float_power(x, 2.0)):
        assert torch.allclose(
            torch.tensor(work(lt, lt.tensor(X)).tolist()), work(torch, torch.tensor(X)).to(torch.complex64)
        )


ONE = """
    amax amin aminmax argmax argmin argsort bernoulli ceil deg2rad digamma erf erfc erfinv floor frac isneginf
    isposinf lgamma logit median msort nansum rad2deg relu round sign signbit sort trunc unique
"""
FUNCTIONAL = """
    celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu6 selu softplus
    softshrink
"""
TWO = """
    atan2 cdist clamp clamp_max clamp_min copysign floor_divide fmax fmin fmod ge gt hypot le logaddexp2 lt maximum
    minimum remainder xlogy
"""
LACKING: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{name: lambda m, x, y, name=name: getattr(m, name)(x) for name in ONE.split()},
    **{name: lambda m, x, y, name=name: getattr(m.nn.functional, name)(x) for name in FUNCTIONAL.split()},
    **{name: lambda m, x, y, name=name: getattr(m, name)(x, y) for name in TWO.split()},
    "abs_": lambda m, x, y: x.abs_(),
    "round_": lambda m, x, y: x.round_(),
    "exponential_": lambda m, x, y: x.exponential_(),
    "topk": lambda m, x, y: x.topk(1),
    "kthvalue": lambda m, x, y: x.kthvalue(1),
    "cummax": lambda m, x, y: x.cummax(0),
    "softmax": lambda m, x, y: x.softmax(0),
    "log_softmax": lambda m, x, y: x.log_softmax(0),
    "max along a dimension": lambda m, x, y: x.max(0),
    "a complex bound": lambda m, x, y: m.tensor(REAL) < 1j,
}


@pytest.mark.parametrize("name", LACKING)
def test_what_torch_does_not_have_for_complex_numbers_is_refused(lt: Tensors, name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError)) as wanted:
        LACKING[name](torch, torch.tensor(X), torch.tensor(Y))
    with pytest.raises(wanted.type):
        settled(LACKING[name](lt, lt.tensor(X), lt.tensor(Y)))
