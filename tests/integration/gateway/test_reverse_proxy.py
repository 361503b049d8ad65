"""A gateway behind nginx with TLS and a prefix: whose address is whose."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

import loom
from loom.rest import Gateway
from loom_proxy.local import LocalCluster
from tests.support.nginx import nginx
from tests.support.raw_client import BOUND

SERVER = """
    ssl_certificate {folder}/certificate.pem;
    ssl_certificate_key {folder}/key.pem;
    location /loom/ {{
        proxy_pass http://{gateway}/;
        proxy_http_version 1.1;
        proxy_set_header Upgrade $http_upgrade;
        proxy_set_header Connection upgrade;
        proxy_set_header X-Forwarded-For $http_x_test_address;
    }}
"""
"""The address of a client is what the client says, as if it came from there."""


@contextmanager
def behind_nginx(folder: Path, *options: str) -> Iterator[tuple[str, LocalCluster]]:
    """The URL of a gateway behind nginx, and the gateway."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(str(folder / "certificate.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    limits = ["--login-failures", "3", "--login-window", "3600", "--audit", str(folder / "audit"), *options]
    with LocalCluster(1, gateway_options=limits) as cluster:
        server = SERVER.format(folder=folder, gateway=cluster.url.removeprefix("ws://"))
        with nginx(folder, server, tls=True) as port:
            yield f"wss://127.0.0.1:{port}/loom", cluster


def status(url: str, folder: Path, token: str, address: str) -> int:
    """The status of an answer to a request with a token from an address."""
    request = urllib.request.Request(url.replace("wss:", "https:") + "/api/v1/status")
    request.add_header("Authorization", f"Bearer {token}")
    request.add_header("X-Test-Address", address)
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    try:
        with urllib.request.urlopen(request, timeout=BOUND, context=context) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def peers(folder: Path) -> set[str]:
    return {json.loads(line)["peer"] for line in (folder / "audit").read_text().splitlines()}


def test_wrong_tokens_through_a_proxy_that_is_not_trusted_lock_nobody_out(tmp_path: Path) -> None:
    with behind_nginx(tmp_path) as (url, cluster):
        statuses = [status(url, tmp_path, "wrong", "10.0.0.1") for _ in range(5)]
        assert statuses == [401] * 3 + [429] * 2
        assert status(url, tmp_path, "wrong", "10.0.0.2") == 429  # all have the proxy's address
        assert peers(tmp_path) == {"127.0.0.1"}

        ca = str(tmp_path / "ca.pem")
        assert Gateway(url, cluster.token, ca=ca).sessions() == []
        with loom.connect(url, cluster.token, ca=ca) as job:
            assert job.run(max, 1, 2) == 2


def test_a_trusted_proxy_gives_each_client_its_own_address(tmp_path: Path) -> None:
    with behind_nginx(tmp_path, "--trusted-proxy", "127.0.0.0/8") as (url, cluster):
        statuses = [status(url, tmp_path, "wrong", "10.0.0.1") for _ in range(5)]
        assert statuses == [401] * 3 + [429] * 2
        assert status(url, tmp_path, "wrong", "10.0.0.2") == 401
        assert peers(tmp_path) == {"10.0.0.1", "10.0.0.2"}
        assert status(url, tmp_path, cluster.token, "10.0.0.1") == 200


def test_a_followed_log_comes_through_line_by_line(tmp_path: Path) -> None:
    with behind_nginx(tmp_path) as (url, cluster), loom.connect(cluster.url, cluster.token) as job:
        job.run(print, "one line of a few")
        gateway = Gateway(url, cluster.token, ca=str(tmp_path / "ca.pem"), timeout=BOUND)
        lines = gateway.logs(job.session, follow=True)
        assert any("one line of a few" in line["text"] for line in lines)  # nginx keeps short ones otherwise
