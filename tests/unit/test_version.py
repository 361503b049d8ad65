"""The version is written down once; the files that must hold it have the same one."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

import loom
from tests.support.paths import ROOT

HOLDERS = {
    "images/Dockerfile": 3,
    "images/Dockerfile.gpu": 1,
    "images/kubernetes/base/gateway.yaml": 1,
    "images/kubernetes/base/kustomization.yaml": 1,
    "images/kubernetes/base/workers.yaml": 1,
    "images/kubernetes/gpu/kustomization.yaml": 2,
    "images/kubernetes/hosted/kustomization.yaml": 1,
}
"""Files that `docker` and `kubectl` read as they are, and how often each names a tag of Loom's images."""

TAG = re.compile(r"(?:\bloom(?:-gpu)?:|newTag: )(\d+\.\d+\.\d+\S*?)(?=[\s\"`]|$)", re.MULTILINE)


def test_the_installed_distribution_has_looms_version() -> None:
    assert metadata.version("monarch-loom") == loom.__version__


@pytest.mark.parametrize("path", HOLDERS)
def test_the_images_tags_are_looms_version(path: str) -> None:
    assert TAG.findall((ROOT / path).read_text()) == [loom.__version__] * HOLDERS[path]


def test_no_other_manifest_names_a_tag() -> None:
    manifests = {path for kind in ("*.yaml", "Dockerfile*") for path in (ROOT / "images").rglob(kind)}
    assert {str(path.relative_to(ROOT)) for path in manifests if TAG.search(path.read_text())} == set(HOLDERS)
