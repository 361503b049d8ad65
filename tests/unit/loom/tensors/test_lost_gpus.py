"""What a program is told whose GPU has ended its work, and one whose processes share a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import loom
from loom.tensors.tensors import Tensors
from loom.tensors.worker.process_group import check_gpus
from tests.support.near_tensors import near_tensors


def fail(*_: Any) -> None:
    raise torch.AcceleratorError("CUDA error: device-side assert triggered\nSearch for it\n")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Tensors:
    monkeypatch.setattr(torch.fft, "rfft", fail)
    return near_tensors()


def test_after_it_nothing_is_there_but_the_checkpoint(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    x = own.ones(3)
    assert x.tolist() == [1.0] * 3
    wrong = own.call("fft.rfft", x)
    for each in (wrong, x, own.call("fft.rfft", own.ones(2))):
        with pytest.raises(
            loom.OperationFailed,
            match=r"^CUDA error: device-side assert triggered: an operation before .* lt\.restore\(\)$",
        ):
            each.tolist()
    with pytest.raises(loom.OperationFailed, match="device-side assert"):
        own.synchronize()
    x = own.zeros(2)
    assert x.tolist() == [0.0, 0.0], "this device is the CPU"


def test_it_names_the_operation_where_each_is_waited_for(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    x = own.ones(3)
    wrong = own.call("fft.rfft", x)
    for each in (wrong, x):
        with pytest.raises(
            loom.OperationFailed, match=r"(?s)^fft\.rfft\(float32\[3\]\).*lt\.restore\(\)"
        ) as caught:
            each.tolist()
        assert f"queued at {Path(__file__)}" in str(caught.value)


def test_an_error_of_one_operation_leaves_the_rest(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    x = own.ones(3)
    with pytest.raises(loom.OperationFailed, match=r"^fft\.rfft\(float32\[3\]\)"):
        own.call("fft.rfft", x).tolist()
    assert x.tolist() == [1.0] * 3


def test_what_cannot_be_read_is_told_and_the_rest_is_there(own: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    x = own.ones(3)
    with monkeypatch.context() as full:
        full.setattr(torch.Tensor, "cpu", lambda self: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
        with pytest.raises(loom.OperationFailed, match=r"^it cannot be read: no room"):
            x.tolist()
    assert x.tolist() == [1.0] * 3


def test_processes_that_share_a_gpu_are_named() -> None:
    check_gpus(["GPU-a", "GPU-b"])
    with pytest.raises(RuntimeError, match="processes 1 and 3 share the GPU GPU-b, and NCCL"):
        check_gpus(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])
