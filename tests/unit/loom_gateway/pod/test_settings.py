"""What a pod's keeper is told."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from loom.errors import WrongArguments
from loom_gateway.pod.settings_and_peers import MeshPods, PodSettings

SETTINGS = PodSettings("loaders", (MeshPods("workers", "w", 2), MeshPods("loaders", "l", 1)), "digest")


def test_settings_are_kept_for_the_next_keeper(tmp_path: Path) -> None:
    SETTINGS.write(tmp_path / "pod")

    assert PodSettings.read(tmp_path / "pod") == SETTINGS
    assert (tmp_path / "pod").stat().st_mode & 0o077 == 0


def test_only_pods_of_the_first_mesh_serve_clients() -> None:
    assert not SETTINGS.serves
    assert SETTINGS.first.mesh == "workers"


def test_what_a_newer_loom_adds_is_passed_over() -> None:
    assert PodSettings.from_json({**asdict(SETTINGS), "newer": 1}) == SETTINGS


@pytest.mark.parametrize("given", [None, [], {}, {"mesh": "workers", "meshes": [{}], "token_sha256": ""}])
def test_what_are_no_settings_is_refused(given: Any) -> None:
    with pytest.raises(WrongArguments, match="no settings of a pod"):
        PodSettings.from_json(given)


def test_a_pod_belongs_to_a_mesh_of_the_job() -> None:
    with pytest.raises(WrongArguments, match="the mesh 'gpus' in a job that has workers"):
        PodSettings("gpus", (MeshPods("workers", "w", 2),), "digest")


def test_a_folder_without_settings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match="no settings of a pod in"):
        PodSettings.read(tmp_path)
