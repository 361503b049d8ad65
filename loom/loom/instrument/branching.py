"""Branches in the libraries: each loads the branch's checkpoint, and writes into the branch's own folder.

The script says neither: it is as it was for the run that is branched. Only on the way into the library is changed
what it loads, and where it writes. In a process of no branch, only the folder of its checkpoints is noted.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from loom.branches.branch import FOLDER_KEY, Branch, is_loaded, note_loaded, own_branch, resumed_from
from loom.branches.checkpoints import part_of_checkpoint
from loom.instrument.training import guarded

_log = logging.getLogger("loom")


_told_by_trainer = False


def tell_folder(path: str | os.PathLike[str], by_trainer: bool = True) -> None:
    """Report the folder of this process's checkpoints.

    Args:
        by_trainer: whether a trainer tells it; parts of its checkpoints may be written by another library.
    """
    from loom.threadlet.threadlet import report_of_process  # which processes that never train have no need of

    global _told_by_trainer
    if _told_by_trainer and not by_trainer:
        return
    _told_by_trainer = by_trainer
    report_of_process(FOLDER_KEY, os.path.abspath(path))


def check_loaded() -> int:
    """Return the step from which this process of a branch goes on, if it has loaded a checkpoint.

    Raises:
        SystemExit: it has not, and would train from the beginning.
    """
    branch = own_branch()
    assert branch is not None
    if not is_loaded() and not branch.given:
        raise SystemExit(
            f"loom branch: the program begins to train, and has loaded no checkpoint of {branch.run}. Say how it "
            "resumes: loom branch … --argument '--resume={checkpoint}', with the option that it has for that"
        )
    return resumed_from(branch)[0]


def hook_trainer(module: ModuleType) -> None:
    """Hook ``transformers.trainer`` in a branch."""
    kind, branch = module.Trainer, own_branch()
    if branch is None:
        return
    made, trained, saved = kind.__init__, kind.train, kind.save_model

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        settings = kwargs.get("args", args[1] if len(args) > 1 else None)
        _redirect_all(branch, settings, ("output_dir", "logging_dir"))
        made(self, *args, **kwargs)
        _redirect_all(branch, self.args, ("output_dir", "logging_dir"))

    @functools.wraps(trained)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_loaded():
            return trained(self, *args, **kwargs)
        return _with(trained, (self, *args), kwargs, resume_from_checkpoint=_load(branch))

    @functools.wraps(saved)
    def save_model(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return saved(self, output_dir and branch.redirected(output_dir), *args, **kwargs)

    kind.__init__, kind.train, kind.save_model = make, train, save_model


def hook_lightning(module: ModuleType) -> None:
    """Hook ``lightning.pytorch.trainer.trainer``, or ``pytorch_lightning.trainer.trainer``, in a branch."""
    branch, fitted = own_branch(), module.Trainer.fit
    if branch is None:
        return

    @functools.wraps(fitted)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        for keeper in self.checkpoint_callbacks:
            if hasattr(keeper, "dirpath"):
                keeper.dirpath = branch.own if keeper.dirpath is None else branch.redirected(str(keeper.dirpath))
        if is_loaded():
            return fitted(self, *args, **kwargs)
        return _with(fitted, (self, *args), kwargs, ckpt_path=_load(branch))

    module.Trainer.fit = fit


def hook_titan(module: ModuleType) -> None:
    """Hook ``torchtitan.components.checkpoint`` in a branch."""
    kind, branch = module.CheckpointManager, own_branch()
    if branch is None:
        return
    made, loaded = kind.__init__, kind.load

    @functools.wraps(made)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _redirect_all(branch, self, ("folder",))

    @functools.wraps(loaded)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.folder
        step, path = resumed_from(branch)
        self.folder = os.path.dirname(path)
        try:
            done = loaded(self, step=step)
        finally:
            self.folder = own
        if done:
            note_loaded()
        return done

    kind.__init__, kind.load = make, load


def hook_distributed(module: ModuleType) -> None:
    """Hook ``torch.distributed.checkpoint.filesystem``: note where checkpoints go; in a branch, change that."""
    branch = own_branch()
    if branch is None:
        _before_made(module.FileSystemWriter, _note_writer)
        return
    _redirect_paths(module.FileSystemWriter, functools.partial(_written, branch))
    _redirect_paths(module.FileSystemReader, functools.partial(_read, branch))


@guarded("distributed checkpoints")
def _note_writer(path: Any = None, **_: Any) -> None:
    if path is not None and not hasattr(path, "protocol"):
        tell_folder(os.path.dirname(os.path.abspath(path)), by_trainer=False)


def _before_made(kind: Any, note: Callable[..., object]) -> None:
    """Call a function with the arguments of each object that is made. It is in no traceback of the class's own."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        note(*args[:1], **kwargs)
        return object.__new__(cls)

    kind.__new__ = new


def _redirect_paths(kind: Any, redirected: Callable[[Any], Any]) -> None:
    """Change the paths with which objects of a class are made, and set to another checkpoint."""
    made, reset = kind.__init__, kind.reset

    @functools.wraps(made)
    def make(self: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        made(self, redirected(path), *args, **kwargs)

    @functools.wraps(reset)
    def set_again(self: Any, checkpoint_id: Any = None) -> None:
        reset(self, checkpoint_id and redirected(checkpoint_id))

    kind.__init__, kind.reset = make, set_again


def _written(branch: Branch, path: Any) -> Any:
    """Return the path to which a checkpoint goes."""
    to = branch.redirected(os.fspath(path))
    if os.path.islink(to):  # the checkpoint from which the branch began, where the script looks for it
        os.unlink(to)
    tell_folder(os.path.dirname(os.path.abspath(to)), by_trainer=False)
    return to


def _read(branch: Branch, path: Any) -> Any:
    """Return the path from which a checkpoint is read: the branch's for each of the run's."""
    asked = os.path.realpath(os.fspath(path))
    checkpoint = os.path.realpath(resumed_from(branch)[1])
    if branch.redirected(asked) == asked and not branch.owns(asked):
        return path  # of something else, such as a model to begin with
    if is_loaded() and branch.owns(asked):
        return path
    to = os.path.normpath(os.path.join(checkpoint, part_of_checkpoint(asked)))
    if asked != to and not is_loaded():
        _log.warning("the branch loads %s, though the program asks for %s", to, path)
    note_loaded()
    return to


def _load(branch: Branch) -> str:
    note_loaded()
    return resumed_from(branch)[1]


def _redirect_all(branch: Branch, holder: Any, names: tuple[str, ...]) -> None:
    for name in names:
        path = getattr(holder, name, None)
        if isinstance(path, (str, os.PathLike)) and (to := branch.redirected(os.fspath(path))) != os.fspath(path):
            setattr(holder, name, to)


def _with(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], **changed: Any) -> Any:
    """Call a function with some of its arguments changed, however they were given."""
    given = inspect.signature(function).bind(*args, **kwargs)
    given.arguments.update(changed)
    return function(*given.args, **given.kwargs)
