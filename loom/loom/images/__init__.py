"""Kubetorch images for Loom's pods, made from the lists that `images/Dockerfile` and `images/Dockerfile.gpu` read.

    from loom.images import cpu_image
    compute = kt.Compute(cpus=2, image=cpu_image())

The laptop's installation decides the versions of Loom and, if it is installed, of torchmonarch, because the two
sides talk to each other, and a pod should run the versions that were tried. Classes travel as bytecode, so the
pod's Python must have the laptop's minor version; the image's first step checks that.
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

__all__ = ["CPU_INDEX", "GPU_BASE", "cpu_image", "gpu_image", "loom_requirement", "packages", "with_network_tools"]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""The index of torch's CPU builds; `images/Dockerfile` has it, too."""

GPU_BASE = "pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime"
"""The base of the GPU image, as in `images/Dockerfile.gpu`. The image keeps its torch."""

DISTRIBUTION = "monarch-loom"

IN_POD = "monarch-loom-source"
"""The folder in a pod's working directory to which the source of an unreleased Loom is synced."""

OF_SOURCE = ("pyproject.toml", "README.md", "LICENSE", "loom/", "gateway/", "proxy/")
"""Patterns of the files of Loom's code that are synced to a pod: all that a build takes, and no token or key."""

NOT_OF_SOURCE = ("node_modules", "/gateway/dashboard/tests", "*.egg-info", "*.env", ".*", "/*")
"""What is not. As in ``.dockerignore``."""

MONARCH = "torchmonarch"


def cpu_image(loom_source: str | Path | None = None) -> kubetorch.Image:
    """Return the image of a pod without GPUs: Kubetorch's Debian with torch's CPU build.

    Args:
        loom_source: the source of Loom: a folder with its code or a wheel, which are synced to the pod, or a
            requirement for pip. The default is the installation here: see `loom_requirement`.

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
    """Return the image of a pod with GPUs, on `GPU_BASE`. Arguments and errors are those of `cpu_image`."""
    require({"kubetorch": "kubetorch"}, "an image for Kubetorch", "kubetorch")
    import kubetorch

    image = _checked(kubetorch.Image(name="loom-gpu", image_id=GPU_BASE))
    return _with_loom(image, packages("packages.txt") + packages("gpu.txt"), loom_source)


def with_network_tools(image: kubetorch.Image) -> kubetorch.Image:
    """Return an image that also has ``ip``, ``tc`` and ``nft``, with which injected faults break a network."""
    have = "command -v ip >/dev/null && command -v tc >/dev/null && command -v nft >/dev/null"
    install = "apt-get update && apt-get install --yes --no-install-recommends iproute2 nftables"
    return image.run_bash(f"({have}) || ({install})")


def packages(name: str) -> list[str]:
    """Return the requirements in a list, with this machine's version of torchmonarch, if it has one."""
    lines = resources.files(__name__).joinpath(name).read_text().splitlines()
    return [_of_client(line.strip()) for line in lines if line.strip() and not line.startswith("#")]


def loom_requirement() -> str | Path:
    """Return the origin of the Loom that runs here, so that a pod can have the same.

    It is a folder or a wheel on this machine, for an editable install or an install from one; a ``git+``
    requirement for an install from a repository; else the release with this version's number.

    Raises:
        UnreadableFile: the folder or wheel of the installation is gone.
    """
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        root = Path(__file__).parents[3]  # a checkout, if Loom runs from there without being installed
        is_checkout = (root / "pyproject.toml").exists() and (root / "gateway").is_dir()
        return root if is_checkout else f"{DISTRIBUTION}=={__version__}"
    text = distribution.read_text("direct_url.json")
    origin = json.loads(text) if text else {}
    if "vcs_info" in origin:
        revision = origin["vcs_info"]
        return f"{DISTRIBUTION} @ {revision['vcs']}+{origin['url']}@{revision['commit_id']}"
    url = urlsplit(origin.get("url", ""))
    if url.scheme == "file":
        return _existing(Path(unquote(url.path)))
    return f"{DISTRIBUTION} @ {origin['url']}" if url.scheme else f"{DISTRIBUTION}=={distribution.version}"


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
    """Make the pod check its Python's version before it installs anything."""
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
        rules = [f"--include=/{name}" for name in OF_SOURCE] + [f"--exclude={name}" for name in NOT_OF_SOURCE]
        image.copy(str(origin), to, contents=origin.is_dir(), filter_options=" ".join(rules * origin.is_dir()))
        origin = f"./{to}"
    return image.pip_install([f"--no-deps {shlex.quote(origin)}"])


def _joined(requirements: list[str]) -> str:
    return " ".join(map(shlex.quote, requirements))
