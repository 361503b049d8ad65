"""Weights in folders are whole or not there, also if their writer is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import loom
from loom.rl.generation import weight_files as weights

STATE = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = weights.save(STATE, {"width": 4}, tmp_path / "weights", 3)

    state, config = weights.load(path)

    assert path == tmp_path / "weights" / "step_3" == weights.path_of(tmp_path / "weights", 3)
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "model.safetensors"]
    assert config == {"width": 4}
    assert all(
        torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype for name, tensor in STATE.items()
    )


def test_tied_and_strided_tensors_are_saved(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state, _ = weights.load(weights.save({"a": base, "tied": base, "turned": base.T}, {}, tmp_path, 0))
    assert torch.equal(state["tied"], base)
    assert torch.equal(state["turned"], base.T)


def test_the_newest_whole_step_is_the_latest(tmp_path: Path) -> None:
    assert weights.latest(tmp_path / "nothing") is None
    for step in (9, 10, 2):
        weights.save(STATE, {}, tmp_path, step)
    (tmp_path / "step_11").mkdir()
    (tmp_path / "step_x").mkdir()
    assert weights.latest(tmp_path) == 10


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def lengthen(path: Path) -> None:
    with open(path / "model.safetensors", "ab") as file:
        file.write(b"more")


def cut_to_nothing(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def garbage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\xff" * 200)


def lose_model(path: Path) -> None:
    (path / "model.safetensors").unlink()


def lose_config(path: Path) -> None:
    (path / "config.json").unlink()


def break_config(path: Path) -> None:
    (path / "config.json").write_text('{"a": ')


def other_config(path: Path) -> None:
    (path / "config.json").write_text("[1]")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, "bytes instead of"),
        (lengthen, "bytes instead of"),
        (cut_to_nothing, "no whole header"),
        (garbage, "no whole header"),
        (lose_model, "model.safetensors is missing"),
        (lose_config, "config.json is missing"),
        (break_config, "cannot be read"),
        (other_config, "cannot be read"),
    ],
)
def test_broken_weights_are_passed_over_and_say_what_is_wrong(harm: object, reason: str, tmp_path: Path) -> None:
    weights.save(STATE, {}, tmp_path, 1)
    harm(weights.save(STATE, {}, tmp_path, 2))  # type: ignore[operator]

    assert weights.latest(tmp_path) == 1
    with pytest.raises(loom.CheckpointBroken, match=f"step_2 are not whole: .*{reason}"):
        weights.load(weights.path_of(tmp_path, 2))


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = weights.save(STATE, {}, tmp_path, 2)
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(loom.CheckpointBroken, match="checksum"):
        weights.load(path)


def test_weights_of_others_without_a_checksum_are_loaded(tmp_path: Path) -> None:
    path = weights.save(STATE, {"width": 4}, tmp_path, 2)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    state, config = weights.load(path)
    assert torch.equal(state["a"], STATE["a"])
    assert config == {"model_type": "llama"}


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    weights.save(STATE, {}, tmp_path, 2)
    weights.save({"a": torch.zeros(1)}, {}, tmp_path, 2)
    assert list(weights.load(weights.path_of(tmp_path, 2))[0]) == ["a"]
    assert [each.name for each in tmp_path.iterdir()] == ["step_2"]


def test_old_weights_are_removed_and_whole_ones_are_counted(tmp_path: Path) -> None:
    for step in range(5):
        weights.save(STATE, {}, tmp_path, step, keep=3)
    truncate(weights.path_of(tmp_path, 4))
    weights.save(STATE, {}, tmp_path, 5, keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step_3", "step_4", "step_5"]
    with pytest.raises(loom.WrongArguments, match="at least 1"):
        weights.save(STATE, {}, tmp_path, 6, keep=0)


def test_a_wrong_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(loom.WrongArguments, match="from 0, not -1"):
        weights.save(STATE, {}, tmp_path, -1)


SAVES = """
import sys, torch
from loom.rl.generation import weight_files as weights
state = {f"layer{number}": torch.full((256, 1024), float(number)) for number in range(16)}
print("ready", flush=True)
for step in range(1000):
    weights.save(state, {}, sys.argv[1], step % 3, keep=2)
"""


@pytest.mark.guarantees("rl run", "Weights are whole or not there, whenever the writer is killed")
@pytest.mark.slow
def test_a_killed_writer_leaves_whole_weights_only(tmp_path: Path) -> None:
    for number in range(5):
        writer = subprocess.Popen([sys.executable, "-c", SAVES, tmp_path], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer, writer.stdout as lines:
            assert lines.readline() == b"ready\n"
            aside = tmp_path.glob(".aside-*/model.safetensors")
            deadline = time.monotonic() + 60
            while not any(aside) and time.monotonic() < deadline:  # it is in the middle of a save
                aside = tmp_path.glob(".aside-*/model.safetensors")
            time.sleep(random.Random(number).random() / 50)
            writer.send_signal(signal.SIGKILL)
        for path in tmp_path.glob("step_*"):
            assert weights.whats_wrong(path, checksum=True) is None

    weights.save(STATE, {}, tmp_path, 7)
    assert not list(tmp_path.glob(".aside-*")), "what the killed writers had begun is removed"
    assert weights.latest(tmp_path) == 7
