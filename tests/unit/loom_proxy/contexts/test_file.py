"""The file of contexts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import loom
from loom_proxy.contexts import ContextFile, GatewayContext

pytestmark = pytest.mark.usefixtures("config")

PROD = GatewayContext("prod", "kube://training/loom-gateway")
DEV = GatewayContext("dev", "ws://127.0.0.1:8470")

ADD = """
import sys
from loom_proxy.contexts import GatewayContext, ContextFile
sys.stdin.readline()
for number in range(20):
    name = f"{sys.argv[1]}-{number}"
    ContextFile().add(GatewayContext(name, "ws://127.0.0.1:1"), f"token of {name}")
"""


def test_only_this_user_can_read_the_file_and_its_folder(config: Path) -> None:
    ContextFile().add(PROD, "secret")

    assert ContextFile().path == config / "contexts.json"
    assert (config / "contexts.json").stat().st_mode & 0o777 == 0o600
    assert config.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_open_is_closed(config: Path) -> None:
    config.mkdir(parents=True, mode=0o755)

    ContextFile().add(PROD, "secret")

    assert config.stat().st_mode & 0o777 == 0o700


def test_without_xdg_config_home_it_is_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert ContextFile().path == tmp_path / ".config" / "loom" / "contexts.json"


def test_the_first_context_is_the_current_one_until_another_is_used() -> None:
    file = ContextFile()
    file.add(PROD, "secret")
    file.add(DEV, None)

    assert file.read().current == "prod"
    file.use("dev")
    assert file.read().current == "dev"
    assert file.read().named("prod").read_token() == "secret"


def test_a_removed_context_is_not_the_current_one() -> None:
    file = ContextFile()
    file.add(PROD, "secret")

    file.remove("prod")

    assert file.read().current is None
    assert "secret" not in file.path.read_text()


def test_a_context_is_replaced_with_its_token() -> None:
    file = ContextFile()
    file.add(PROD, "secret")

    file.add(GatewayContext("prod", "ws://127.0.0.1:1"), None)

    assert file.read().named("prod").url == "ws://127.0.0.1:1"
    assert file.read().named("prod").read_token() is None
    assert "secret" not in file.path.read_text()


def test_an_unknown_context_is_an_error_with_the_known_ones() -> None:
    file = ContextFile()
    file.add(PROD, None)

    for change in (file.use, file.remove):
        with pytest.raises(loom.UnknownContext, match=r"no context named 'dev'; there are: prod"):
            change("dev")


@pytest.mark.parametrize("name", ["", "a b", "a\n", "x" * 101])
def test_a_name_that_cannot_be_typed_is_refused(name: str, config: Path) -> None:
    with pytest.raises(loom.WrongArguments, match="no name for a context"):
        ContextFile().add(GatewayContext(name, "ws://127.0.0.1:1"), "secret")

    assert not config.exists()


def test_processes_that_change_it_at_once_lose_nothing() -> None:
    adding = [
        subprocess.Popen([sys.executable, "-c", ADD, name], stdin=subprocess.PIPE, text=True) for name in ("a", "b")
    ]
    for one in adding:
        assert one.stdin
        one.stdin.write("\n")
        one.stdin.flush()
    for one in adding:
        one.communicate(timeout=60)
        assert one.returncode == 0

    found = ContextFile().read().by_name
    assert {name: context.token for name, context in found.items()} == {
        f"{each}-{number}": f"token of {each}-{number}" for each in "ab" for number in range(20)
    }


DAMAGED = {
    "cut off": '{"version": 1, "current": "prod", "cont',
    "no object": "[]",
    "no contexts": '{"version": 1}',
    "a current one that is missing": '{"version": 1, "current": "prod", "contexts": {}}',
    "a context without a URL": '{"version": 1, "current": null, "contexts": {"prod": {}}}',
    "a URL that is none": '{"version": 1, "current": null, "contexts": {"prod": {"url": 1}}}',
    "a field that is unknown": '{"version": 1, "current": null, "contexts": {"prod": {"url": "ws://a", "x": 1}}}',
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_an_error_and_stays_as_it_is(config: Path, content: str | bytes) -> None:
    config.mkdir(parents=True)
    file = config / "contexts.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    file.chmod(0o600)
    before = file.read_bytes()

    for use in (ContextFile().read, lambda: ContextFile().add(DEV, "secret"), lambda: ContextFile().use("prod")):
        with pytest.raises(loom.ContextFileError, match=r"contexts\.json: .*move it away"):
            use()

    assert file.read_bytes() == before


def test_a_file_of_a_newer_loom_is_left_alone(config: Path) -> None:
    ContextFile().add(PROD, "secret")
    file = config / "contexts.json"
    newer = json.dumps({**json.loads(file.read_text()), "version": 2})
    file.write_text(newer)

    with pytest.raises(loom.ContextFileError, match="of version 2"):
        ContextFile().add(DEV, None)

    assert file.read_text() == newer


def test_a_file_that_others_can_read_is_not_used(config: Path) -> None:
    ContextFile().add(PROD, "secret")
    (config / "contexts.json").chmod(0o640)

    with pytest.raises(loom.ContextFileError, match="chmod 600"):
        ContextFile().read()


def test_a_folder_that_cannot_be_made_is_an_error(config: Path) -> None:
    config.parent.parent.mkdir(exist_ok=True)
    config.parent.write_text("a file")

    with pytest.raises(loom.ContextFileError, match=r"loom/contexts\.json: "):
        ContextFile().add(PROD, None)
