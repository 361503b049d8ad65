"""Kubetorch images for Loom's pods, made from the lists that `images/Dockerfile` and `images/Dockerfile.gpu` read.

    from loom.images import cpu_image
    compute = kt.Compute(cpus=2, image=cpu_image())

What is on the laptop decides the versions of Loom and, where it is installed, of torchmonarch: the two sides speak
to each other, and what a pod runs should be what was tried. Classes travel as bytecode, so the pod's Python must
have the laptop's minor version; the image's first step checks that.
"""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from loom._version import __version__
from loom.errors import UnreadableFile
from loom.extras import require

if TYPE_CHECKING:
    import kubetorch

__all__ = ["CPU_INDEX", "GPU_BASE", "cpu_image", "gpu_image", "loom_requirement", "packages"]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where torch's CPU builds are; `images/Dockerfile` has it, too."""

GPU_BASE = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"
"""The base of the GPU image, as in `images/Dockerfile.gpu`. Its torch stays."""

DISTRIBUTION = "monarch-loom"

IN_POD = "monarch-loom-source"
"""Folder in a pod's working directory that the source of an unreleased Loom is synced to."""

MONARCH = "torchmonarch"


def cpu_image(loom_source: str | Path | None = None) -> kubetorch.Image:
    """The image of a pod without GPUs: Kubetorch's Debian with torch's CPU build.

    Args:
        loom_source: where Loom comes from: a folder with its source or a wheel, which are synced to the pod, or
            what pip calls a requirement. By default what is installed here: see `loom_requirement`.

    Raises:
        MissingDependency: Kubetorch is not installed.
        UnreadableFile: there is no such folder or wheel.
    """
    require({"kubetorch": "kubetorch"}, "an image for Kubetorch", "kubetorch")
    import kubetorch

    image = _checked(kubetorch.images.Debian())
    image.pip_install([f"--index-url {CPU_INDEX} {_joined(packages('torch.txt'))}"])
    return _with_loom(image, packages("packages.txt"), loom_source)


def gpu_image(loom_source: str | Path | None = None) -> kubetorch.Image:
    """The image of a pod with GPUs, on `GPU_BASE`. Arguments and errors as of `cpu_image`."""
    require({"kubetorch": "kubetorch"}, "an image for Kubetorch", "kubetorch")
    import kubetorch

    image = _checked(kubetorch.Image(name="loom-gpu", image_id=GPU_BASE))
    return _with_loom(image, packages("packages.txt") + packages("gpu.txt"), loom_source)


def packages(name: str) -> list[str]:
    """The requirements in one of the lists, with this machine's version of torchmonarch, if it has one."""
    lines = resources.files(__name__).joinpath(name).read_text().splitlines()
    return [_of_client(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def loom_requirement() -> str | Path:
    """Where the Loom that runs here came from, for a pod to have the same.

    A folder or a wheel on this machine, for an editable install and for one from there; a ``git+`` requirement for
    one from a repository; else the release with this version's number.

    Raises:
        UnreadableFile: the folder or wheel that it was installed from is gone.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return _checkout() or f"{DISTRIBUTION}=={__version__}"
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if "vcs_info" in origin:
        revision = origin["vcs_info"]
        return f"{DISTRIBUTION} @ {revision['vcs']}+{origin['url']}@{revision['commit_id']}"
    url = urlsplit(origin.get("url", ""))
    if url.scheme == "file":
        return _existing(Path(unquote(url.path)))
    return f"{DISTRIBUTION} @ {origin['url']}" if url.scheme else f"{DISTRIBUTION}=={distribution.version}"


def _checkout() -> Path | None:
    """The source that this module is part of, where it runs from there without being installed."""
    root = Path(__file__).parents[3]
    return root if (root / "pyproject.toml").exists() and (root / "gateway").is_dir() else None


def _existing(path: Path) -> Path:
    if path.is_dir() or (path.suffix == ".whl" and path.is_file()):
        return path
    raise UnreadableFile(
        f"Loom's source for the pods is to be {path}, which is no folder and no wheel: give loom_source=, such as "
        f"a checkout of Loom or {DISTRIBUTION}=={__version__}"
    )


def _of_client(requirement: str) -> str:
    if requirement.partition("==")[0] == MONARCH:
        with suppress(metadata.PackageNotFoundError):
            return f"{MONARCH}=={metadata.version(MONARCH)}"
    return requirement


def _checked(image: kubetorch.Image) -> kubetorch.Image:
    """Have the pod say so, before it installs anything, where its Python is another one than this."""
    ours = sys.version_info[:2]
    program = (
        f"import sys; ours, theirs = {ours!r}, sys.version_info[:2]; "
        f"sys.exit(0 if ours == theirs else f'Loom: this image has Python {{theirs}}, the laptop has {{ours}}; "
        f"classes travel as bytecode: use the same minor version on both')"
    )
    return image.run_bash(f'"${{KT_PYTHON_PATH:-python3}}" -c {shlex.quote(program)}')


def _with_loom(image: kubetorch.Image, requirements: list[str], source: str | Path | None) -> kubetorch.Image:
    image.pip_install([_joined(requirements)])
    origin = loom_requirement() if source is None else source
    if isinstance(origin, str) and (origin.endswith(".whl") or Path(origin).is_dir()):
        origin = Path(origin)
    if isinstance(origin, Path):
        origin = _existing(origin.expanduser().resolve())
        to = IN_POD if origin.is_dir() else origin.name
        image.copy(str(origin), to, contents=origin.is_dir())
        origin = f"./{to}"
    return image.pip_install([f"--no-deps {shlex.quote(origin)}"])


def _joined(requirements: list[str]) -> str:
    return " ".join(map(shlex.quote, requirements))
