"""Branches in the libraries: what a script loads, and where it writes, on the way into the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.branches import branch as state
from loom.branches.branch import BRANCH_VARIABLE, Branch, own_branch, resumed_from
from loom.instrument import branching
from tests.unit.loom.branches.test_checkpoints import distributed

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")


@pytest.fixture(autouse=True)
def _nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the folders of these tests from the threadlets of later ones in this process."""
    monkeypatch.setattr("loom.threadlet.threadlet.report_of_process", lambda key, value: None)
    monkeypatch.setattr(branching, "_told_by_trainer", False)


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Branch]:
    """This process as one of a branch, from step 20 of a run that has made 30."""
    run, own = tmp_path / "run", tmp_path / "own"
    kept = distributed(own / "beginning", "step-20")
    branch = Branch("first", 20, str(kept), str(run), str(own))
    monkeypatch.setenv(BRANCH_VARIABLE, branch.to_text())
    monkeypatch.setattr(state, "_loaded", False)
    own_branch.cache_clear()
    found = own_branch()
    assert found is not None
    yield found
    own_branch.cache_clear()
    resumed_from.cache_clear()


class Manager:
    """A stand-in for torchtitan's CheckpointManager."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def load(self, step: int = -1) -> bool:
        self.loaded = self.folder, step
        return True


def test_torchtitan_loads_the_step_of_the_branch_and_saves_into_its_folder(half: Branch) -> None:
    kind: Any = type("CheckpointManager", (Manager,), {"__init__": Manager.__init__, "load": Manager.load})
    branching.hook_titan(SimpleNamespace(CheckpointManager=kind))  # type: ignore[arg-type]
    manager = kind(half.folder)

    assert manager.load()

    assert manager.loaded == (f"{half.own}/beginning", 20)
    assert manager.folder == half.own
    assert branching.check_loaded() == 20


class Trainer:
    """A stand-in for transformers' Trainer, with what its hook uses."""

    def __init__(self, model: object = None, args: Any = None) -> None:
        self.args = args or SimpleNamespace(output_dir="trainer_output", logging_dir=None)

    def train(self, resume_from_checkpoint: object = None, trial: object = None) -> object:
        return resume_from_checkpoint

    def save_model(self, output_dir: str | None = None) -> str | None:
        return output_dir


def test_the_trainer_resumes_once_and_writes_into_the_branchs_folder(half: Branch) -> None:
    kind: Any = type(
        "Trainer", (Trainer,), {name: vars(Trainer)[name] for name in ("__init__", "train", "save_model")}
    )
    branching.hook_trainer(SimpleNamespace(Trainer=kind))  # type: ignore[arg-type]
    settings = SimpleNamespace(output_dir=half.folder, logging_dir=f"{half.folder}/runs/x")
    trainer = kind(None, settings)

    assert (settings.output_dir, settings.logging_dir) == (half.own, f"{half.own}/runs/x")
    assert trainer.train(False) == half.checkpoint
    assert trainer.train(trial=1) is None  # a second training of the program
    assert trainer.save_model(f"{half.folder}/final") == f"{half.own}/final"
    assert trainer.save_model() is None


def test_lightning_fits_from_the_checkpoint_and_keeps_its_own_in_the_branchs_folder(half: Branch) -> None:
    class Fitting:
        def __init__(self, *keepers: object) -> None:
            self.checkpoint_callbacks = keepers

        def fit(self, model: object, loaders: object = None, ckpt_path: object = None) -> object:
            return ckpt_path

    branching.hook_lightning(SimpleNamespace(Trainer=Fitting))  # type: ignore[arg-type]
    keepers = [SimpleNamespace(dirpath=one) for one in (None, half.folder, "/elsewhere")]
    trainer = Fitting(*keepers, object())

    assert trainer.fit("model", None, "given") == half.checkpoint
    assert [one.dirpath for one in keepers] == [half.own, half.own, "/elsewhere"]
    assert trainer.fit("model", ckpt_path="given") == "given"


