"""`Job.sync`, which ships a project folder to every host; its code travels by reference from then on."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from loom.errors import NameTaken, SyncFailed, WaitTimeout, WrongArguments
from loom.manifest import STANDARD_MODULES, Manifest, TreeEntry, batches, check_sizes, human_size
from loom.wire.bodies import BeginSync, CommitSync, SendPieces
from loom.wire.messages import Buffer
from loom_proxy.code_sync.scan import FoundFile, UnchangedFile, find_files, hash_files
from loom_proxy.futures.future import FutureProxy
from loom_proxy.progress import EVERY, Progress, WaitStep, wanted
from loom_proxy.session.calls import Calls

BATCH = 2 << 20  # bytes of contents in one message

BATCH_PIECES = 512

WINDOW = 4  # messages that are on their way at a time
LONGEST_PATTERN = 4096  # characters of a pattern, as of a path
ATTEMPTS = 3  # attempts to send contents that the cluster loses before the sync is complete
QUICK = 0.5  # seconds that a sync may take without a progress display

_SAMPLE = 16 << 10


@dataclass(frozen=True)
class SyncResult:
    """The result of `Job.sync`."""

    name: str
    """The folder's name in the session."""
    files: int
    """Files and links of the folder that every host has now."""
    bytes: int
    """Total size of those files."""
    sent_files: int
    """Contents that had to be sent; equal files are sent once."""
    sent_bytes: int
    """Total size of the sent contents, before compression."""
    skipped: int
    """Files and folders that were left out; a folder counts as one."""
    digest: str
    """SHA-256 over all paths and contents, which identifies the state of the folder."""
    seconds: float
    """Duration of the sync."""
    warnings: tuple[str, ...] = ()
    """Sentences about surprising effects, such as a file that was left out."""


class _ModuleFile(NamedTuple):
    """The file of a module in a folder that was synced."""

    since: int  # the lowest id of proc meshes that have it
    digest: str
    spec: ModuleSpec | None  # of the module, if it was loaded here during the sync; a reload makes a new one


@dataclass
class _Folder:
    """A folder that was synced."""

    path: str
    roots: tuple[str, ...]  # absolute paths, here, of the folders that are on ``sys.path`` in the cluster
    modules: dict[str, _ModuleFile]  # by the file's absolute path


