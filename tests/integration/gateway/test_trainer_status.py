"""Kubeflow's runtime status: a pod without Loom is seen by three variables, and its token is good for no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from loom.token_file import REPORT, TokenFile
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of

PATH = "/api/v1/weaver/trainer-status"


class Pod:
    """A pod's token and URL."""

    def __init__(self, gateway: Gateway, tokens: Path, replica: str) -> None:
        self.gateway = gateway
        _, self.token = TokenFile(tokens).create("ann", REPORT, replica=replica)
        self.at = datetime.now(timezone.utc)

    @property
    def url(self) -> str:
        return self.gateway.url.replace("ws://", "http://") + PATH

    def status(self, step: int, progress: int | None = 10, **metrics: object) -> dict[str, Any]:
        """What the callback posts; each is a millisecond after the one before."""
        self.at += timedelta(milliseconds=1)
        named = {"current_step": step, "total_steps": 100, "current_epoch": 0.5, **metrics}
        status: dict[str, Any] = {"lastUpdatedTime": self.at.isoformat(), "estimatedRemainingSeconds": 9}
        status["metrics"] = [{"name": name, "value": str(value)} for name, value in named.items()]
        return {"trainerStatus": status if progress is None else {**status, "progressPercentage": progress}}

    def post(self, body: object, token: str | None = None, path: str = PATH) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url.replace(PATH, path), data, headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=BOUND) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens") / "tokens.json"


@pytest.fixture(scope="module")
def gateway(cluster: LocalCluster, tokens: Path) -> Iterator[Gateway]:
    with gateway_of(cluster, "--tokens", str(tokens)) as running:
        yield running


@pytest.fixture(scope="module")
def weaver(gateway: Gateway, tokens: Path) -> WeaverProxy:
    _, token = TokenFile(tokens).create("ann", "operate")
    return WeaverProxy(gateway.url, token)


def test_a_report_is_a_replica_that_takes_no_commands(gateway: Gateway, tokens: Path, weaver: WeaverProxy) -> None:
    pod = Pod(gateway, tokens, "bert")

    answers = [pod.post(pod.status(step, step, loss=1 / (1 + step))) for step in range(3)]
    await_true(lambda: weaver.replica("bert").step == 2)
    replica = weaver.replica("bert")
    refused = weaver.pause("bert").get(BOUND)["bert"]

    assert answers == [(200, {"status": "ok"})] * 3
    assert (replica.state.value, replica.step, replica.max_step, replica.epoch) == ("running", 2, 100, 0)
    assert dict(replica.metrics) == {"loss": 1 / 3, "progress_percent": 2.0, "eta_seconds": 9.0}
    assert replica.connected
    assert not replica.handlers
    assert [point.step for point in weaver.history("bert", "loss")] == [0, 1, 2]
    assert not refused.ok
    assert "takes no commands" in str(refused.reason)
    assert "reports by Kubeflow's status alone" in weaver.stacks("bert")


def test_the_end_of_a_training_is_told_by_its_last_report(
    gateway: Gateway, tokens: Path, weaver: WeaverProxy
) -> None:
    pod = Pod(gateway, tokens, "done")
    pod.post(pod.status(90, 90))
    last = pod.status(0, 100)
    last["trainerStatus"]["metrics"] = [{"name": "total_steps", "value": "100"}]
    assert pod.post(last)[0] == 200

    await_true(lambda: weaver.replica("done").state.value == "finished")
    assert weaver.replica("done").ending == "completed"
    again = pod.post(pod.status(0, 0))
    assert again[0] == 200
    assert (weaver.replica("done").step, weaver.replica("done").state.value) == (0, "running")


