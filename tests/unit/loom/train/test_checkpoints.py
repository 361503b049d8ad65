"""Checkpoints: whole or not there, whatever happens while they are written and afterwards."""

from __future__ import annotations

import os
import pickle
import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from loom.errors import CheckpointBroken, CheckpointNotWritten, UnstorableState, WaitTimeout, WrongArguments
from loom.train import CheckpointStore, FoundCheckpoint
from loom.train.checkpoints import files as checkpoint_files
from tests.system.train.forks import BOUND, Fork, mount_small_disk

Tell = Callable[[Any], None]

TENSORS = "__0_0.distcp"
"""The file that torch writes tensors to."""

FSYNCS_BEFORE_RENAME = 5
"""One for each of three files, one for the manifest and one for the folder."""


def save(store: CheckpointStore, step: int) -> FoundCheckpoint:
    return store.save({"weight": torch.full((1000,), float(step)), "step": step}, step).wait(BOUND)


def saved_step(found: FoundCheckpoint | None) -> int:
    assert found is not None
    state = found.load()
    assert torch.equal(state["weight"], torch.full((1000,), float(state["step"])))
    step: int = state["step"]
    return step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def leftovers(folder: Path) -> list[str]:
    return [name for name in names(folder) if name.startswith(".")]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# -- what is saved ------------------------------------------------------------------------------------------


def test_a_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            data = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(data).square().sum().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(5))
    store = CheckpointStore(tmp_path)
    pending = store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 4)
    train(model, optimizer, range(5, 10))  # while it is written
    pending.wait(BOUND)

    again, optimizer_again = make()
    found = CheckpointStore(tmp_path).newest()
    assert found is not None
    state = found.load()
    again.load_state_dict(state["model"])
    optimizer_again.load_state_dict(state["optimizer"])
    train(again, optimizer_again, range(found.step + 1, 10))

    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": [1, -2.5, True, None, 2**63, -(2**70), float("inf")],
        "texts": ("ä\n", b"\0\xff", ""),
        3: {"nested": {0: (), 1: [], 2: {}}},
        "random": random.Random(1).getstate(),
    }

    loaded = CheckpointStore(tmp_path).save(state, 0).wait(BOUND).load()

    assert loaded == state
    assert type(loaded["numbers"][2]) is bool


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.ones(1).expand(5),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "scalar", "empty", "bfloat16", "complex", "expanded", "parameter"],
)
def test_tensors_come_back_as_they_were(tmp_path: Path, tensor: torch.Tensor) -> None:
    loaded = CheckpointStore(tmp_path).save({"a": {"b": tensor}, "a.b": tensor + 1}, 0).wait(BOUND).load()

    assert loaded["a"]["b"].dtype == tensor.dtype
    assert torch.equal(loaded["a"]["b"], tensor)
    assert torch.equal(loaded["a.b"], tensor + 1)


def test_the_state_may_be_changed_as_soon_as_save_returns(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(1000), "list": [1]}

    pending = CheckpointStore(tmp_path).save(state, 0)
    state["weight"] += 1
    state["list"].append(2)

    loaded = pending.wait(BOUND).load()
    assert not loaded["weight"].any()
    assert loaded["list"] == [1]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (object(), "state.outer.0 is a object"),
        (torch.ones(2).to_sparse(), "state.outer.0 is a Tensor"),
        ({1.5: 1}, "state.outer.0 has the key 1.5"),
        ({1, 2}, "state.outer.0 is a set"),
    ],
    ids=["object", "sparse", "key", "set"],
)
def test_what_cannot_be_stored_is_named_at_once(tmp_path: Path, value: Any, told: str) -> None:
    store = CheckpointStore(tmp_path)

    with pytest.raises(UnstorableState, match=told):
        store.save({"outer": [value]}, 0)

    assert saved_step(save(store, 1)) == 1


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(WrongArguments, match="whole number"):
        CheckpointStore(tmp_path).save({}, step)


def test_a_store_is_a_folder_that_keeps_something(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(WrongArguments, match="file"):
        CheckpointStore(tmp_path / "file")
    with pytest.raises(WrongArguments, match="not 0"):
        CheckpointStore(tmp_path, keep=0)


# -- which are there ----------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "new").newest() is None


def test_as_many_are_kept_as_asked_for(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)

    for step in (10, 20, 30, 40):
        save(store, step)

    assert names(tmp_path) == ["000003-step-30", "000004-step-40"]


def test_the_newest_is_what_was_written_last_even_of_a_lower_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)

    for step in (100, 200, 50, 50):
        save(store, step)

    assert names(tmp_path) == ["000003-step-50", "000004-step-50"]
    assert saved_step(store.newest()) == 50


