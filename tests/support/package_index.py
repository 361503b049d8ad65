"""Wheels, and a package index on this machine, so that real installers can be tried without the internet."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zipfile
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "loom_test_package"


def build_wheel(
    folder: Path,
    version: str,
    name: str = NAME,
    content: Mapping[str, str] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """Build a wheel, by default of `NAME`, whose module has its ``version``."""
    info = f"{name}-{version}.dist-info"
    files = {
        **({f"{name}.py": f'version = "{version}"\n'} if content is None else content),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


@contextlib.contextmanager
def package_index(folder: Path, *versions: str) -> Iterator[str]:
    """Serve an index with versions of `NAME`; yield its URL."""
    project = folder / "simple" / NAME.replace("_", "-")
    wheels = [build_wheel(project, version) for version in versions]
    links = [
        f'<a href="{one.name}#sha256={hashlib.sha256(one.read_bytes()).hexdigest()}">{one.name}</a>'
        for one in wheels
    ]
    (project / "index.html").write_text("<!doctype html>" + "".join(links))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass
