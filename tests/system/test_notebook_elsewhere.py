"""`examples/notebook.ipynb` on a laptop, with a gateway of another host; on Kubernetes: `test_kubernetes_job`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from loom.token_file import TokenFile
from tests.integration.gateway.test_tls import issue
from tests.support.example_notebook import check_elsewhere
from tests.support.needs import skip_because
from tests.support.network.namespaces import FarCluster, Hosts, missing


@pytest.mark.slow
def test_the_example_notebook_runs_with_a_gateway_of_another_host_with_tls_and_a_users_token(
    tmp_path: Path,
) -> None:
    if reason := missing():
        skip_because(reason)
    files = issue(tmp_path, Hosts.address("gateway"))
    tokens = TokenFile(tmp_path / "tokens.json")
    token = tokens.create("ann", "drive")[1]
    options = ["--tls-cert", files.certificate, "--tls-key", files.key, "--tokens", str(tokens.path)]
    with FarCluster(gateway_options=options) as far, far.hosts.on("laptop"):

        def run(command: list[str]) -> str:
            without = {name: value for name, value in os.environ.items() if not name.startswith("LOOM_")}
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=without)
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout

        url = far.url.replace("ws:", "wss:")
        check_elsewhere(run, f"job = loom.connect({url!r}, token={token!r}, ca={files.ca!r})")
        with pytest.raises(AssertionError, match="certificate"):
            check_elsewhere(run, f"job = loom.connect({url!r}, token={token!r})")
        look_on = tokens.create("bob", "view")[1]
        with pytest.raises(AssertionError, match="ScopeError"):
            check_elsewhere(run, f"job = loom.connect({url!r}, token={look_on!r}, ca={files.ca!r})")
