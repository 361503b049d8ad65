"""Kubeflow's runtime status: a pod without Loom is seen by three variables, and its token is good for no more."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from loom.token_file import REPORT, TokenFile
from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.integration.gateway.test_tls import issue
from tests.support.gateways import BOUND, TOKEN, Gateway, await_true, gateway_of

PATH = "/api/v1/weaver/trainer-status"


class Pod:
    """A pod's token and URL."""

    def __init__(self, gateway: Gateway, tokens: Path, replica: str) -> None:
        self.gateway = gateway
        self.made, self.token = TokenFile(tokens).create("ann", REPORT, replica=replica)
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
    last["trainerStatus"]["metrics"] = [{"name": "train_loss", "value": "0.5"}]  # it names no step
    assert pod.post(last)[0] == 200

    await_true(lambda: weaver.replica("done").state.value == "finished")
    assert (weaver.replica("done").ending, weaver.replica("done").step) == ("completed", 100)
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
        (pod.post(pod.status(-3)), 422, "the metric 'current_step' is -3, which is no count"),
        (pod.post(pod.status(2, total_steps="inf")), 422, "the metric 'total_steps' is inf"),
        (pod.post(pod.status(2, current_epoch="nan")), 422, "the metric 'current_epoch' is nan"),
        (pod.post(b'{"trainerStatus": "' + b"x" * 70_000 + b'"}'), 413, "over the limit"),
        (pod.post(pod.status(2), token="wrong"), 401, "does not accept the token"),
        (pod.post(pod.status(2), token=TOKEN), 403, "a token of one replica"),
    ]

    assert [(status, text in answer["error"]["message"]) for (status, answer), _, text in odd] == [
        (status, True) for _, status, _ in odd
    ], odd
    assert pod.post(pod.status(2))[0] == 200


def test_a_training_that_begins_again_under_its_name_is_another_process(
    gateway: Gateway, tokens: Path, weaver: WeaverProxy
) -> None:
    pod = Pod(gateway, tokens, "again")
    for step in (0, 40, 30):  # it may go back to a checkpoint
        assert pod.post(pod.status(step, step, loss=1.0))[0] == 200
    await_true(lambda: weaver.replica("again").step == 30)
    first = weaver.replica("again").instance

    answers = [pod.post(pod.status(step, step))[0] for step in (0, 1)]

    assert answers == [200, 200]
    await_true(lambda: weaver.replica("again").step == 1)
    assert weaver.replica("again").instance != first
    assert weaver.replica("again").state.value == "running"
    kinds = [event.kind for event in weaver.events(0, replica="again", limit=100)]
    assert kinds.count("registered") == 2
    assert [point.step for point in weaver.history("again", "loss")] == [0, 40, 30]
    for _ in range(2):  # the callback's last report may come twice
        assert pod.post(pod.status(100, 100))[0] == 200
    await_true(lambda: weaver.replica("again").state.value == "finished")
    kinds = [event.kind for event in weaver.events(0, replica="again", limit=100)]
    assert kinds.count("registered") == 2


def test_whatever_body_comes_is_taken_or_refused_with_the_reason(
    gateway: Gateway, tokens: Path, weaver: WeaverProxy
) -> None:
    pod, rng = Pod(gateway, tokens, "fuzzed"), random.Random(58)
    odd: list[Any] = [
        None,
        True,
        -1,
        10**400,
        1e308,
        math.nan,
        -math.inf,
        "",
        "x" * 300,
        "\ud800",
        "é",
        [],
        {},
        [[]],
        "1e999",
    ]
    times = ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", 0, 2**63, "now", "2026-02-30T00:00:00Z"]
    answers: list[tuple[tuple[int, dict[str, Any]], object]] = []
    for number in range(300):
        body = pod.status(number, rng.choice([None, 0, 5, 99]), loss=1.0, **{f"m{number}": 1})
        status = body["trainerStatus"]
        place = rng.choice([status, rng.choice(status["metrics"]), status, body])
        name = rng.choice(list(place))
        if rng.random() < 0.2:
            del place[name]
        else:
            place[name] = rng.choice(odd + (times if name == "lastUpdatedTime" else []))
        answers.append((pod.post(body), body))
    for raw in (
        b"",
        b"[]",
        b"null",
        b"[" * 20_000,
        b'{"trainerStatus": NaN}',
        b"\xff\xfe",
        b'{"trainerStatus": {}}',
    ):
        answers.append((pod.post(raw), raw))

    assert {status for (status, _), _ in answers} == {200, 422}, [one for one in answers if one[0][0] > 422]
    assert all(answer["error"]["message"] for (status, answer), _ in answers if status == 422)
    assert pod.post(pod.status(1000))[0] == 200
    await_true(lambda: weaver.replica("fuzzed").step == 1000)
    named = [{f"{letter}{number}": 1 for number in range(490)} for letter in "nop"]
    (first, _), _, (status, answer) = (pod.post(pod.status(2000 + at, **one)) for at, one in enumerate(named))
    assert (first, status, "more than 1000 metrics" in answer["error"]["message"]) == (200, 422, True)
    assert weaver.replica("fuzzed").connected