class SyncedFolders:
    """The folders that a job has synced."""

    def __init__(self, caller: Calls) -> None:
        self._caller = caller
        self._folders: dict[str, _Folder] = {}
        self._lock = threading.Lock()
        # The lowest id of proc meshes that have a module, by its name and file; None if it is not in a folder.
        self._names: dict[tuple[str, str], int | None] = {}

    def move_to(self, caller: Calls) -> None:
        """Go on with the session's next driver, which has the folders, and no proc mesh from before them."""
        with self._lock:
            self._caller = caller
            for folder in self._folders.values():
                folder.modules = {path: file._replace(since=0) for path, file in folder.modules.items()}
            self._names = {}

    def by_name(self, module: str, procs: int | None) -> bool:
        """Return whether a module's code travels by reference, because a proc mesh has its synced folder.

        Meshes spawned before the sync do not have it. None stands for the driver, or a mesh that is being made.
        There, a name of the standard library's is that of its module.
        """
        path = getattr(sys.modules.get(module), "__file__", None)
        if (
            path is None
            or not self._folders
            or module == "__main__"
            or module.partition(".")[0] in STANDARD_MODULES
        ):
            return False
        key = (module, path)
        if key not in self._names:
            self._names[key] = self._since(module, path)
        since = self._names[key]
        return since is not None and (procs is None or procs >= since)

    def _since(self, module: str, path: str) -> int | None:
        path = os.path.realpath(path)
        for folder in self._folders.values():
            file = folder.modules.get(path)
            if file is not None and any(_module_name(path, root) == module for root in folder.roots):
                return file.since
        return None

    def sync(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        exclude: Sequence[str] = (),
        progress: bool | None = None,
    ) -> SyncResult:
        """Ship a folder to every host, with the arguments and errors of `Job.sync`."""
        started = time.perf_counter()
        exclude = [exclude] if isinstance(exclude, str) else list(exclude)
        if not all(isinstance(line, str) for line in exclude) or not isinstance(name, (str, type(None))):
            raise WrongArguments("sync takes a path, a name, and exclude= with patterns as in a .gitignore")
        if (longest := max(map(len, exclude), default=0)) > LONGEST_PATTERN:
            raise WrongArguments(
                f"exclude: a pattern of {longest:,} characters; no path has more than {LONGEST_PATTERN:,}"
            )
        self._caller.check_open()
        folder = os.path.realpath(os.fspath(path))
        name = name or os.path.basename(folder) or "root"
        shown = wanted(self._caller.progress if progress is None else progress)
        bar = _Bar(name, shown, at_once=bool(progress))
        with self._lock, bar:
            taken = self._folders.get(name)
            if taken is not None and taken.path != folder:
                raise NameTaken(
                    f"the folder {taken.path} was synced under the name {name!r} already: give {folder} another "
                    "with name=…",
                    code="sync_name_taken",
                )
            return self._sync(folder, name, exclude, bar, started)

    def _sync(self, folder: str, name: str, exclude: Sequence[str], bar: _Bar, started: float) -> SyncResult:
        bar.step("looking through it")
        found = find_files(folder, exclude)
        sizes = [(file.path, file.size) for file in found.files]
        check_sizes(sizes, "LOOM_SYNC_LIMIT")
        bar.step("reading", sum(size for _, size in sizes))
        # A folder that is a package is imported by its own name, from the folder above it.
        is_package = any(file.path == "__init__.py" for file in found.files)
        prefix = os.path.basename(folder) + "/" if is_package else ""
        files = {prefix + file.path: file for file in found.files}
        entries = [entry._replace(path=prefix + entry.path) for entry in hash_files(found.files, bar.advance)]
        base = os.path.dirname(folder) if is_package else folder
        manifest = Manifest(name, _roots(base, folder, entries), tuple(entries))
        sent, warnings = self._ship(manifest, files, bar)
        warnings = [*found.warnings, *warnings]
        if not entries:
            warnings.append(f"there is nothing to ship in {folder}")
        warnings += self._note(folder, base, manifest, files)
        return SyncResult(
            name=name,
            files=len(entries),
            bytes=manifest.size,
            sent_files=len(sent),
            sent_bytes=sum(sent.values()),
            skipped=found.skipped,
            digest=manifest.digest,
            seconds=time.perf_counter() - started,
            warnings=tuple(warnings),
        )

    def _ship(
        self, manifest: Manifest, files: Mapping[str, FoundFile], bar: _Bar
    ) -> tuple[dict[str, int], list[str]]:
        """Give the tree to every host; return (sizes of the sent contents by digest, warnings)."""
        where = {entry.digest: files[entry.path] for entry in manifest.entries if not entry.target}
        sent: dict[str, int] = {}
        packed = manifest.pack()
        for _ in range(ATTEMPTS):
            upload = self._caller.next_id()
            missing = bar.wait(self._caller.ask(BeginSync(upload), [packed]))
            lacking = {digest: manifest.blobs[digest] for digest in missing}
            sent.update(lacking)
            bar.step("sending", sum(lacking.values()))
            self._send(upload, {digest: where[digest] for digest in lacking}, bar)
            bar.step("giving it to every host")
            answer = bar.wait(self._caller.ask(CommitSync(upload)))
            if not answer["missing"]:
                return sent, answer["warnings"]
        raise SyncFailed("the gateway's cache loses files as fast as they come; is its LOOM_CACHE_LIMIT low?")

    def _send(self, upload: int, contents: Mapping[str, FoundFile], bar: _Bar) -> None:
        on_their_way: deque[tuple[FutureProxy[None], int]] = deque()
        for pieces, parts in _batches(contents):
            if len(on_their_way) == WINDOW:
                bar.arrived(*on_their_way.popleft())
            # Without an order key, so that calls on meshes do not wait for the contents.
            future = self._caller.ask(SendPieces(upload, pieces), parts, None)
            self._caller.flush()
            on_their_way.append((future, sum(piece[2] for piece in pieces)))
        for sent in on_their_way:
            bar.arrived(*sent)

    def _note(self, folder: str, base: str, manifest: Manifest, files: Mapping[str, FoundFile]) -> list[str]:
        """Let the modules of a folder that every host has travel by reference from now on; return warnings."""
        since = self._caller.next_id()
        others = dict(self._folders)
        before = others.pop(manifest.name, None)
        earlier = {} if before is None else before.modules
        loaded = _loaded_here()
        modules: dict[str, _ModuleFile] = {}
        for entry in manifest.entries:
            place = files[entry.path].place
            if not entry.target and place.endswith(_SUFFIXES):
                had = earlier.get(place)
                modules[place] = _ModuleFile(had.since if had else since, entry.digest, loaded.get(place))
        roots = tuple(os.path.join(base, root) if root else base for root in manifest.roots)
        self._folders = {manifest.name: _Folder(folder, roots, modules), **others}
        self._names = {}
        return _stale(earlier, modules)


_SUFFIXES = tuple(importlib.machinery.all_suffixes())


