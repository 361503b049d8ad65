"""A gateway behind nginx with TLS and a prefix: whose address is whose."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

import loom
from loom.rest_client import Gateway
from loom.token_file import TokenFile
from loom.weaver.views import Snapshot
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from loom_proxy.weaver.watch import WeaverWatch
from tests.support.gateways import await_true
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


class Prints(loom.Actor):
    @loom.endpoint
    def print(self, text: str) -> None:
        print(text)


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


@pytest.mark.guarantees(
    "strangers",
    "Behind a proxy that is not trusted every client has its address, and wrong tokens lock out nobody; a "
    "trusted one gives each its own",
)
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


@pytest.mark.guarantees(
    "strangers",
    "Behind a proxy that is not trusted every client has its address, and wrong tokens lock out nobody; a "
    "trusted one gives each its own",
)
def test_a_trusted_proxy_gives_each_client_its_own_address(tmp_path: Path) -> None:
    with behind_nginx(tmp_path, "--trusted-proxy", "127.0.0.0/8") as (url, cluster):
        statuses = [status(url, tmp_path, "wrong", "10.0.0.1") for _ in range(5)]
        assert statuses == [401] * 3 + [429] * 2
        assert status(url, tmp_path, "wrong", "10.0.0.2") == 401
        assert peers(tmp_path) == {"10.0.0.1", "10.0.0.2"}
        assert status(url, tmp_path, cluster.token, "10.0.0.1") == 200


@pytest.mark.guarantees(
    "strangers", "Behind a prefix with TLS users share, watch, follow logs and the weaver, and lose what is revoked"
)
@pytest.mark.guarantees("strangers", "A followed log comes through nginx line by line")
def test_what_users_do_goes_through_a_prefix(tmp_path: Path) -> None:
    ca, file = str(tmp_path / "ca.pem"), TokenFile(tmp_path / "tokens.json")
    tokens = {user: file.create(user, "drive") for user in ("ann", "bob")}
    with behind_nginx(tmp_path, "--tokens", str(file.path), "--trusted-proxy", "127.0.0.1") as (url, _):
        (_, ann), (of_bob, bob) = tokens["ann"], tokens["bob"]
        assert status(url, tmp_path, ann, "10.0.0.1") == 200
        with loom.connect(url, ann, ca=ca) as job:
            with pytest.raises(loom.UnknownSession):
                loom.connect(url, bob, job.session, mode="watch", ca=ca)
            job.share("bob", "view")
            watching = loom.connect(url, bob, job.session, mode="watch", ca=ca)
            lines = Gateway(url, bob, ca=ca).logs(job.session, follow=True)
            job.hosts.spawn_procs(name="procs").spawn("prints", Prints).print.call("through the prefix").get(BOUND)
            assert next(line["text"] for line in lines if line["mesh"] == "procs") == "through the prefix"
            assert isinstance(next(WeaverWatch(url, ann, ca).updates(timeout=BOUND)), Snapshot)
            with loom.connect(url, ann, ca=ca, transport="http") as polled:
                assert polled.run(max, 1, 2) == 2

            file.revoke(of_bob.id)
            assert list(lines) == []
            await_true(lambda: watching.closed)
            assert job.run(max, 1, 2) == 2


STEPS = """
import torch

optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for _ in range(3):
    optimizer.step()
"""


def test_a_training_under_loom_run_is_seen_through_it(tmp_path: Path, config: Path) -> None:
    with behind_nginx(tmp_path) as (url, cluster):
        shown = {"LOOM_URL": url.replace("wss:", "https:"), "LOOM_TOKEN": cluster.token}
        environment = {name: value for name, value in os.environ.items() if name not in ("LOOM_WEAVER", "RANK")}

        def run(*command: str, **more: str) -> str:
            loom = str(Path(sys.executable).with_name("loom"))
            done = subprocess.run(
                [loom, "run", "--name", "seen", "--", *command],
                env={**environment, **shown, **more},
                stderr=subprocess.PIPE,
                text=True,
                timeout=100,
                check=True,
            )
            return done.stderr

        assert "no trust in what answers" in run("true")
        assert run(sys.executable, "-c", STEPS, LOOM_CA=str(tmp_path / "ca.pem")) == ""
        replicas = WeaverProxy(cluster.url, cluster.token).replicas
        await_true(lambda: getattr(replicas().get("seen_0"), "step", None) == 3)
