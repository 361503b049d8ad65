"""``loom run --on``: what is refused before anything is asked, by name and with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.cli.run import run
from loom.cli.run_on import check_hosts, come_back, read_packages, read_per_host
from loom.errors import WrongArguments


@pytest.mark.parametrize(
    ("text", "found"), [(None, {"procs": 1}), ("gpus=8", {"gpus": 8}), ("procs=2", {"procs": 2})]
)
def test_processes_on_each_host_are_named(text: str | None, found: dict[str, int]) -> None:
    assert read_per_host(text) == found


@pytest.mark.parametrize("text", ["", "8", "gpus", "gpus=0", "gpus=-1", "hosts=2", "gpus=2,procs=2", "gpus=1e3"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(WrongArguments, match=r"--per-host .*: write gpus=8 or procs=2"):
        read_per_host(text)


def test_more_hosts_than_the_cluster_has_are_refused() -> None:
    check_hosts(2, 2)
    with pytest.raises(WrongArguments, match=r"--hosts 3: the cluster has 1 host$"):
        check_hosts(3, 1)


def test_a_container_is_refused_with_what_to_do() -> None:
    with pytest.raises(WrongArguments, match=r"--container an/image: Loom starts no containers. .*serve worker"):
        run(["train.py"], container="an/image", on="prod")


@pytest.mark.parametrize(
    ("option", "value"), [("hosts", 2), ("per_host", "gpus=8"), ("env", "uv.lock"), ("detach", True)]
)
def test_options_of_a_cluster_need_one(option: str, value: object) -> None:
    with pytest.raises(WrongArguments, match=f"--{option.replace('_', '-')} needs --on"):
        run(["train.py"], **{option: value})  # type: ignore[arg-type]


def test_a_project_without_a_lock_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_packages(tmp_path, None) is None
    assert capsys.readouterr().err == ""
    (tmp_path / "pyproject.toml").write_text("")
    assert read_packages(tmp_path, None) is None
    assert "pyproject.toml has no uv.lock" in capsys.readouterr().err
    (tmp_path / "conda-lock.yml").write_text("")
    with pytest.raises(WrongArguments, match=r"conda-lock\.yml"):
        read_packages(tmp_path, None)
    assert read_packages(tmp_path, "none") is None
    (tmp_path / "other.txt").write_text("a\n")
    found = read_packages(tmp_path, "other.txt")
    assert found is not None
    assert found.main == "other.txt"


def test_coming_back_names_the_run_the_log_and_the_ends() -> None:
    text = come_back("session-1", "3f2a", "train")
    for command in (
        "loom runs show 3f2a",
        "loom logs --session session-1 --mesh train --follow",
        "loom stop --replica train",
        "loom sessions end session-1",
    ):
        assert command in text
