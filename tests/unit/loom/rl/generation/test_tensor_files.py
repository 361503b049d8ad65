"""Files of tensors are written tensor by tensor, as safetensors reads them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loom.rl.generation import tensor_files

MIXED = {
    "small": torch.tensor([True, False, True]),
    "single": torch.tensor(3.5),
    "half": torch.arange(3, dtype=torch.float16),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "long": torch.tensor([2**40]),
    "nothing": torch.empty(0, 4),
}


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float64"])
def test_safetensors_reads_every_kind(tmp_path: Path, dtype: str | None) -> None:
    tensor_files.write(tmp_path / "file", MIXED, dtype)

    read = load_file(tmp_path / "file")

    floating = getattr(torch, dtype) if dtype else None
    expected = {name: one.to(floating) if one.is_floating_point() else one for name, one in MIXED.items()}
    torch.testing.assert_close(read, expected, rtol=0, atol=0)
    assert tensor_files.whats_wrong(tmp_path / "file") is None


def test_a_last_change_is_made_to_each_whole_tensor(tmp_path: Path) -> None:
    tensor_files.write(tmp_path / "file", MIXED, None, lambda name, one: one * 2 if name == "single" else one)

    assert float(load_file(tmp_path / "file")["single"]) == 7.0


def test_a_full_disk_is_told_after_all_tensors_were_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered: list[str] = []

    class FullDisk:
        """Stands in for a file on a disk that is full after the header."""

        def __init__(self, *_: Any) -> None:
            self.writes = 0

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, data: object) -> None:
            self.writes += 1
            if self.writes > 1:
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_files, "open", FullDisk, raising=False)

    with pytest.raises(OSError, match="No space left"):
        tensor_files.write(tmp_path / "file", MIXED, None, lambda name, one: gathered.append(name) or one)
    assert len(gathered) == len(MIXED)
