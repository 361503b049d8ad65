"""The Dockerfiles: pinned, not root, and what they run does run.

The RUN lines are executed without a container engine: in a mount namespace of their own, in an overlay of this
machine's root that vanishes with it, with a fresh virtual environment in the place of the base image's Python.
`test_build` builds the images.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.images.dockerfiles import FILES, ROOT, Step, arguments, base, only, read

by_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


@by_file
def test_the_base_and_every_package_are_pinned(path: Path) -> None:
    steps = read(path)
    assert re.search(r":\d+\.\d+\.\d+-", base(steps)), base(steps)
    for step in steps:
        assert "latest" not in step.text
        if step.instruction == "RUN" and "apt-get install" in step.text:
            asked = re.findall(r"no-install-recommends (.*?) &&", step.text)[0].split()
            assert all("=" in package for package in asked)
        if step.instruction == "RUN" and "pip install" in step.text:
            assert "--no-cache-dir" in step.text
            assert "--requirement" in step.text or "--no-deps /src" in step.text


@by_file
def test_the_container_does_not_run_as_root_and_has_an_init_and_a_health_check(path: Path) -> None:
    steps = read(path)
    assert only(steps, "USER").text == "10001:10001"
    assert only(steps, "ENTRYPOINT").words == ["tini", "--"]
    assert only(steps, "HEALTHCHECK").command == ["healthy"]


@by_file
def test_what_is_copied_is_there(path: Path) -> None:
    for step in read(path):
        if step.instruction == "COPY":
            *sources, _ = [word for word in step.words if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), step.text


def test_both_images_have_the_same_python() -> None:
    cpu, gpu = (arguments(read(path))["PYTHON_VERSION"] for path in FILES)
    assert cpu.split(".")[:2] == gpu.split(".")[:2]


SETUP = """
set -eu
mount -t tmpfs none {folder}
mkdir {folder}/upper {folder}/work {folder}/root
mount -t overlay none -o lowerdir=/,upperdir={folder}/upper,workdir={folder}/work {folder}/root
mount --rbind /dev {folder}/root/dev
mount -t proc none {folder}/root/proc
exec chroot {folder}/root /bin/sh {script}
"""

# As the image's user, with a network of its own, so that the ports are free.
AS_USER = "cd /home/loom && exec setpriv --reuid 10001 --regid 10001 --clear-groups env HOME=/home/loom "

INSIDE = """
ip link set lo up
as_user() {{ ( {as_user} "$@" ) }}
cd /
as_user {entrypoint} {cmd} | grep -q serve
as_user python -c 'import loom_gateway, monarch, torch; print("imported", loom_gateway.__file__)'
if as_user {health}; then echo healthy too early; exit 1; fi
as_user {entrypoint} loom serve worker --address tcp://127.0.0.1:26600 > /tmp/worker & started=$!
until grep -q listening /tmp/worker; do kill -0 $started; sleep 0.1; done
as_user {health}
echo the worker is healthy
LOOM_TOKEN=secret as_user {entrypoint} keep-gateway --worker tcp://127.0.0.1:26600 > /tmp/gateway & started=$!
until grep -q listening /tmp/gateway; do kill -0 $started; sleep 0.1; done
as_user env LOOM_WORKER_PORT=1 {health}
echo the gateway is healthy
"""


def script_of(steps: list[Step], environment: dict[str, str]) -> str:
    """A shell script that does what an engine does with a Dockerfile, in a root that has a fresh Python."""
    given = {**arguments(steps), **environment}
    lines = ["set -eu", "/usr/bin/python3.11 -m venv /opt/python"]
    lines += ["export PATH=/opt/python/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
    if "pytorch" in only(steps, "FROM").text:  # the base brings torch
        lines += [f"pip install --quiet --requirement {ROOT}/loom/loom/images/torch.txt"]
    for step in steps:
        if step.instruction == "RUN":
            lines += [f"echo + {shlex.quote(step.text)}", f"/bin/sh -c {shlex.quote(step.text)}"]
        elif step.instruction == "COPY":
            modes = [word.partition("=")[2] for word in step.words if word.startswith("--chmod=")]
            *sources, to = [word for word in step.words if not word.startswith("--")]
            if to.endswith("/"):
                lines += [f"mkdir -p {to}"]
                lines += [f"cp -r {ROOT / source} {to}" for source in sources]
                lines += [f"chmod {mode} {to}{Path(source).name}" for mode in modes for source in sources]
            else:
                lines += [f"mkdir -p {to}", f"cp -r {ROOT / sources[0]}/. {to}"]
    lines += ["cat > /inside <<'EOF'", "set -eu"]
    lines += [
        INSIDE.format(
            as_user=AS_USER,
            entrypoint=shlex.join(only(steps, "ENTRYPOINT").words),
            cmd=shlex.join(only(steps, "CMD").words),
            health=shlex.join(only(steps, "HEALTHCHECK").command),
        )
    ]
    lines += ["EOF", "exec unshare --net /bin/sh /inside"]
    return "\n".join(lines) + "\n"


in_a_fresh_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None or not Path("/usr/bin/python3.11").exists(),
    reason="needs root, unshare, and Python 3.11, which the images have",
)


def build(steps: list[Step], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Do what a Dockerfile says, and try what it makes, in a root that vanishes."""
    # torch's own index may be out of reach; where pip finds its packages here, it finds a torch, too.
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    script = tmp_path / "script"
    script.write_text(script_of(steps, {"TORCH_INDEX": index} if "TORCH_INDEX" in arguments(steps) else {}))
    folder = tmp_path / "mounts"
    folder.mkdir()
    setup = SETUP.format(folder=folder, script=script)
    # What is left running ends with the process namespace.
    return subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", setup],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
    )


@in_a_fresh_root
def test_a_run_line_that_fails_is_seen(tmp_path: Path) -> None:
    steps = [step for step in read(FILES[0]) if step.instruction != "RUN"]
    done = build([*steps, Step("RUN", "touch /made-in-the-image && cat /no-such-file")], tmp_path)
    assert done.returncode == 1
    assert "/no-such-file: No such file" in done.stdout
    assert not Path("/made-in-the-image").exists()  # it was another root


@pytest.mark.slow
@pytest.mark.timeout(1500)
@in_a_fresh_root
@by_file
def test_the_run_lines_work_and_what_they_make_is_healthy(path: Path, tmp_path: Path) -> None:
    done = build(read(path), tmp_path)

    assert done.returncode == 0, done.stdout[-6000:]
    assert "the worker is healthy" in done.stdout
    assert "the gateway is healthy" in done.stdout
    assert "imported /opt/python/" in done.stdout
