"""nginx as a reverse proxy on a port of 127.0.0.1."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loom.process.listen import free_ports
from tests.support.needs import skip_because

BOUND = 30.0

_CONFIGURATION = """
daemon off;
user {user};
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port}{tls};
        {server}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, server: str, tls: bool = False) -> Iterator[int]:
    """Run nginx with one server, whose directives are ``server``; the port on which it listens."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        skip_because("the program nginx (Debian package nginx-light) is not installed")
    (port,) = free_ports(1)
    user = f"{pwd.getpwuid(os.getuid()).pw_name} {grp.getgrgid(os.getgid()).gr_name}"  # whose folder it is
    configuration = folder / "nginx.conf"
    configuration.write_text(
        _CONFIGURATION.format(folder=folder, user=user, port=port, tls=" ssl" if tls else "", server=server)
    )
    process = subprocess.Popen([program, "-p", str(folder), "-c", str(configuration)], stdin=subprocess.DEVNULL)
    try:
        _await_port(port, process)
        yield port
    finally:
        process.terminate()
        process.wait(BOUND)


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + BOUND
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), BOUND).close()
            return
        except ConnectionRefusedError:
            assert process.poll() is None, "nginx ended"
            assert time.monotonic() < deadline, "nginx does not listen"
            time.sleep(0.02)