def test_distributed_checkpoints_are_read_from_the_branchs_and_written_beside(
    half: Branch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.distributed.checkpoint import filesystem

    for kind in (filesystem.FileSystemWriter, filesystem.FileSystemReader):
        for name in ("__init__", "reset"):
            monkeypatch.setattr(kind, name, getattr(kind, name))
    branching.hook_distributed(filesystem)
    Path(half.checkpoint, ".metadata").unlink()
    dcp.save({"step": torch.tensor(20)}, checkpoint_id=f"{half.own}/beginning/step-20", no_dist=True)
    Path(half.own, "step-20").symlink_to("beginning/step-20")
    loaded = {"step": torch.tensor(0)}

    dcp.load(loaded, checkpoint_id=f"{half.folder}/step-30", no_dist=True)
    dcp.save({"step": torch.tensor(30)}, checkpoint_id=f"{half.folder}/step-30", no_dist=True)
    dcp.save({"step": torch.tensor(21)}, checkpoint_id=f"{half.own}/step-20", no_dist=True)

    assert loaded["step"] == 20
    assert caplog.text.count("though the program asks for") == 1
    assert Path(half.own, "step-30", ".metadata").is_file()
    assert not Path(half.folder).exists()
    dcp.load(loaded, checkpoint_id=half.checkpoint, no_dist=True)
    assert loaded["step"] == 20  # that of the link's place is another one now


def test_a_store_begins_with_the_branchs_and_saves_beside(half: Branch) -> None:
    from loom.train.checkpoints.store import CheckpointStore

    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(BRANCH_VARIABLE)
        own_branch.cache_clear()
        CheckpointStore(f"{half.own}/beginning").save({"n": 20}, 20).wait()
    own_branch.cache_clear()
    store = CheckpointStore(half.folder)

    found = store.newest()
    assert found is not None
    assert found.load()["n"] == 20
    assert branching.check_loaded() == 20
    store.save({"n": 30}, 30).wait()
    newest = store.newest()
    assert newest is not None
    assert newest.step == 30
    assert not Path(half.folder).exists()


def test_a_program_that_has_loaded_nothing_ends_before_its_first_step(half: Branch) -> None:
    with pytest.raises(SystemExit, match="has loaded no checkpoint of first"):
        branching.check_loaded()


def test_a_branch_that_is_started_again_goes_on_from_its_own_newest(half: Branch) -> None:
    distributed(Path(half.own), "step-40")

    assert resumed_from(half) == (40, f"{half.own}/step-40")


def test_outside_a_branch_the_hooks_change_nothing_but_note_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(BRANCH_VARIABLE, raising=False)
    own_branch.cache_clear()
    for hook in (branching.hook_trainer, branching.hook_lightning, branching.hook_titan):
        kind = type("Kind", (), {"fit": None})
        hook(SimpleNamespace(Trainer=kind, CheckpointManager=kind))  # type: ignore[arg-type]
        assert "__init__" not in vars(kind)
    told: list[str] = []
    monkeypatch.setattr(branching, "tell_folder", lambda path, by_trainer: told.append(path))
    writer = type("FileSystemWriter", (), {"__init__": lambda self, path: None})
    branching.hook_distributed(SimpleNamespace(FileSystemWriter=writer))  # type: ignore[arg-type]

    writer(str(tmp_path / "step-1"))  # type: ignore[call-arg]

    assert told == [str(tmp_path)]


def test_a_trainers_folder_holds_though_its_checkpoints_have_parts_of_another_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr("loom.threadlet.threadlet.report_of_process", lambda key, value: told.append((key, value)))
    monkeypatch.setattr(branching, "_told_by_trainer", False)

    branching.tell_folder("/kept", by_trainer=False)
    branching.tell_folder("/out")
    branching.tell_folder("/out/checkpoint-10", by_trainer=False)

    assert told == [("checkpoint_folder", "/kept"), ("checkpoint_folder", "/out")]
