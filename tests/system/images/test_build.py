"""The images, built by a real builder, run as containers, and pushed into a real registry as `docs` says.

It differs from `docker build` in this: `buildah` reads the Dockerfiles, and the bases are not the registry's.
Each is Debian 12, made with `debootstrap`, with Debian's own Python 3.11 and the base's name; the one of the GPU
image has torch from pip besides. torch comes from where pip finds packages here, not from the index of CPU builds.
The containers are runc's, with processes and mounts of their own; they share one network, as if they were in one
pod, and have a root that they could write to.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.process.listen import free_ports
from tests.support.docs import Page
from tests.system.images.builder import TOOLS, Builder, need, pip_options
from tests.system.images.dockerfiles import FILES, ROOT, arguments, base, read

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

COPIED = {"loom", "gateway", "proxy", "pyproject.toml", "README.md"}
PAGE_TESTS = "gateway/dashboard/tests"
LEFT_BY_WORK = (
    ".git/config",
    ".venv/bin/python",
    ".mypy_cache/a",
    "images/kubernetes/base/token.env",
    "images/kubernetes/hosted/host-key",
    "gateway/dashboard/node_modules/vite/a.js",
    "loom/.env",
    "loom/loom/.ruff_cache/a",
    "loom/loom/__pycache__/left_by_work.pyc",
    "loom/monarch_loom.egg-info/PKG-INFO",
    "notes/private",
)


@pytest.fixture(scope="module")
def builder() -> Iterator[Builder]:
    need("buildah", "unshare")
    folder = Path(tempfile.mkdtemp(prefix="loom-build-", dir="/var/tmp"))
    try:
        yield Builder(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def clone(builder: Builder) -> Path:
    """The checkout, with what lies about where somebody works."""
    clone = builder.folder / "clone"
    names = (".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "token.env", "shared", "node_modules")
    dirt = shutil.ignore_patterns(*names)
    shutil.copytree(ROOT, clone, ignore=dirt)
    for name in LEFT_BY_WORK:
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("secret")
    return clone


@pytest.fixture(scope="module")
def bases(builder: Builder) -> None:
    """Stand-ins for the bases, under their names."""
    need(*TOOLS)
    cpu, gpu = (base(read(path)) for path in FILES)
    builder.debian(f"docker.io/library/{cpu}", release="bookworm")
    recipe = builder.folder / "gpu-base"
    recipe.write_text(f"FROM {cpu}\nCOPY torch.txt /\nRUN pip install --no-cache-dir --requirement /torch.txt\n")
    lists = ROOT / "loom" / "loom" / "images"
    builder.build(lists, recipe, *pip_options(builder.folder), "--tag", f"docker.io/{gpu}")


def test_only_what_the_dockerfiles_copy_is_in_the_context(builder: Builder, clone: Path) -> None:
    recipe, sent = builder.folder / "everything", builder.folder / "sent"
    recipe.write_text("FROM scratch\nCOPY . /\n")

    builder.build(clone, recipe, "--output", f"type=local,dest={sent}")

    wanted = {Path(name) for name in ("images/keep-gateway", "images/keep-sessions", "images/healthy")}
    for path in clone.rglob("*"):
        name = path.relative_to(clone)
        ours = name.parts[0] in COPIED and name.name[0] != "." and not name.is_relative_to(PAGE_TESTS)
        if path.is_file() and ours and str(name) not in LEFT_BY_WORK:
            wanted.add(name)
    assert {path.relative_to(sent) for path in sent.rglob("*") if path.is_file()} == wanted


CALL = """
import loom
from monarch.actor import Actor, endpoint

class Adder(Actor):
    @endpoint
    def add(self, more: float) -> float:
        import torch
        return float(torch.ones(3).sum() + more)

with loom.connect("ws://127.0.0.1:8470", "secret") as job:
    adders = job.hosts.spawn_procs(per_host={"gpus": 2}).spawn("adders", Adder)
    print("sums", [value for _, value in adders.add.call(4.0).get(timeout=60).items()])
"""

CONTAINERS = """
set -eu
ip link set lo up
in_container() {{ {buildah} run --isolation oci --runtime runc --network host "$@"; }}
listens() {{
    until grep -q listening {folder}/$1; do
        kill -0 $2 || {{ cat {folder}/$1; exit 1; }}
        sleep 0.1
    done
}}
healthy() {{ # an engine asks three times
    for time in 1 2 3; do
        if in_container "$@" -- {health}; then return 0; fi
    done
    echo $* is not healthy
    exit 1
}}
{buildah} rm --all > /dev/null
for name in worker gateway laptop; do {buildah} from --pull=never --name $name {image} > /dev/null; done
in_container laptop -- {entrypoint} {cmd} | grep -q serve
in_container laptop -- sh -c 'id -u; id -g; pwd' | tr '\\n' ' '
in_container laptop -- cat /proc/1/comm
in_container laptop -- find / -xdev -name .git -o -xdev -name '*.env' -o -xdev -name 'left_by_work*' \
    -o -xdev -path '/src/*' \\( -name __pycache__ -o -name tests \\) | sed 's/^/found /'
