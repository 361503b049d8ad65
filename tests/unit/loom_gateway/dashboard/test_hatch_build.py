"""The build hook: when the page is built, and what is said if it cannot be."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT

NPM = """\
#!/bin/sh
echo "$@" >> {log}
[ "$1" = run ] || exit 0
[ -e fails ] && {{ echo "it is broken" >&2; exit 3; }}
mkdir -p {built} && echo page > {built}/index.html
"""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    interface = SimpleNamespace(BuildHookInterface=object)  # hatchling is there only while something is built
    monkeypatch.setitem(sys.modules, "hatchling.builders.hooks.plugin.interface", interface)  # type: ignore[arg-type]
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "gateway/dashboard/hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Checkout:
    def __init__(self, root: Path, hook: ModuleType) -> None:
        self.root, self.hook = root, hook
        self.source, self.built, self.log = root / hook.SOURCE, root / hook.BUILT, root / "log"
        (self.source / "src").mkdir(parents=True)
        (self.source / "package.json").write_text("{}")
        (self.source / "src" / "main.ts").write_text("1")
        npm = root / "bin" / "npm"
        npm.parent.mkdir()
        npm.write_text(NPM.format(log=self.log, built=self.built))
        npm.chmod(0o755)

    def install(self, version: str = "editable") -> dict[str, Any]:
        data: dict[str, Any] = {"artifacts": []}
        build_page = self.hook.BuildPage()
        build_page.root = str(self.root)
        build_page.initialize(version, data)
        return data

    @property
    def ran(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path, hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    made = Checkout(tmp_path, hook)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return made


def without_npm(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout.hook.shutil, "which", lambda name: None)


def test_the_page_is_built_once_and_again_when_its_source_changes(checkout: Checkout) -> None:
    assert checkout.install()["artifacts"] == [f"/{checkout.hook.BUILT}/**"]
    checkout.install("standard")
    assert checkout.ran == ["ci --no-audit --no-fund", "run build"]

    (checkout.source / "src" / "main.ts").write_text("2")
    (checkout.source / "node_modules").mkdir()
    checkout.install()
    assert checkout.ran.count("run build") == 2


@pytest.mark.guarantees(
    "page files", "A wheel has the page, or is an error; an editable install without npm goes on"
)
def test_without_npm_an_editable_install_goes_on_and_says_so(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_npm(checkout, monkeypatch)
    checkout.install()
    assert "there is no npm. Everything else works." in capsys.readouterr().err


@pytest.mark.guarantees(
    "page files", "A wheel has the page, or is an error; an editable install without npm goes on"
)
def test_without_npm_a_wheel_is_an_error_unless_the_page_is_there(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_npm(checkout, monkeypatch)
    with pytest.raises(RuntimeError, match=r"needs Node\.js: there is no npm"):
        checkout.install("standard")
    checkout.built.mkdir(parents=True)
    (checkout.built / "index.html").write_text("page")
    checkout.install("standard")


def test_a_build_that_fails_is_told_with_its_output(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout.source / "fails").touch()
    with pytest.raises(RuntimeError, match="npm run build exits with 3:\nit is broken"):
        checkout.install("standard")
    checkout.install()
    assert "it is broken" in capsys.readouterr().err
