"""`loom.images`: Kubetorch's images have what the Dockerfiles install, and the Loom that runs here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import loom
from loom import images
from tests.system.images.dockerfiles import FILES, ROOT, only, read

pytest.importorskip("kubetorch")

LISTS = ROOT / "loom" / "loom" / "images"
CPU, GPU = FILES


class Installed:
    """Stands in for the metadata of an installed Loom, of which there can only be one."""

    version = "0.9.0"

    def __init__(self, origin: object) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._origin is None else json.dumps(self._origin)


def copied_lists(path: Path) -> set[str]:
    """The lists that a Dockerfile copies and gives to pip."""
    steps = read(path)
    copied = {
        Path(word).name for step in steps if step.instruction == "COPY" for word in step.words if ".txt" in word
    }
    runs = " ".join(step.text for step in steps if step.instruction == "RUN")
    assert all(f"--requirement /packages/{name}" in runs for name in copied)
    return copied


def installed_by(image: object) -> set[str]:
    """Every word of the image's pip lines."""
    lines = str(image.contents).splitlines()  # type: ignore[attr-defined]
    return {word for line in lines if line.startswith("RUN $KT_PIP_INSTALL_CMD") for word in line.split()[2:]}


@pytest.mark.parametrize(("path", "make"), [(CPU, images.cpu_image), (GPU, images.gpu_image)])
def test_an_image_for_kubetorch_has_the_packages_of_the_dockerfile(path: Path, make: object) -> None:
    image = make(loom_source="monarch-loom==0.2.0")  # type: ignore[operator]
    lists = {name: images.packages(name) for name in copied_lists(path)}
    assert lists
    expected = {requirement for requirements in lists.values() for requirement in requirements}
    found = {word for word in installed_by(image) if "==" in word}
    assert found == expected | {"monarch-loom==0.2.0"}


def test_both_have_the_same_base_and_index() -> None:
    assert images.gpu_image("monarch-loom==0.2.0").image_id == images.GPU_BASE == only(read(GPU), "FROM").text
    assert images.CPU_INDEX in CPU.read_text()
    assert f"--index-url {images.CPU_INDEX} torch==" in images.cpu_image("monarch-loom==0.2.0").contents


def test_every_package_is_pinned_and_fits_what_loom_asks_for() -> None:
    pins: dict[str, str] = {}
    for path in LISTS.glob("*.txt"):
        for requirement in images.packages(path.name):
            name, _, version = requirement.partition("==")
            assert version, requirement
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(text for name in ("gateway", "train", "rl", "gpu") for text in extras[name]),
    ]
    for text in wanted:
        if text.startswith("monarch-loom["):
            continue  # another extra, which is in the list
        asked = Requirement(text)
        assert asked.specifier.contains(pins[canonicalize_name(asked.name)], prereleases=True), text


def test_the_lists_are_in_the_wheel() -> None:
    assert LISTS.is_relative_to(ROOT / "loom" / "loom")  # all of which is packed
    assert images.packages("torch.txt")


def test_monarch_has_the_version_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", {"torchmonarch": "0.7.5"}.__getitem__)
    assert "torchmonarch==0.7.5" in images.packages("packages.txt")


def test_a_laptop_without_monarch_takes_the_version_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert "torchmonarch==0.7.0" in images.packages("packages.txt")


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (None, "monarch-loom==0.9.0"),
        (
            {"url": "https://example.com/loom", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "monarch-loom @ git+https://example.com/loom@abc",
        ),
        ({"url": "https://example.com/loom.whl"}, "monarch-loom @ https://example.com/loom.whl"),
    ],
)
def test_a_pod_gets_the_loom_that_is_installed_here(
    monkeypatch: pytest.MonkeyPatch, origin: object, expected: str
) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(origin))
    assert images.loom_requirement() == expected


@pytest.mark.parametrize("wheel", [False, True])
def test_a_loom_that_is_not_released_is_synced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: bool
) -> None:
    source = tmp_path / ("monarch_loom-0.2.0-py3-none-any.whl" if wheel else "a checkout")
    source.touch() if wheel else source.mkdir()
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed({"url": source.as_uri(), "dir_info": {}}))
    assert images.loom_requirement() == source

    image = images.cpu_image()

    (copy,) = image.copy_operations
    assert copy["source"] == str(source)
    assert copy["contents"] is not wheel
    assert image.contents.splitlines()[-1] == f"RUN $KT_PIP_INSTALL_CMD --no-deps ./{copy['dest']}"


def test_of_a_checkout_a_pod_gets_what_a_build_takes_and_no_token(tmp_path: Path) -> None:
    source, pod = tmp_path / "source", tmp_path / "pod"
    wanted = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "loom/loom/__init__.py",
        "gateway/loom_gateway/dashboard/static/index.html",
        "proxy/loom_proxy/job.py",
    }
    beside = {
        "images/kubernetes/base/token.env",
        "server.key",
        "gateway/dashboard/node_modules/vite/index.js",
        "gateway/dashboard/tests/test_it.ts",
        "tests/loom/test_it.py",
        "loom/prod.env",
        "loom/.netrc",
        ".env",
    }
    for name in wanted | beside:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (copy,) = images.cpu_image(source).copy_operations
    pod.mkdir()

    # Kubetorch puts defaults of its own between what is included and what is not.
    subprocess.run(["rsync", "-aL", *copy["filter_options"].split(), f"{source}/", pod], check=True, timeout=20)

    assert {str(path.relative_to(pod)) for path in pod.rglob("*") if path.is_file()} == wanted


def test_a_pod_gets_of_a_checkout_what_the_images_get() -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    kept = {rule[1:] for rule in rules if rule[0] == "!" and not rule.startswith("!images/")}
    assert {name.rstrip("/") for name in images.OF_SOURCE} == kept | {"LICENSE"}
    of_python = {"**/__pycache__", "**/*.py[cod]"}  # which Kubetorch leaves out by itself
    left_out = {rule.removeprefix("**/") for rule in rules if rule[0] not in "!*" or rule.startswith("**/")}
    left_out -= {rule.removeprefix("**/") for rule in of_python}
    assert {Path(rule).name for rule in left_out} <= {Path(name).name for name in images.NOT_OF_SOURCE}


def test_a_checkout_that_nobody_installed_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert images.loom_requirement() == ROOT


def test_a_source_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed({"url": gone.as_uri(), "dir_info": {}}))
    with pytest.raises(loom.UnreadableFile, match="gone, which is no folder and no wheel: give loom_source="):
        images.cpu_image()
    with pytest.raises(loom.UnreadableFile, match="no-such"):
        images.cpu_image(loom_source=tmp_path / "no-such")


def test_without_kubetorch_an_image_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(loom.MissingDependency, match=r"monarch-loom\[kubetorch\]"):
        images.gpu_image()


def test_another_python_is_said_before_anything_is_installed() -> None:
    check = images.cpu_image("monarch-loom==0.2.0").contents.splitlines()[1].removeprefix("RUN ")
    ours = f"({sys.version_info[0]}, {sys.version_info[1]})"
    assert ours in check
    good, bad = (
        subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=20, env={"KT_PYTHON_PATH": sys.executable}
        )
        for command in (check, check.replace(ours, "(3, 7)"))
    )
    assert good.returncode == 0, good.stderr
    assert bad.returncode == 1
    assert f"this image has Python {ours}, the laptop has (3, 7)" in bad.stderr