def _module_name(path: str, root: str) -> str | None:
    """Return the name under which a file is imported from a folder on ``sys.path``; None if it is not in it."""
    if not path.startswith(root + os.sep):
        return None
    path = path[len(root) + 1 :]
    suffix = max((suffix for suffix in _SUFFIXES if path.endswith(suffix)), key=len, default="")
    return path.removesuffix(suffix).removesuffix(os.sep + "__init__").replace(os.sep, ".")


def _roots(base: str, folder: str, entries: Sequence[TreeEntry]) -> tuple[str, ...]:
    """Return the folders of a tree for ``sys.path``: the top, and shipped ones on it here, such as ``src``."""
    inside = [os.path.realpath(path) for path in sys.path if path and os.path.isdir(path)]
    below = [os.path.relpath(path, base) for path in inside if path == folder or path.startswith(folder + os.sep)]
    below = ["" if path == "." else path.replace(os.sep, "/") for path in below]
    shipped = [path for path in below if any(entry.path.startswith(f"{path}/") for entry in entries)]
    return tuple(dict.fromkeys(["", *shipped]))


def _loaded_here() -> dict[str, ModuleSpec]:
    found = {}
    for module in list(sys.modules.values()):
        path, spec = getattr(module, "__file__", None), getattr(module, "__spec__", None)
        if isinstance(path, str) and spec is not None:
            found[os.path.realpath(path)] = spec
    return found


def _stale(before: Mapping[str, _ModuleFile], now: Mapping[str, _ModuleFile]) -> list[str]:
    """Return warnings about modules that were changed since the last sync but not reloaded here."""
    stale = []
    for path, (_, digest, spec) in now.items():
        if spec is not None and path in before and before[path].spec is spec and before[path].digest != digest:
            stale.append(spec.name)
    if not stale:
        return []
    calls = ", ".join(f"importlib.reload({name})" for name in sorted(stale)[:5])
    return [
        f"changed modules are loaded here as they were, while the cluster has the new ones. To have new endpoints "
        f"and signatures here, too: {calls}"
    ]


_Piece = tuple[str, int, int, bool]  # digest, offset, length, and whether it is compressed


def _batches(contents: Mapping[str, FoundFile]) -> Iterator[tuple[list[_Piece], list[Buffer]]]:
    """Yield pieces of contents and their bytes, in batches of about `BATCH` bytes before compression."""
    with contextlib.ExitStack() as opened:
        for batch in batches(((digest, file.size) for digest, file in contents.items()), BATCH, BATCH_PIECES):
            pieces: list[_Piece] = []
            parts: list[Buffer] = []
            for digest, size, offset, length in batch:
                if offset == 0:
                    reading = opened.enter_context(UnchangedFile(contents[digest]))
                data = reading.read(length)
                if len(data) != length:
                    raise reading.changed()
                if offset == 0:
                    compress = _shrinks(data)
                pieces.append((digest, offset, length, compress))
                parts.append(zlib.compress(data, 1) if compress else data)
                if offset + length == size:
                    reading.check()
                    opened.close()
            yield pieces, parts


def _shrinks(data: bytes) -> bool:
    """Return whether data that begins like this is worth the time of compressing it."""
    sample = data[:_SAMPLE]
    return len(sample) > 64 and len(zlib.compress(sample, 1)) < 0.9 * len(sample)


class _Bar(Progress):
    """The progress display of a sync; ``at_once`` shows it even for a quick one."""

    def __init__(self, name: str, shown: bool, at_once: bool) -> None:
        self._name = name
        self._step = WaitStep(f"syncing {name}")
        self._done = 0
        self._counting = threading.Lock()
        super().__init__(self._now, shown, after=0.0 if at_once else QUICK)

    def step(self, text: str, total: int = 0) -> None:
        """Go on to another step, which handles ``total`` bytes, if any."""
        self._done = 0
        self._step = WaitStep(f"syncing {self._name}: {text}", 0, total)
        self.tick()

    def advance(self, count: int) -> None:
        """Note that so many bytes were handled. Any thread may call this."""
        with self._counting:
            self._done += count

    def _now(self) -> WaitStep:
        step = self._step
        if not step.total:
            return step
        done = human_size(self._done)
        return WaitStep(f"{step.text} {done} of {human_size(int(step.total))}", self._done, step.total)

    def wait(self, future: FutureProxy[Any]) -> Any:
        """Return the result of a future, without a progress display of its own."""
        while True:
            with contextlib.suppress(WaitTimeout):
                return future.get(EVERY)

    def arrived(self, future: FutureProxy[None], count: int) -> None:
        self.wait(future)
        self.advance(count)
