"""Builds images with `buildah`, in a folder that holds all that this leaves."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.needs import skip_because

TOOLS = ("buildah", "runc", "debootstrap", "unshare", "ip", "pgrep")


def missing(*tools: str) -> str | None:
    """Why nothing can be built here, or ``None``."""
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"needs {', '.join(absent)}" if absent else None


def need(*tools: str) -> None:
    """Skip the test where something is missing, but fail it with ``LOOM_TEST_ALL``."""
    if reason := missing(*tools):
        skip_because(reason)


def pip_options(folder: Path) -> list[str]:
    """Options of `buildah build` with which pip finds what it finds here: its configuration and what it names."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found = configparser.RawConfigParser()
    mounts: set[Path] = set()
    for line in listed.stdout.splitlines():
        name, _, quoted = line.partition("=")
        section, _, key = name.rpartition(".")
        (value,) = shlex.split(quoted)
        section = "global" if section == ":env:" else section
        if not found.has_section(section):
            found.add_section(section)
        found.set(section, key, value)
        for word in value.split():
            local = Path(word.removeprefix("file://"))
            if local.is_absolute() and local.exists():
                mounts.add(local.parent if word.startswith("file://") else local)  # an index's files lie beside it
    configuration = folder / "pip.conf"
    with configuration.open("w") as file:
        found.write(file)
    volumes = [f"{configuration}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in sorted(mounts))]
    return [word for volume in volumes for word in ("--volume", volume)]


class Builder:
    """A storage of images of its own. What a command starts or mounts ends with the command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # TMPDIR: what it leaves where it is killed goes with the folder.
        self.command = ["env", f"TMPDIR={folder}", "buildah", "--storage-driver", "overlay"]
        self.command += ["--root", f"{folder}/storage", "--runroot", f"{folder}/run"]

    def apart(self, *command: str, network: bool = False, timeout: float = 120) -> str:
        """What a command prints; it has its own mounts and processes, and with ``network`` an empty network."""
        own = ["unshare", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        own += ["--net"] if network else []
        done = subprocess.run(
            [*own, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout

    def __call__(self, *words: str, timeout: float = 120) -> str:
        """What `buildah` prints."""
        return self.apart(*self.command, *words, timeout=timeout)

    def build(self, context: Path, file: Path, *options: str, timeout: float = 900) -> str:
        """Build what a Dockerfile says, from a context and the images that there are."""
        fixed = ["--isolation", "chroot", "--pull=never", "--format", "docker", "--file", str(file)]
        return self("build", *fixed, *options, str(context), timeout=timeout)

    def as_typed(self, command: str, folder: Path, registry: str) -> str:
        """What a command in a shell prints; `buildah` has this storage there, and a registry without TLS."""
        storage = (
            f'[storage]\ndriver = "overlay"\nrunroot = "{self.folder}/run"\ngraphroot = "{self.folder}/storage"\n'
        )
        registries = 'unqualified-search-registries = ["docker.io"]\n'
        registries += f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n'
        environment = {"TMPDIR": str(self.folder)}
        for name, text in (("STORAGE", storage), ("REGISTRIES", registries)):
            configuration = self.folder / f"{name.lower()}.conf"
            configuration.write_text(text)
            environment[f"CONTAINERS_{name}_CONF"] = str(configuration)
        given = [f"{name}={value}" for name, value in environment.items()]
        return self.apart("env", "-C", str(folder), *given, "sh", "-e", "-c", command, timeout=900)

    def debian(self, name: str, release: str) -> None:
        """Make an image of Debian with its own Python, where the official images of Python have theirs."""
        root = self.folder / "debian"
        packages = "--include=python3.11-venv,python3-distutils,ca-certificates,netbase,tzdata"
        self.apart("debootstrap", "--variant=minbase", packages, release, str(root), timeout=600)
        self.apart("chroot", str(root), "python3.11", "-m", "venv", "/usr/local")
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self("from", "--name", "debian", "scratch")
        self("add", "--quiet", "debian", str(root), "/")
        self("config", "--cmd", "python3", "--env", path, "debian")
        self("commit", "--quiet", "--rm", "debian", name)
        shutil.rmtree(root)

    def inspect(self, image: str) -> Any:
        """An image's configuration."""
        return json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]
