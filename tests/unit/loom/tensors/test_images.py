"""Padding, resizing, transposed convolutions and pooling agree with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from loom.tensors.tensors import Tensors
from tests.support.torch_agreement import Operand, agree, given, operands, shapes
from tests.unit.loom.tensors.test_mathematics import of

FLOAT64 = [torch.float64]


def channels_last(*shape: int) -> Operand:
    _, channels, height, width = shape
    memory = of(*shape).memory
    strides = (channels * height * width, 1, width * channels, channels)
    return Operand(memory, shape, strides, 0, True)


@given(st.data())
def test_padding_with_a_constant(lt: Tensors, data: Any) -> None:
    x = data.draw(operands(dtypes=(torch.float64, torch.float64, torch.int64, torch.bool)))
    pads = data.draw(st.lists(st.integers(-1, 2), max_size=2 * len(x.size) + 1))
    agree(lt, lambda ns, x: ns.nn.functional.pad(x, pads, value=2), [x])


@given(st.data())
def test_padding_with_what_is_within(lt: Tensors, data: Any) -> None:
    many = data.draw(st.integers(1, 3))
    x = data.draw(operands(data.draw(shapes(many + 1, many + 2, 4, 1)), FLOAT64))
    pads = data.draw(st.lists(st.integers(-1, 3), min_size=2 * many, max_size=2 * many))
    mode = data.draw(st.sampled_from(["reflect", "replicate", "circular"]))
    agree(lt, lambda ns, x: ns.nn.functional.pad(x, pads, mode=mode), [x])


@pytest.mark.parametrize("x", [of(2, 3, 4, 5), channels_last(2, 3, 4, 5)])
@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular", "most"])
def test_padding_of_images(lt: Tensors, x: Operand, mode: str) -> None:
    agree(lt, lambda ns, x: ns.nn.functional.pad(x, (1, 2, 1, 0), mode=mode), [x])


SIZES: list[dict[str, Any]] = [
    {"scale_factor": 2}, {"size": 3}, {"size": (3, 7)}, {"scale_factor": (1.7, 0.6)},
    {"size": 3, "scale_factor": 2}, {"scale_factor": 1.7, "recompute_scale_factor": True}, {}, {"size": (3, 3, 3)},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area", "linear"])
@pytest.mark.parametrize("options", SIZES)
def test_resizing(lt: Tensors, mode: str, options: dict[str, Any]) -> None:
    for x in (of(1, 2, 4, 5), channels_last(1, 3, 4, 5)):
        agree(lt, lambda ns, x: ns.nn.functional.interpolate(x, **options, mode=mode), [x])


@pytest.mark.parametrize("corners", [None, True, False])
def test_resizing_with_corners(lt: Tensors, corners: bool | None) -> None:
    for mode, x in LINES_AND_SPACES:
        agree(lt, lambda ns, x, mode=mode: resized(ns, x, mode, corners), [x])


LINES_AND_SPACES = (
    ("nearest", of(1, 2, 4)),
    ("linear", of(1, 2, 4)),
    ("bicubic", of(1, 1, 3, 4)),
    ("bilinear", of(1, 1, 3, 4)),
    ("trilinear", of(1, 1, 2, 3, 2)),
    ("nearest", of(1, 1, 2, 3, 2)),
)


def resized(ns: Any, x: Any, mode: str, corners: bool | None) -> Any:
    return ns.nn.functional.interpolate(x, scale_factor=2, mode=mode, align_corners=corners)


@pytest.mark.parametrize("x", [of(2, 4, 4, 6), channels_last(2, 4, 4, 6), of(4, 2, 2), of(2, 2), of(1, 3, 3, 3)])
def test_channels_and_pixels(lt: Tensors, x: Operand) -> None:
    agree(lt, lambda ns, x: ns.nn.functional.pixel_shuffle(x, 2), [x])
    agree(lt, lambda ns, x: ns.nn.functional.pixel_unshuffle(x, 2), [x])
    agree(lt, lambda ns, x: ns.nn.functional.channel_shuffle(x, 2), [x])


WAYS: list[dict[str, Any]] = [
    {}, {"stride": 2, "output_padding": 1}, {"padding": 1}, {"dilation": 2}, {"groups": 2}, {"output_padding": 3},
    {"stride": 0},
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_transposed_convolutions(lt: Tensors, way: dict[str, Any]) -> None:
    for name, x, weight in (
        ("conv_transpose1d", of(2, 4, 5), of(4, 2, 3)),
        ("conv_transpose2d", of(2, 4, 3, 4), of(4, 2, 3, 2)),
        ("conv_transpose2d", channels_last(2, 4, 3, 4), of(4, 2, 3, 2)),
        ("conv_transpose3d", of(4, 2, 3, 2), of(4, 1, 2, 2, 1)),
    ):
        bias = of(weight.size[1] * way.get("groups", 1))
        agree(lt, lambda ns, *given, name=name: getattr(ns.nn.functional, name)(*given, **way), [x, weight, bias])


def test_transposed_convolutions_of_what_does_not_fit(lt: Tensors) -> None:
    for x, weight in ((of(4, 3, 3), of(3, 2, 2, 2)), (of(4, 3), of(4, 2, 2, 2)), (of(1, 4, 3, 3), of(4, 2, 2))):
        agree(lt, lambda ns, x, w: ns.nn.functional.conv_transpose2d(x, w), [x, weight])


@pytest.mark.parametrize("way", [{}, {"stride": 2, "padding": 1}, {"dilation": (1, 2, 1), "groups": 2}])
def test_convolutions_of_three_dimensions(lt: Tensors, way: dict[str, Any]) -> None:
    weight = of(2, 4 // way.get("groups", 1), 2, 2, 2)
    agree(lt, lambda ns, x, w, b: ns.nn.functional.conv3d(x, w, b, **way), [of(1, 4, 3, 4, 3), weight, of(2)])


@pytest.mark.parametrize("x", [of(3, 6), of(2, 3, 6), of(2, 3, 4, 6)])
def test_pooling_of_lines(lt: Tensors, x: Operand) -> None:
    agree(lt, lambda ns, x: ns.nn.functional.max_pool1d(x, 2), [x])
    agree(lt, lambda ns, x: ns.nn.functional.max_pool1d(x, 3, 2, 1, return_indices=True), [x])
    agree(lt, lambda ns, x: ns.nn.functional.avg_pool1d(x, 3, 1, 1), [x])
    agree(lt, lambda ns, x: ns.nn.functional.adaptive_avg_pool1d(x, 4), [x])


@pytest.mark.parametrize("x", [of(2, 3, 4, 6), channels_last(2, 3, 4, 6), of(3, 4, 4), of(3, 4)])
def test_the_largest_of_fitting_windows(lt: Tensors, x: Operand) -> None:
    agree(lt, lambda ns, x: ns.nn.functional.adaptive_max_pool2d(x, (2, 3)), [x])
    agree(lt, lambda ns, x: ns.nn.functional.adaptive_max_pool2d(x, (2, None), return_indices=True), [x])


@pytest.mark.parametrize("x", [of(2, 4, 3, 3), channels_last(2, 4, 3, 3), of(2, 4, 3), of(2, 4, 1)])
def test_norms_of_images(lt: Tensors, x: Operand) -> None:
    weight, bias = of(4), of(4, low=0)
    means, variances = of(4, grad=False), of(4, grad=False, low=0.5)
    agree(lt, lambda ns, x: ns.nn.functional.instance_norm(x), [x])
    agree(lt, lambda ns, x, w, b: ns.nn.functional.instance_norm(x, weight=w, bias=b), [x, weight, bias])
    agree(lt, lambda ns, x, m, v: (ns.nn.functional.instance_norm(x, m, v), m, v), [x, means, variances])
    agree(lt, lambda ns, x: ns.nn.functional.local_response_norm(x, 3), [x])


@given(st.data())
def test_windows_as_columns_and_back(lt: Tensors, data: Any) -> None:
    pairs = st.one_of(st.integers(1, 2), st.tuples(st.integers(1, 2), st.integers(1, 2)))
    kernel, dilation, stride = data.draw(pairs), data.draw(pairs), data.draw(pairs)
    padding = data.draw(st.integers(0, 1))
    lead = data.draw(st.sampled_from([(2, 3), (3,), (0, 2), ()]))
    x = data.draw(operands((*lead, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))))

    def work(ns: Any, x: Any) -> Any:
        functional = ns.nn.functional
        columns = functional.unfold(x, kernel, dilation, padding, stride)
        return columns, functional.fold(columns * 1, tuple(x.shape[-2:]), kernel, dilation, padding, stride)

    agree(lt, work, [x])


FOLDED = [
    ("no image", lambda functional, x: functional.unfold(x[0], 1)),
    ("too large", lambda functional, x: functional.unfold(x, 9)),
    ("no window", lambda functional, x: functional.unfold(x, 0)),
    ("no step", lambda functional, x: functional.unfold(x, 1, stride=0)),
    ("ints", lambda functional, x: functional.unfold(x.long(), 1)),
    ("no columns", lambda functional, x: functional.fold(x[0, 0], (2, 2), 1)),
    ("channels", lambda functional, x: functional.fold(x, (2, 2), (2, 2))),
    ("blocks", lambda functional, x: functional.fold(x, (2, 2), 1)),
]


@pytest.mark.parametrize(("name", "work"), FOLDED, ids=[name for name, _ in FOLDED])
def test_what_does_not_fold_is_refused(lt: Tensors, name: str, work: Any) -> None:
    agree(lt, lambda ns, x: work(ns.nn.functional, x), [of(2, 3, 5)])