def test_reports_that_make_no_sense_are_refused_with_the_reason(gateway: Gateway, tokens: Path) -> None:
    pod = Pod(gateway, tokens, "odd")
    first = pod.status(1)
    assert pod.post(first)[0] == 200
    far = pod.status(2)
    far["trainerStatus"]["lastUpdatedTime"] = (pod.at + timedelta(hours=1)).isoformat()
    old = pod.status(2)
    old["trainerStatus"]["lastUpdatedTime"] = (pod.at - timedelta(hours=1)).isoformat()
    naive = pod.status(2)
    naive["trainerStatus"]["lastUpdatedTime"] = "2026-11-29T10:00:00"
    odd = [
        (pod.post(first), 422, "it came before"),
        (pod.post(far), 422, "ahead of the gateway's clock"),
        (pod.post(old), 422, "behind the gateway's clock"),
        (pod.post(naive), 422, "lastUpdatedTime"),
        (pod.post(b"garbage"), 422, "makes no sense"),
        (pod.post({}), 422, "trainerStatus"),
        (pod.post(pod.status(2, 101)), 422, "progressPercentage"),
        (pod.post(pod.status(2, loss="high")), 422, "is 'high', which is no number"),
        (pod.post(b'{"trainerStatus": "' + b"x" * 70_000 + b'"}'), 413, "over the limit"),
        (pod.post(pod.status(2), token="wrong"), 401, "does not accept the token"),
        (pod.post(pod.status(2), token=TOKEN), 403, "a token of one replica"),
    ]

    assert [(status, text in answer["error"]["message"]) for (status, answer), _, text in odd] == [
        (status, True) for _, status, _ in odd
    ], odd
    assert pod.post(pod.status(2))[0] == 200


def test_a_token_of_one_replica_does_nothing_else(gateway: Gateway, tokens: Path) -> None:
    pod = Pod(gateway, tokens, "narrow")
    for path in ("/api/v1/weaver/commands", "/api/v1/sessions/x/commands", "/api/v1/tunnel", "/api/v1/page/code"):
        status, answer = pod.post({"kind": "pause"}, path=path)
        assert (status, answer["error"]["code"]) == (403, "scope"), path
    for path in ("/api/v1/weaver/replicas", "/api/v1/status", "/metrics", PATH):
        request = urllib.request.Request(pod.url.replace(PATH, path))
        request.add_header("Authorization", f"Bearer {pod.token}")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=BOUND)
        assert refused.value.code == (405 if path == PATH else 403)
    assert pod.post({"token": pod.token}, path="/api/v1/page/sign-in")[0] in (403, 422)


def test_a_replica_that_reports_goes_on_over_a_restart_of_the_gateway(
    gateway: Gateway, tokens: Path, weaver: WeaverProxy
) -> None:
    pod = Pod(gateway, tokens, "lasting")
    first = pod.status(1, loss=1.0)
    pod.post(first)
    instance = weaver.replica("lasting").instance
    gateway.end()
    gateway.start()

    await_true(lambda: pod.post(first)[0] == 422)  # what came before the restart is known
    second = pod.post(pod.status(2, loss=0.5))

    assert second[0] == 200
    assert weaver.replica("lasting").instance == instance
    assert [point.step for point in weaver.history("lasting", "loss")] == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_callback_of_transformers_is_seen(
    gateway: Gateway, tokens: Path, weaver: WeaverProxy, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    pod = Pod(gateway, tokens, "transformer")
    (tmp_path / "token").write_text(pod.token + "\n")
    script = """
from transformers import TrainerControl, TrainerState
from transformers.integrations import KubeflowCallback

args, control = None, TrainerControl()
state = TrainerState(max_steps=8, is_world_process_zero=True)
callback = KubeflowCallback()
callback._MIN_UPDATE_INTERVAL = 0.0
callback.on_train_begin(args, state, control)
for step in range(1, 9):
    state.global_step, state.epoch = step, step / 10
    callback.on_log(args, state, control, logs={"loss": 1 / step})
    callback.on_step_end(args, state, control)
callback.on_train_end(args, state, control)
"""
    variables = {
        "KUBEFLOW_TRAINER_SERVER_URL": pod.url,
        "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        "LOOM_AUTO": "",
    }
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **variables}, cwd=tmp_path, check=True, timeout=300
    )

    replica = weaver.replica("transformer")
    assert (replica.step, replica.max_step, replica.ending) == (8, 8, "completed")
    assert [point.value for point in weaver.history("transformer", "loss")][:8] == [
        1 / step for step in range(1, 9)
    ]