def test_broken_ones_do_not_push_out_whole_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2):
        save(store, step)
    (save(store, 3).path / "manifest.json").unlink()

    save(store, 4)

    assert names(tmp_path) == ["000002-step-2", "000003-step-3", "000004-step-4"]


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: flip_a_byte(path / TENSORS), f"{TENSORS} has the SHA-256"),
        (lambda path: os.truncate(path / TENSORS, 100), f"{TENSORS} has 100 bytes instead of"),
        (lambda path: (path / "state.msgpack").unlink(), r"state.msgpack is missing"),
        (lambda path: (path / "manifest.json").unlink(), "no manifest"),
        (lambda path: (path / "manifest.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "manifest.json").write_text('{"format": 1}'), "incomplete"),
        (lambda path: (path / "manifest.json").write_text('{"format": 9}'), "format is 9"),
    ],
    ids=["hash", "size", "missing", "no manifest", "no json", "incomplete", "newer"],
)
def test_a_broken_one_is_passed_over_and_named(tmp_path: Path, harm: Callable[[Path], None], reason: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    broken = save(store, 2)
    harm(broken.path)

    found = store.newest()

    assert saved_step(found) == 1
    assert found is not None
    [skipped] = found.skipped
    assert (skipped.path, skipped.step) == (broken.path, 2)
    assert reason in skipped.reason
    with pytest.raises(CheckpointBroken, match="step 2 is not whole"):
        broken.load()


# -- while it is written ------------------------------------------------------------------------------------


def test_waiting_ends_in_time_and_the_writing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    monkeypatch.setattr(checkpoint_files, "sync_folder", lambda folder: may_go_on.wait(BOUND))
    store = CheckpointStore(tmp_path)

    pending = store.save({"step": 1}, 1)
    with pytest.raises(WaitTimeout, match="step 1 is not written"):
        pending.wait(0.01)

    assert not pending.done
    assert store.newest() is None
    may_go_on.set()
    pending.wait(BOUND)
    assert pending.done
    assert pending.error is None


def hang_at_fsync(number: int, store: CheckpointStore, tell: Tell) -> None:
    """Save, and stop for ever when something is to reach the disk for that time."""
    count = 0
    real = os.fsync

    def fsync(handle: int) -> None:
        nonlocal count
        real(handle)
        count += 1
        if count > number:
            tell("writing")
            signal.pause() if threading.current_thread() is threading.main_thread() else threading.Event().wait()

    os.fsync = fsync
    store.save({"weight": torch.full((1000,), 2.0), "step": 2}, 2).wait(BOUND)


@pytest.mark.parametrize("number", range(FSYNCS_BEFORE_RENAME))
def test_a_writer_that_is_killed_leaves_the_one_before(tmp_path: Path, number: int) -> None:
    save(CheckpointStore(tmp_path), 1)
    with Fork(lambda tell: hang_at_fsync(number, CheckpointStore(tmp_path), tell)) as child:
        assert child.told() == "writing"
        child.kill()

    found = CheckpointStore(tmp_path).newest()

    assert saved_step(found) == 1
    assert found is not None
    assert found.skipped == ()
    assert names(tmp_path) == ["000001-step-1"]


def test_a_writer_that_is_killed_after_the_rename_leaves_the_new_one(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    with Fork(lambda tell: hang_at_fsync(FSYNCS_BEFORE_RENAME, CheckpointStore(tmp_path), tell)) as child:
        assert child.told() == "writing"
        child.kill()

    assert saved_step(CheckpointStore(tmp_path).newest()) == 2


def test_what_a_living_writer_writes_is_not_removed(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    with Fork(lambda tell: hang_at_fsync(2, CheckpointStore(tmp_path), tell)) as child:
        assert child.told() == "writing"

        store = CheckpointStore(tmp_path)
        assert len(leftovers(tmp_path)) == 1

        save(store, 3)
        child.kill()
    CheckpointStore(tmp_path)
    assert names(tmp_path) == ["000001-step-1", "000002-step-3"]


def test_two_processes_write_to_one_folder(tmp_path: Path) -> None:
    def write(tell: Tell) -> None:
        store = CheckpointStore(tmp_path, keep=100)
        for step in range(10):
            save(store, step)
        tell("done")

    with Fork(write) as one, Fork(write) as other:
        assert (one.told(), other.told()) == ("done", "done")

    found = CheckpointStore(tmp_path).newest()
    assert saved_step(found) == 9
    assert len(names(tmp_path)) == 20
    assert {name.partition("-")[0] for name in names(tmp_path)} >= {"000001", "000010"}


# -- a disk that refuses ------------------------------------------------------------------------------------


def save_too_much(folder: Path) -> tuple[str, type[BaseException] | None, int, list[str]]:
    """Save a small checkpoint, one that the disk does not hold, and say what is there."""
    torch.set_num_threads(1)  # the threads of its parent are not in a forked child
    store = CheckpointStore(folder)
    save(store, 1)
    pending = store.save({"weight": torch.zeros(1_000_000)}, 2)
    with pytest.raises(CheckpointNotWritten):
        pending.wait(BOUND)
    assert pending.done
    there = names(folder)
    return str(pending.error), type(pending.error), saved_step(store.newest()), there


def test_a_full_disk_is_told_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    def on_a_small_disk(tell: Tell) -> None:
        tell(save_too_much(tmp_path) if mount_small_disk(tmp_path, "1m") else None)

    with Fork(on_a_small_disk) as child:
        told = child.told()

    if told is None:
        pytest.skip("the kernel lets this user mount no disk")
    assert not isinstance(told, str), told
    text, kind, newest, there = told
    assert "No space left on device" in text
    assert kind is CheckpointNotWritten
    assert newest == 1
    assert there == ["000001-step-1"]


def test_a_file_that_may_not_grow_is_told_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    def with_small_files(tell: Tell) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        tell(save_too_much(tmp_path))

    with Fork(with_small_files) as child:
        told = child.told()

    assert not isinstance(told, str), told
    text, _, newest, there = told
    assert "File too large" in text
    assert newest == 1
    assert there == ["000001-step-1"]


def test_after_a_failure_the_next_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(
            checkpoint_files.CheckpointManifest, "write", lambda *_: (_ for _ in ()).throw(OSError(5, "I/O"))
        )
        errors = [store.save({"step": step}, step) for step in range(3)]
        for pending in errors:
            with pytest.raises(CheckpointNotWritten, match="I/O"):
                pending.wait(BOUND)

    assert saved_step(save(store, 5)) == 5


# -- whoever can write to the folder ------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def forge_index(found: FoundCheckpoint, content: bytes) -> None:
    """Replace the index, and the manifest with its hash: whoever can write one can write the other."""
    (found.path / ".metadata").write_bytes(content)
    (found.path / checkpoint_files.MANIFEST).unlink()
    checkpoint_files.CheckpointManifest.write(found.path, found.step, found.time)


@pytest.mark.guarantees("ports", "A checkpoint cannot run code")
def test_the_index_of_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    found = save(CheckpointStore(tmp_path / "checkpoints"), 1)
    forge_index(found, pickle.dumps(Evil(tmp_path / "ran")))

    with pytest.raises(CheckpointBroken, match=r"it names posix\.mkdir"):
        found.load()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["torch load", "torch.serialization load", "pathlib os", "builtins eval"])
def test_an_index_names_only_what_torch_writes_into_one(tmp_path: Path, name: str) -> None:
    found = save(CheckpointStore(tmp_path), 1)
    forge_index(found, b"c" + name.replace(" ", "\n").encode() + b"\n.")

    with pytest.raises(CheckpointBroken, match=f"it names {name.replace(' ', '.')}"):
        found.load()


def test_an_index_of_debians_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_python_3_11_2(member: Any, protocol: int) -> Any:
        return getattr, (type(member), member.name)

    monkeypatch.setattr(metadata._MEM_FORMAT_ENCODING, "__reduce_ex__", as_python_3_11_2)
    found = save(CheckpointStore(tmp_path), 1)
    assert b"getattr" in (found.path / ".metadata").read_bytes()

    assert saved_step(found) == 1


class Attribute:
    def __reduce__(self) -> Any:
        return getattr, (torch.Size, "__reduce_ex__")


def test_an_index_takes_attributes_of_enumerations_only(tmp_path: Path) -> None:
    found = save(CheckpointStore(tmp_path), 1)
    forge_index(found, pickle.dumps(Attribute()))

    with pytest.raises(CheckpointBroken, match=r"it names __reduce_ex__ of <class 'torch\.Size'>"):
        found.load()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        pickle.dumps(metadata.Metadata({}))[:-20],
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n]tR.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n)R.",
        b"ctorch\nSize\n(I1\ntR.",
        b"I5\n}b.",
    ],
    ids=["empty", "garbage", "cut off", "a name that is a list", "no arguments", "no sizes", "a state of a number"],
)
def test_an_index_of_anything_else_is_told_as_broken(tmp_path: Path, content: bytes) -> None:
    found = save(CheckpointStore(tmp_path), 1)
    forge_index(found, content)

    with pytest.raises(CheckpointBroken, match="has an index that is none: "):
        found.load()