def test_a_revoked_token_reports_nothing_more(gateway: Gateway, tokens: Path, weaver: WeaverProxy) -> None:
    file = TokenFile(tokens)
    pod, short = Pod(gateway, tokens, "revoked"), Pod(gateway, tokens, "expired")
    _, short.token = file.create("ann", REPORT, replica="expired", expires_in=0.5)
    assert pod.post(pod.status(1))[0] == 200
    file.revoke(pod.made.id)

    await_true(lambda: pod.post(pod.status(2))[0] == 401)
    await_true(lambda: short.post(short.status(1))[0] == 401)
    assert weaver.replica("revoked").step == 1


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


SCRIPT = """
import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

class Line(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(1, 1)
    def forward(self, x, labels):
        return {"loss": ((self.linear(x) - labels) ** 2).mean()}

data = [{"x": torch.ones(1), "labels": torch.ones(1)} for _ in range(8)]
asked = {"max_steps": 8, "logging_steps": 1, "per_device_train_batch_size": 1, "use_cpu": True}
arguments = TrainingArguments("out", **asked)
Trainer(Line(PretrainedConfig()), arguments, train_dataset=data).train()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_trainer_of_transformers_is_seen_by_three_variables(cluster: LocalCluster, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    files, tokens = issue(tmp_path, "127.0.0.1"), tmp_path / "tokens.json"
    tls = ("--tls-cert", files.certificate, "--tls-key", files.key)
    with gateway_of(cluster, "--tokens", str(tokens), *tls) as gateway:
        pod = Pod(gateway, tokens, "transformer")
        (tmp_path / "token").write_text(pod.token + "\n")
        variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": gateway.url.replace("wss://", "https://") + PATH,
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": files.ca,
            "LOOM_AUTO": "",
        }
        command = [sys.executable, "-c", SCRIPT]
        subprocess.run(command, env={**os.environ, **variables}, cwd=tmp_path, check=True, timeout=300)

        _, token = TokenFile(tokens).create("ann", "operate")
        weaver = WeaverProxy(gateway.url, token, ca=files.ca)
        replica = weaver.replica("transformer")
        assert (replica.step, replica.max_step, replica.ending) == (8, 8, "completed")
        assert replica.metrics["progress_percent"] == 100
        assert "loss" in weaver.metrics("transformer")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_pods_report(gateway: Gateway, tokens: Path, weaver: WeaverProxy) -> None:
    pods = [Pod(gateway, tokens, f"pod-{number}") for number in range(1000)]
    with ThreadPoolExecutor(16) as pool:

        def report(step: int) -> set[int]:
            return set(pool.map(lambda pod: pod.post(pod.status(step, step, loss=1.0))[0], pods))

        assert [report(step) for step in (0, 5, 9)] == [{200}] * 3
        await_true(lambda: sum(one.step == 9 for one in weaver.replicas().values()) == 1000)
        assert all(weaver.replica(f"pod-{number}").connected for number in (0, 500, 999))
        assert report(100) == {200}
        await_true(lambda: sum(one.ending == "completed" for one in weaver.replicas().values()) >= 1000)
