"""torch's own database of operations agrees with lazy tensors: on one process, and for the core on several."""

from __future__ import annotations

import pytest
import torch

from loom.tensors.call import RULES, base
from loom.tensors.layout_rules import functions, methods
from loom.tensors.tensors import Tensors
from loom.tensors.worker.sharding import BY_PARTS
from tests.support.near_tensors import near_tensors
from tests.support.torch_agreement import PROCESSES

pytest.importorskip("expecttest", reason="torch's database of operations needs it")

from tests.support.opinfo import DTYPES, REFUSED, Operands, check, check_errors, entries, kinds, refused

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

OPERATIONS = entries()
EACH = 10
"""Of so many operations one is compared with each commit; the slow parts, of which some are, too, compare all."""
PARTS = 48
MOST = 1000 if PROCESSES == 1 else 6
"""Samples of an operation and dtype: on one process all of them."""

CORE = {*map(base, RULES), *methods, *functions, *BY_PARTS}
"""The functions with a rule on the laptop, or that are computed from parts.

On several processes each of the others is computed with whole tensors."""


@pytest.fixture
def own(lt: Tensors) -> Tensors:
    return near_tensors() if PROCESSES == 1 else lt


def problems(own: Tensors, first: int, step: int, most: int) -> list[str]:
    found = []
    for op in OPERATIONS[first::step]:
        if PROCESSES > 1 and op.name.removeprefix("nn.functional.") not in CORE:
            continue
        for kind in kinds(own, op):
            for dtype in DTYPES:
                if dtype in op.supported_dtypes("cpu"):
                    outcome = check(own, op, kind, dtype, most)
                    if outcome.problem:
                        found.append(f"{op.formatted_name} as {kind.name} in {dtype}: {outcome.problem}")
    return found


def test_some_operations_agree(own: Tensors) -> None:
    assert not problems(own, 0, 4 * EACH if PROCESSES == 1 else 5 * EACH, 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operations_agree(own: Tensors, part: int) -> None:
    assert not problems(own, part, PARTS, MOST)


@pytest.mark.skipif(PROCESSES > 1, reason="the laptop and one process raise them")
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), EACH])
def test_wrong_calls_raise_what_torch_raises(own: Tensors, step: int) -> None:
    found = [each for op in OPERATIONS[::step] if op.error_inputs_func for each in check_errors(own, op)]
    assert found
    assert not list(filter(None, found))


def test_what_does_not_travel_is_refused_at_its_line(own: Tensors) -> None:
    for op in refused():
        (kind, *_), operands = kinds(own, op), Operands(own)
        sample = next(iter(op.sample_inputs("cpu", torch.float32)))
        with pytest.raises(TypeError, match=f"{REFUSED[op.formatted_name]} is no argument .* it does not travel"):
            kind.ours(*operands.ours((sample.input, *sample.args)), **operands.ours(sample.kwargs))


def test_a_function_is_refused_at_its_line(own: Tensors) -> None:
    x, loss = own.ones(2, 2), own.triplet_margin_with_distance_loss
    with pytest.raises(TypeError, match=r"distance_loss\(\): an argument does not travel .*function"):
        loss(x, x, x, distance_function=lambda one, other: (one - other).abs().sum(-1))


@pytest.mark.skipif(PROCESSES > 1, reason="it compares nothing")
def test_most_of_the_database_is_there(own: Tensors) -> None:
    missing = {op.name for op in OPERATIONS if not kinds(own, op)}
    assert missing == {
        "broadcast_shapes", "chalf", "empty_permuted", "expand_copy", "grid_sampler_2d", "grid_sampler_3d",
        "item", "max_pool2d_with_indices_backward", "native_batch_norm", "native_dropout_backward",
        "native_group_norm", "native_layer_norm", "new_empty_strided", "nn.functional.multi_head_attention_forward",
        "slice", "split_with_sizes_copy", "unbind_copy", "__rdiv__",
    }  # fmt: skip
