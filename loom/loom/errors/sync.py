"""Exceptions about folders that are synced to the hosts."""

from __future__ import annotations

from loom.errors.base import Denied, Invalid, LoomError, NameTaken


class NotAFolder(LoomError, NotADirectoryError, code="not_a_folder"):
    """`Job.sync` was given a path that is no folder."""


class UnreadableFile(Denied, code="unreadable_file", http_status=500, exit_status=1):
    """A file or a folder inside a folder that is to be synced cannot be read, or has a name that is not UTF-8."""


class FileChanged(LoomError, code="file_changed"):
    """A file was changed while it was being read. Nothing was synced; sync again."""


class SyncFailed(LoomError, code="sync_failed"):
    """A host could not take a synced folder, or no longer has it; the text says which host and why."""


SyncNameTaken = NameTaken
UnsafeLink = Invalid
