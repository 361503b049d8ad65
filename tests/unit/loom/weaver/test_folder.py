"""The weaver's folder: for one user, for one weaver at a time, and what it remembers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import loom
from loom.token_file import ADMIN
from loom.weaver.keys import Keys, read_secret, secret_in
from loom.weaver.storage.folder import Remembered, WeaverFolder
from loom.weaver.storage.store import Store

PLACE = Remembered("127.0.0.1", 4000)


def test_an_address_is_there_for_the_weaver_after_this_one(tmp_path: Path) -> None:
    folder = WeaverFolder(tmp_path / "weaver")
    assert folder.remembered() is None

    folder.remember(PLACE)
    folder.remember(PLACE)

    assert folder.remembered() == PLACE
    assert (folder.path / "link.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"host": "h", "port": "none", "key": "k"}'])
def test_an_address_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    folder = WeaverFolder(tmp_path / "weaver")
    (folder.path / "link.json").write_text(text)

    assert folder.remembered() is None


def test_the_secret_stays_and_only_the_folder_has_it(tmp_path: Path) -> None:
    first = WeaverFolder(tmp_path / "weaver").keys.gateway()
    other = WeaverFolder(tmp_path / "other").keys.gateway()

    assert Keys(read_secret(tmp_path / "weaver")).gateway() == first
    assert first != other
    assert (tmp_path / "weaver" / "secret").stat().st_mode & 0o077 == 0


def test_each_user_has_a_store_whatever_the_name(tmp_path: Path) -> None:
    folder = WeaverFolder(tmp_path / "weaver")
    users = ["anna", "..", "a/b", "a%2Fb", "x" * 500, "x" * 499 + "y", "\U0001f600" * 100, "Anna"]

    stores = [folder.store(user) for user in (ADMIN, *users)]
    for store in stores:
        store.touch()

    assert len({store.resolve() for store in stores}) == len(stores)
    assert all(store.resolve().is_relative_to(folder.path.resolve()) for store in stores)
    assert stores[0] == folder.path / "weaver.sqlite"
    assert sorted(folder.users()) == sorted((ADMIN, *users))


def test_one_weaver_at_a_time_has_the_folder(tmp_path: Path) -> None:
    held = WeaverFolder(tmp_path / "weaver")

    text = r"another weaver \(pid \d+\) uses the state folder .*weaver: end it, or choose another"
    with pytest.raises(loom.errors.Conflict, match=text):
        WeaverFolder(held.path)


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weaver").mkdir()
    (tmp_path / "weaver").chmod(0o755)

    with pytest.raises(loom.errors.UnsafeStateFolder, match="chmod 700"):
        WeaverFolder(tmp_path / "weaver")


def test_a_path_that_is_too_long_or_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(loom.errors.UnsafeStateFolder, match="too long"):
        WeaverFolder(tmp_path / ("w" * 120))
    with pytest.raises(loom.errors.UnsafeStateFolder, match=r"cannot keep state in .*file"):
        WeaverFolder(tmp_path / "file")


def test_a_folder_that_is_gone_is_not_there_and_one_in_its_place_is_another_weavers(tmp_path: Path) -> None:
    folder = WeaverFolder(tmp_path / "weaver")
    folder.take()
    assert folder.is_there()

    shutil.rmtree(folder.path)
    gone = folder.is_there()
    WeaverFolder(folder.path).take()

    assert not gone
    with pytest.raises(loom.errors.Conflict, match="another weaver has taken the state folder"):
        folder.is_there()


@pytest.mark.guarantees(
    "weaver",
    "A weaver whose state another one has taken acknowledges nothing more and ends, also without file locks",
)
def test_nothing_is_committed_in_a_folder_that_another_weaver_has_taken(tmp_path: Path) -> None:
    first = WeaverFolder(tmp_path / "weaver")
    first.take()
    store = Store(first.store(ADMIN), first.check)
    store.put("policies", "before", {})
    store.write(store.begin())
    store.put("policies", "after", {})
    (first.path / "lock").unlink()  # a stand-in for a volume that keeps no locks between machines

    second = WeaverFolder(first.path)
    second.take()
    with pytest.raises(loom.errors.Conflict, match="another weaver has taken the state folder"):
        store.write(store.begin())

    assert [key for key, _ in Store(second.store(ADMIN), second.check).rows("policies")] == ["before"]


def test_a_folder_that_cannot_be_read_now_is_there(tmp_path: Path) -> None:
    folder = WeaverFolder(tmp_path / "weaver")
    folder.take()
    holder = folder.path / "holder.json"
    holder.unlink()
    holder.mkdir()  # as a stand-in for a disk that does not answer: neither it nor another weaver's name

    assert folder.is_there()
    with pytest.raises(OSError, match="Is a directory"):
        folder.check()


def test_a_secret_of_a_file_is_the_same_for_all_who_have_the_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 4 + "\n")
    file.chmod(0o440)  # a Secret of Kubernetes

    folder = WeaverFolder(tmp_path / "weaver", secret=secret_in(file))

    assert folder.keys.gateway() == Keys(b"0123456789abcdef" * 4).gateway() == Keys(secret_in(file)).gateway()
    assert not (folder.path / "secret").exists()


@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [
        (0o604, b"x" * 32, "others can read or change the weaver's secret .*chmod 600"),
        (0o620, b"x" * 32, "others can read or change"),
        (0o600, b"x" * 31 + b"\n", "has 31 bytes, and 32 random ones at least are needed: openssl rand -hex 32"),
        (None, b"", "cannot read the weaver's secret in .*: No such file"),
    ],
)
def test_a_file_that_is_no_secret_is_refused(tmp_path: Path, mode: int | None, content: bytes, said: str) -> None:
    file = tmp_path / "secret"
    if mode is not None:
        file.write_bytes(content)
        file.chmod(mode)

    with pytest.raises(loom.WrongArguments, match=said):
        secret_in(file)


def test_the_end_of_32_random_bytes_is_no_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"\xff" * 31 + b"\n")
    file.chmod(0o600)

    assert len(secret_in(file)) == 32
