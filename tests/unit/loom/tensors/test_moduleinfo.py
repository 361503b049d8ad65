"""Modules agree with torch's own database of modules: results, gradients, states, in training and without."""

from __future__ import annotations

from inspect import isroutine
from typing import Any

import pytest
import torch

from loom.errors import NotSupported, OperationFailed
from loom.tensors.names import MODULES as MODULES_OF_TORCH
from loom.tensors.tensors import Tensors
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import PROCESSES, settled, to_torch

pytest.importorskip("expecttest", reason="torch's database of modules needs it")

from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

from tests.support.opinfo import Operands, different, different_gradients, flat

pytestmark = [
    pytest.mark.skipif(PROCESSES > 1, reason="operations are compared on several processes, not modules"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

DTYPES = (torch.float32, torch.float64, torch.complex64)
ABSENT = {
    "LazyConv1d", "LazyConv2d", "LazyConv3d", "LazyConvTranspose1d", "LazyConvTranspose2d", "LazyConvTranspose3d",
}  # fmt: skip
"""Modules whose parameters have no shape until they see an input, and which the laptop could not list."""


MANY = (
    "nn.CrossEntropyLoss", "nn.CTCLoss", "nn.LinearCrossEntropyLoss", "nn.LSTM", "nn.MultiheadAttention",
    "nn.NLLLoss", "nn.RNN", "nn.Transformer", "nn.TransformerDecoderLayer", "nn.TransformerEncoder",
    "nn.TransformerEncoderLayer",
)  # fmt: skip
"""Modules of which the database has more than a hundred inputs, or inputs that take long."""


PARTS = 12


@pytest.fixture
def own() -> Tensors:
    return near_tensors()


def named(info: ModuleInfo) -> str:
    return str(info.name.removeprefix("nn."))


MODULES = [each for each in module_db if named(each) not in ABSENT]


def ours_of(operands: Operands, lt: Tensors, value: Any) -> Any:
    """Return an argument of a module for lazy tensors; a layer of an encoder is made anew."""
    if not isinstance(value, torch.nn.TransformerEncoderLayer):
        return operands.ours(value)
    width, wide = value.linear1.in_features, value.linear1.out_features
    options = {"batch_first": value.self_attn.batch_first, "norm_first": value.norm_first}
    options |= {
        "activation": ("relu", "relu", "gelu")[value.activation_relu_or_gelu],
        "bias": value.linear1.bias is not None,
        "layer_norm_eps": value.norm1.eps,
    }
    layer = lt.nn.TransformerEncoderLayer(width, value.self_attn.num_heads, wide, value.dropout.p, **options)
    layer.load_state_dict(value.state_dict())
    return layer


def is_refused(name: str, value: Any) -> bool:
    """Whether an argument of a module that the workers make does not travel: a tensor, a function or options."""
    odd = isinstance(value, (torch.Tensor, LinearCrossEntropyOptions)) or isroutine(value)
    return name in MODULES_OF_TORCH and odd


def problem(lt: Tensors, info: ModuleInfo, dtype: torch.dtype, training: bool, given: ModuleInput) -> str:
    """Return how a module disagrees with torch's; an empty text if it agrees."""
    operands, made, to = Operands(lt), given.constructor_input, given.forward_input
    theirs = info.module_cls(*operands.theirs(made.args), **operands.theirs(made.kwargs))
    kind = getattr(lt.nn, named(info))
    args = [ours_of(operands, lt, each) for each in made.args]
    kwargs = {key: ours_of(operands, lt, each) for key, each in made.kwargs.items()}
    if any(is_refused(named(info), each) for each in (*made.args, *made.kwargs.values())):
        with pytest.raises((NotSupported, TypeError), match="is no argument of"):
            kind(*args, **kwargs)
        return ""
    ours = kind(*args, **kwargs)
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
@pytest.mark.parametrize("part", range(PARTS))
def test_all_inputs_of_modules_agree(own: Tensors, part: int) -> None:
    found = {named(info): problems(own, info, 0, 1) for info in MODULES[part::PARTS]}
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


def test_parts_of_a_module_of_the_workers(own: Tensors) -> None:
    layer = own.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    encoder = own.nn.TransformerEncoder(layer, 2)
    assert len(encoder.layers) == 2
    assert encoder.layers[1].linear1.weight.tolist() == layer.linear1.weight.tolist()
    x = own.randn(2, 3, 4)
    assert to_torch(encoder(x)).allclose(to_torch(encoder.layers[1](encoder.layers[0](x))), atol=1e-6)
    assert own.nn.LSTM(3, 5, num_layers=2).hidden_size == 5
    with pytest.raises(NotSupported, match="it has no part 'linear1' of yours"):
        layer.linear1 = own.nn.Linear(4, 8)
    with pytest.raises(NotSupported, match="a Linear is no argument of a module"):
        own.nn.TransformerEncoder(own.nn.Linear(2, 2), 2)
    with pytest.raises(OperationFailed, match="embed_dim must be divisible by num_heads"):
        own.nn.MultiheadAttention(5, 2)


def test_a_module_of_the_workers_asks_once(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    read = own._dispatcher.read
    monkeypatch.setattr(own._dispatcher, "read", lambda *args: asked.append(args) or read(*args))
    for length in (3, 4, 5):
        lstm = own.nn.LSTM(2, 4)
        found, (hidden, cell) = lstm(own.randn(length, 1, 2))
        (found.sum() + hidden.sum() + cell.sum()).backward()
    assert len(asked) == 2  # the names of its parameters, and how many results it has


def test_a_compiled_step_of_a_module_of_the_workers(own: Tensors) -> None:
    lstm = own.nn.LSTM(2, 4)
    optimizer = own.optim.SGD(lstm.parameters(), 0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = lstm(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compiled = own.compile(step)
    x = own.randn(3, 1, 2)
    losses = [compiled(x).item() for _ in range(6)]
    assert losses == sorted(losses, reverse=True)
    assert compiled._bodies
