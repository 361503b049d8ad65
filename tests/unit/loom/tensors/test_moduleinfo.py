"""Modules agree with torch's own database of modules: results, gradients, states, in training and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import PROCESSES, settled, to_torch

pytest.importorskip("expecttest", reason="torch's database of modules needs it")

from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from tests.support.opinfo import Operands, different, different_gradients, flat

pytestmark = [
    pytest.mark.skipif(PROCESSES > 1, reason="operations are compared on several processes, not modules"),
    pytest.mark.filterwarnings("ignore"),
]

DTYPES = (torch.float32, torch.float64, torch.complex64)
ABSENT = {
    "Bilinear", "FractionalMaxPool2d", "FractionalMaxPool3d", "GRUCell", "LSTMCell", "LazyConv1d", "LazyConv2d",
    "LazyConv3d", "LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d", "LinearCrossEntropyLoss",
    "PReLU", "RNNCell", "Softmax2d", "Transformer", "TransformerDecoderLayer", "TransformerEncoder",
    "TransformerEncoderLayer",
}  # fmt: skip
"""Modules of torch that lazy tensors do not have."""


MANY = ("nn.CrossEntropyLoss", "nn.CTCLoss", "nn.LSTM", "nn.MultiheadAttention", "nn.NLLLoss", "nn.RNN")
"""Modules of which the database has more than a hundred inputs."""


@pytest.fixture
def own() -> Tensors:
    return near_tensors()


def named(info: ModuleInfo) -> str:
    return str(info.name.removeprefix("nn."))


MODULES = [each for each in module_db if named(each) not in ABSENT]


def problem(lt: Tensors, info: ModuleInfo, dtype: torch.dtype, training: bool, given: ModuleInput) -> str:
    """Return how a module disagrees with torch's; an empty text if it agrees."""
    operands, made, to = Operands(lt), given.constructor_input, given.forward_input
    theirs = info.module_cls(*operands.theirs(made.args), **operands.theirs(made.kwargs))
    ours = getattr(lt.nn, named(info))(*operands.ours(made.args), **operands.ours(made.kwargs))
    theirs, ours = theirs.to(dtype).train(training), ours.to(operands.ours(dtype)).train(training)
    state = theirs.state_dict()
    if list(state) != list(ours.state_dict()):
        return f"its state has {list(ours.state_dict())}, not {list(state)}"
    ours.load_state_dict(state)
    if [name for name, _ in theirs.named_parameters()] != [name for name, _ in ours.named_parameters()]:
        return "it has other parameters"
    torch.manual_seed(7)
    wanted = [
        each for each in flat(theirs(*operands.theirs(to.args), **operands.theirs(to.kwargs))) if each is not None
    ]
    torch.manual_seed(7)
    found = flat(settled(ours(*operands.ours(to.args), **operands.ours(to.kwargs))))
    wanted, found = ([each for each in several if each is not None] for several in (wanted, found))
    leaves = [*zip(theirs.parameters(), ours.parameters(), strict=True), *operands.leaves]
    disagreement = different(wanted, found, False) or different_gradients(lt, wanted, found, leaves)
    for key, value in theirs.state_dict().items():
        changed = to_torch(ours.state_dict()[key]).to(value.dtype)
        if not torch.allclose(changed, value, rtol=1e-4, equal_nan=True):
            disagreement = disagreement or f"{key} is {changed} afterwards, not {value}"
    return disagreement


def problems(lt: Tensors, info: ModuleInfo, first: int, each: int) -> dict[Any, str]:
    found, number = {}, 0
    for dtype in DTYPES:
        for training in (True, False):
            if dtype not in info.supported_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
            for place, given in enumerate(inputs):
                number += 1
                if number % each == first:
                    found[dtype, training, place] = problem(lt, info, dtype, training, given)
    return {key: each for key, each in found.items() if each}


@pytest.mark.parametrize("info", MODULES, ids=named)
def test_some_inputs_of_a_module_agree(own: Tensors, info: ModuleInfo) -> None:
    assert not problems(own, info, 1, 64 if info.name in MANY else 8)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_all_inputs_of_modules_agree(own: Tensors, part: int) -> None:
    found = {named(info): problems(own, info, 0, 1) for info in MODULES[part::4]}
    assert not {name: each for name, each in found.items() if each}


def test_no_other_module_is_absent(own: Tensors) -> None:
    assert {name for name in map(named, module_db) if not hasattr(own.nn, name)} == ABSENT


@pytest.mark.parametrize("name", ["double", "half", "bfloat16", "float"])
def test_a_module_of_another_dtype_is_trained_as_before(own: Tensors, name: str) -> None:
    def trained(m: Any) -> Any:
        layer = m.nn.Linear(2, 1, device="cpu")
        kept = layer.weight
        optimizer = m.optim.SGD(layer.parameters(), 0.5)
        layer = getattr(layer.to("cpu"), name)()
        with m.no_grad():
            kept.copy_(m.ones(1, 2))
        layer(m.ones(1, 2, dtype=kept.dtype)).sum().backward()
        optimizer.step()
        return layer.weight is kept, kept.requires_grad, str(kept.dtype).rpartition(".")[2], kept.tolist()

    assert trained(own) == trained(torch)


@pytest.mark.parametrize(
    "name", ["celu", "dropout", "elu", "hardtanh", "leaky_relu", "mish", "relu", "relu6", "selu", "silu"]
)
def test_a_function_in_place(own: Tensors, name: str) -> None:
    def done(m: Any, function: Any, *args: Any) -> Any:
        x = m.tensor([-1.0, 0.5, 2.0], requires_grad=True)
        y = x * 1
        torch.manual_seed(3)
        found = function(y, *args, inplace=True)
        again = (y.tolist(), found.tolist())
        found.sum().backward()
        assert found is y
        return (*again, x.grad.tolist())

    assert done(own, getattr(own, name)) == done(torch, getattr(torch.nn.functional, name))


def test_modules_in_place(own: Tensors) -> None:
    for m in (own, torch):
        for layer in (m.nn.ReLU(True), m.nn.ReLU(inplace=True), m.nn.Sequential(m.nn.ReLU(True))):
            x = m.tensor([-1.0, 2.0])
            assert layer(x).tolist() == x.tolist() == [0.0, 2.0]