if in_container worker -- {health}; then echo healthy too early; exit 1; fi

in_container worker -- {entrypoint} loom serve worker --address tcp://127.0.0.1:26600 > {folder}/worker 2>&1 &
worker=$!
listens worker $worker
healthy worker
echo the worker is healthy

in_container --env LOOM_TOKEN=secret gateway -- {entrypoint} keep-gateway --worker tcp://127.0.0.1:26600 \
    > {folder}/gateway 2>&1 &
gateway=$!
listens gateway $gateway
healthy --env LOOM_WORKER_PORT=1 gateway
echo the gateway is healthy
in_container --volume {folder}/call.py:/call.py:ro laptop -- python /call.py

for container in "$gateway the gateway" "$worker the worker"; do
    kill -TERM $(pgrep --newest --exact tini) # an engine signals the container's first process
    code=0; wait ${{container%% *}} || code=$?
    echo "${{container#* }} ended with $code"
done
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_is_built_and_its_containers_serve_a_session(
    builder: Builder, bases: None, clone: Path, path: Path
) -> None:
    steps = read(path)
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    options = ["--build-arg", f"TORCH_INDEX={index}"] if "TORCH_INDEX" in arguments(steps) else []
    builder.build(clone, clone / "images" / path.name, *options, *pip_options(builder.folder), "--tag", "loom:test")

    made = builder.inspect("loom:test")
    assert (made["User"], made["WorkingDir"]) == ("10001:10001", "/home/loom")
    assert made["Entrypoint"] == ["tini", "--"]
    assert made["Cmd"] == ["loom", "--help"]
    assert set(made["ExposedPorts"]) == {"8470/tcp", "26600/tcp"}
    second = 1_000_000_000
    assert made["Healthcheck"] == {
        "Test": ["CMD", "healthy"],
        "Interval": 30 * second,
        "Timeout": 10 * second,
        "StartPeriod": 60 * second,
    }
    assert not [entry for entry in made["Env"] if "TOKEN" in entry]

    (builder.folder / "call.py").write_text(CALL)
    script = CONTAINERS.format(
        buildah=shlex.join(builder.command),
        image="loom:test",
        folder=builder.folder,
        entrypoint=shlex.join(made["Entrypoint"]),
        cmd=shlex.join(made["Cmd"]),
        health=shlex.join(made["Healthcheck"]["Test"][1:]),
    )
    printed = builder.apart("/bin/sh", "-c", script, network=True, timeout=300)
    assert "10001 10001 /home/loom cat\n" in printed  # a first process of its own
    assert "\nfound /" not in printed
    assert "the worker is healthy" in printed
    assert "the gateway is healthy" in printed
    assert "sums [7.0, 7.0]" in printed
    assert "the gateway ended with 0" in printed
    assert "the worker ended with" in printed


REGISTRY = """
version: 0.1
storage:
  filesystem:
    rootdirectory: {folder}
http:
  addr: 127.0.0.1:{port}
"""


@pytest.fixture
def registry(builder: Builder) -> Iterator[str]:
    """The address of a registry."""
    need("docker-registry", "setpriv")
    (port,) = free_ports(1)
    configuration = builder.folder / "registry.yml"
    configuration.write_text(REGISTRY.format(folder=builder.folder / "registry", port=port))
    command = ["setpriv", "--pdeathsig", "KILL", "docker-registry", "serve", str(configuration)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert any("listening on" in line for line in process.stderr)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it waits when the pipe is full
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_commands_of_the_page_put_an_image_into_a_registry(
    builder: Builder, bases: None, clone: Path, registry: str, path: Path
) -> None:
    lines = [line for block in Page.of("docs/deploy/kubernetes.md").blocks("sh") for line in block.lines]
    (line,) = (line for line in lines if f"-f images/{path.name} " in line)
    # As on this machine an image is built; the rest is as it stands there.
    here = ["--isolation", "chroot", "--pull=never", *pip_options(builder.folder)]
    if "TORCH_INDEX" in arguments(read(path)):
        here += ["--build-arg", f"TORCH_INDEX={os.environ.get('PIP_INDEX_URL', 'https://pypi.org/simple')}"]
    command = line.replace("buildah build", f"buildah build {shlex.join(here)}").replace("REGISTRY", registry)
    assert command.startswith("buildah build ")

    builder.as_typed(command, clone, registry)

    name = {"Dockerfile": "loom", "Dockerfile.gpu": "loom-gpu"}[path.name]
    kind = "application/vnd.docker.distribution.manifest.v2+json"  # OCI's has no health check
    asked = urllib.request.Request(f"http://{registry}/v2/{name}/manifests/0.2.0", headers={"Accept": kind})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        assert answer.headers["Content-Type"] == kind
        assert len(json.load(answer)["layers"]) > 1
