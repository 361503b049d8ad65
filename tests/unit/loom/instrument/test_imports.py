"""Hooks of imports: called once, when the program imports the module, and never in its way."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from loom.instrument import imports
from loom.instrument.imports import when_imported
from tests.support.logged import messages

seen: list[ModuleType] = []


def see(module: ModuleType) -> None:
    seen.append(module)


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "stranger" / "part.py").write_text("y = 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen.clear()
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "stranger"]:
        del sys.modules[name]
    imports._finder.hooks.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not imports._finder]


def test_a_hook_is_called_once_when_its_module_is_imported() -> None:
    when_imported("stranger.part", f"{__name__}:see")
    import stranger  # type: ignore[import-not-found]

    assert seen == []
    part = importlib.import_module("stranger.part")
    importlib.reload(part)

    assert seen == [part]
    assert stranger.part.y == 2


def test_a_module_that_is_imported_already_is_hooked_at_once() -> None:
    module = importlib.import_module("stranger")

    when_imported("stranger", see)

    assert seen == [module]


def test_a_hooked_module_is_as_it_is_without_the_hook() -> None:
    before = list(sys.meta_path)
    plain = importlib.import_module("stranger.part")
    kind = type(plain.__loader__)
    del sys.modules["stranger.part"]
    when_imported("stranger.part", see)

    hooked = importlib.import_module("stranger.part")

    assert hooked.__spec__ is not None
    assert type(hooked.__loader__) is type(hooked.__spec__.loader) is kind
    assert hooked.__file__ == plain.__file__
    assert sys.meta_path == before


def test_a_hook_that_raises_is_logged_and_the_import_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def fail(module: ModuleType) -> None:
        raise AttributeError("no such function in this version")

    when_imported("stranger", fail)
    when_imported("stranger", see)
    with caplog.at_level(logging.WARNING, "loom"):
        module = importlib.import_module("stranger")

    assert seen == [module]
    assert messages(caplog) == ["Loom steps back from stranger: AttributeError: no such function in this version"]


def test_a_module_that_is_missing_or_fails_is_so_with_a_hook_too(tmp_path: Path) -> None:
    (tmp_path / "stranger" / "broken.py").write_text("raise ZeroDivisionError\n")
    when_imported("stranger.missing", see)
    when_imported("stranger.broken", see)

    with pytest.raises(ModuleNotFoundError, match=r"No module named 'stranger\.missing'"):
        importlib.import_module("stranger.missing")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("stranger.broken")

    assert seen == []
