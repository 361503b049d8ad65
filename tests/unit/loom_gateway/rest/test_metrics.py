"""Numbers as Prometheus reads them."""

from __future__ import annotations

import asyncio
import math
import shutil
import subprocess
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loom.control.latencies import BOUNDS, Latencies
from loom.control.operations import GetNumbers, Operation
from loom.errors import WeaverUnavailable
from loom.process import tasks
from loom.weaver.keys import EVERYONE
from loom_gateway.access.budgets import Budgets
from loom_gateway.rest import metrics
from loom_gateway.rest.metrics import metrics_text
from loom_gateway.sessions.session import SessionState

NUMBERS = {
    "started": 1.5,
    "replicas": {"running": 2},
    "devices": 8,
    "commands": 0,
    "reports": 7,
    "event": 9,
    "history_bytes": 1 << 40,
    "command_latency": Latencies().to_dict(),
    "call_latency": {},
    "of_jobs": [],
    "of_replicas": {},
    "of_devices": {},
    "device_states": {},
}


class StandIn:
    """Stands in for the weaver's client and the manager of sessions: what they count is chosen here."""

    def __init__(self, numbers: dict[str, dict[str, Any]] | None) -> None:
        self._numbers = numbers
        traffic = SimpleNamespace(bytes_in=3, bytes_out=4)
        about = {"state": SessionState.STARTING, "clients": 1, "operations": 2, "traffic": traffic}
        self.sessions = lambda: [SimpleNamespace(name="s", user="anna", **about)]
        self.ended = SimpleNamespace(all=list)

    async def ask_for(self, asked: Operation, user: str) -> bytes:
        assert (asked, user) == (GetNumbers(), EVERYONE)
        if self._numbers is None:
            raise WeaverUnavailable("it is away")
        packed: bytes = msgpack.packb(self._numbers)
        return packed


def page(**numbers: Any) -> str:
    gateway: Any = StandIn({"anna": {**NUMBERS, **numbers}})
    return asyncio.run(metrics_text(gateway, gateway, None)).decode()


def samples(text: str, family: str) -> dict[tuple[str, ...], float]:
    """The samples of a family, by the values of their labels in the order of their names."""
    found = [one for one in text_string_to_metric_families(text) if one.name == family]
    assert len(found) == 1
    return {tuple(one.labels[name] for name in sorted(one.labels)): one.value for one in found[0].samples}


def test_a_family_is_introduced_and_its_samples_follow() -> None:
    text = page()

    assert "# HELP loom_replicas Replicas, by state.\n# TYPE loom_replicas gauge\n" in text
    assert samples(text, "loom_replicas")["running", "anna"] == 2
    assert samples(text, "loom_replicas")["failed", "anna"] == 0
    assert samples(text, "loom_devices") == {("anna",): 8}


def test_a_counter_has_its_name_and_no_time_of_creation() -> None:
    text = page()

    assert (
        '# TYPE loom_session_frames_total counter\nloom_session_frames_total{session="s",user="anna"} 2.0\n' in text
    )
    assert "_created" not in text


def test_buckets_add_up() -> None:
    latencies = Latencies()
    for seconds in (0.05, 0.05, 0.5, 20.0):
        latencies.add(seconds)

    text = page(call_latency={"s": latencies.to_dict(), "another session": latencies.to_dict()})

    assert 'loom_call_latency_seconds_bucket{le="0.02",session="s",user="anna"} 0.0' in text
    assert 'loom_call_latency_seconds_bucket{le="0.05",session="s",user="anna"} 2.0' in text
    assert f'loom_call_latency_seconds_bucket{{le="{BOUNDS[-1]}",session="s",user="anna"}} 3.0' in text
    assert 'loom_call_latency_seconds_bucket{le="+Inf",session="s",user="anna"} 4.0' in text
    assert 'loom_call_latency_seconds_count{session="s",user="anna"} 4.0' in text
    assert 'loom_call_latency_seconds_sum{session="s",user="anna"} 20.6' in text
    assert "another session" not in text


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e-300, 0.1 + 0.2, float(1 << 60), math.nan])
def test_a_number_is_exact(value: float) -> None:
    text = page(of_replicas={"r": {"step": None, "group": "g", "metrics": {"loss": value}}})

    (shown,) = samples(text, "loom_replica_metric").values()
    assert shown == value or math.isnan(shown) == math.isnan(value) is True


def test_what_others_name_cannot_make_a_sample() -> None:
    name = 'train"0"\\\n} 5\nforged 1'

    text = page(of_devices={name: {"utilization": 0.5, "power": None}})

    assert samples(text, "loom_device_utilization_ratio") == {(name, "anna"): 0.5}
    assert samples(text, "loom_device_power_watts") == {}
    assert "\nforged" not in text


def test_the_health_of_a_device_has_samples() -> None:
    hot = {"sm_clock": 1_980_000_000, "ecc_uncorrected": 2, "xid": 79, "throttled": ["thermal", "power_cap"]}
    lost = {"error": "GPU is lost", "processes": []}
    text = page(
        of_devices={"GPU-0": {**hot, "processes": [{"pid": 7}]}, "GPU-1": lost},
        device_states={"GPU-0": "active", "GPU-1": "failed"},
    )

    assert samples(text, "loom_device_sm_clock_hertz") == {("GPU-0", "anna"): 1_980_000_000}
    assert samples(text, "loom_device_ecc_uncorrected") == {("GPU-0", "anna"): 2}
    assert samples(text, "loom_device_last_xid") == {("GPU-0", "anna"): 79}
    assert samples(text, "loom_device_processes") == {("GPU-0", "anna"): 1, ("GPU-1", "anna"): 0}
    assert samples(text, "loom_device_throttled") == {
        ("GPU-0", "thermal", "anna"): 1,
        ("GPU-0", "power_cap", "anna"): 1,
    }
    assert samples(text, "loom_device_up") == {("GPU-0", "anna"): 1, ("GPU-1", "anna"): 0}
    assert samples(text, "loom_device_state") == {("GPU-0", "active", "anna"): 1, ("GPU-1", "failed", "anna"): 1}


def test_a_job_has_its_goodput_and_where_its_time_went() -> None:
    jobs = [
        {"job": "a", "ratio": 0.75, "seconds": {"compute": 3.0, "lost": 1.0}},
        {"job": "b", "ratio": None, "seconds": {}},
    ]

    text = page(of_jobs=jobs)

    assert samples(text, "loom_goodput_ratio") == {("a", "anna"): 0.75}
    assert "# TYPE loom_goodput_seconds_total counter\n" in text
    assert samples(text, "loom_goodput_seconds") == {
        ("a", "compute", "anna"): 3.0,
        ("a", "lost", "anna"): 1.0,
    }


EVERYTHING = {
    "of_jobs": [{"job": "a", "ratio": 0.5, "seconds": {"compute": 3.0}, "counters": {"compute": 4.0}}],
    "of_replicas": {"train_0": {"step": 7, "group": "train", "metrics": {"loss": 0.5, "tokens/s": math.nan}}},
    "of_devices": {
        "GPU-0": {
            **{key: 0.5 for key, _, _ in metrics._DEVICE_GAUGES},
            "processes": [1],
            "throttled": ["thermal"],
            "error": None,
        }
    },
    "device_states": {"GPU-0": "active"},
    "call_latency": {"s": {**Latencies().to_dict(), "tasks_died": 0}},
    "left_out": {"devices": 3},
}
"""Numbers of every kind."""


def everything() -> str:
    gateway: Any = StandIn({"anna": {**NUMBERS, **EVERYTHING}})
    return asyncio.run(metrics_text(gateway, gateway, None, {"unauthorized": 2}, [("anna", 1)])).decode()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_wrong() -> None:
    checked = subprocess.run(["promtool", "check", "metrics"], input=everything(), capture_output=True, text=True)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_family_is_named_after_its_kind_and_has_a_text_and_samples() -> None:
    families = list(text_string_to_metric_families(everything()))

    assert len({one.name for one in families}) == len(families) > 30
    for one in families:
        assert one.type in ("gauge", "counter", "histogram")
        assert one.documentation.endswith(".")
        assert one.name.startswith("loom_")
        assert one.samples
        totals = [sample.name.endswith("_total") for sample in one.samples]
        assert all(totals) if one.type == "counter" else not any(totals)


def test_while_the_weaver_is_away_its_numbers_are_missing() -> None:
    gateway: Any = StandIn(None)

    text = asyncio.run(metrics_text(gateway, gateway, None)).decode()

    assert samples(text, "loom_weaver_up") == {(): 0}
    assert samples(text, "loom_session_clients") == {("s", "anna"): 1}
    assert "loom_replicas" not in text


@pytest.mark.guarantees(
    "nothing lost",
    "A background task that dies is logged, counted in `/metrics`, and started again if it has to go on",
)
def test_background_tasks_that_died_are_counted_of_the_gateway_and_of_drivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "died", Counter({"watch tokens": 2, "look for workers": 1}))
    text = page(call_latency={"s": {**Latencies().to_dict(), "tasks_died": 4}})
    assert samples(text, "loom_tasks_died") == {("gateway", "", ""): 3, ("driver", "s", "anna"): 4}


@pytest.mark.guarantees("weaver", "`/metrics` is made beside the loop that relays calls")
def test_the_page_is_made_beside_the_loop_that_relays_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    generate = metrics.generate_latest

    def note_thread(registry: Any) -> bytes:
        threads.append(threading.current_thread())
        return generate(registry)

    monkeypatch.setattr(metrics, "generate_latest", note_thread)

    assert "loom_devices" in page()
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.guarantees(
    "weaver",
    "`/metrics` shows a user their own numbers; one with many or long names leaves the lists of all users "
    "readable, and the others' parts whole",
)
def test_a_user_sees_only_their_own_numbers() -> None:
    gateway: Any = StandIn({"anna": {**NUMBERS, "devices": 8}, "bert": {**NUMBERS, "devices": 3}})

    everyone = asyncio.run(metrics_text(gateway, gateway, None)).decode()
    bert = asyncio.run(metrics_text(gateway, gateway, "bert")).decode()

    assert samples(everyone, "loom_devices") == {("anna",): 8, ("bert",): 3}
    assert samples(bert, "loom_devices") == {("bert",): 3}
    assert "anna" not in bert


def test_a_user_of_whom_the_weaver_knows_nothing_has_a_page() -> None:
    gateway: Any = StandIn({"anna": NUMBERS})

    text = asyncio.run(metrics_text(gateway, gateway, "bert")).decode()

    assert samples(text, "loom_weaver_up") == {(): 1}


@pytest.mark.parametrize(("only", "label"), [("bert", "bert"), (None, "admin")])
def test_without_sessions_the_states_have_the_label_of_who_reads(only: str | None, label: str) -> None:
    gateway: Any = StandIn({})
    gateway.sessions = list

    text = asyncio.run(metrics_text(gateway, gateway, only)).decode()

    shown = samples(text, "loom_sessions")
    assert {user for _, user in shown} == {label}
    assert set(shown.values()) == {0}


def test_who_sees_all_users_sees_what_was_refused() -> None:
    gateway: Any = StandIn({})
    refusals = {"authentication": 3, "no_http": 1}

    everyone = asyncio.run(metrics_text(gateway, gateway, None, refusals)).decode()
    bert = asyncio.run(metrics_text(gateway, gateway, "bert", refusals)).decode()

    assert samples(everyone, "loom_refused") == {("authentication",): 3, ("no_http",): 1}
    assert samples(bert, "loom_refused") == {}


def test_a_gateway_counts_the_connections_of_each_user() -> None:
    gateway: Any = StandIn({})
    budget = Budgets.of().connections
    for user in ("anna", "bert", "bert", "carl"):
        budget.take(user)
    budget.give_back("carl")

    everyone = asyncio.run(metrics_text(gateway, gateway, None, {}, budget.by_user())).decode()
    bert = asyncio.run(metrics_text(gateway, gateway, "bert", {}, budget.by_user())).decode()

    assert samples(everyone, "loom_connections") == {("anna",): 1, ("bert",): 2}
    assert samples(bert, "loom_connections") == {("bert",): 2}


@pytest.mark.guarantees("after a session", "No user's names take `/metrics` from the others")
@pytest.mark.parametrize("name", ["\x1b[31m", "a\nb", 'q"\\', "\u202e", "", "x" * 200, "\r", "\0"], ids=ascii)
def test_no_name_of_a_user_breaks_the_page(name: str) -> None:
    text = page(
        of_replicas={
            name: {"step": 3, "group": name, "metrics": {name: 0.5, "loss": 1.0}},
            "good": {"step": 5, "group": "g", "metrics": {"loss": 2.0}},
        },
        of_devices={name: {"utilization": 0.5, "throttled": [name, name]}},
        device_states={name: "active"},
        left_out={"metrics": 7},
    )

    good = [
        [value for labels, value in samples(text, family).items() if "good" in labels]
        for family in ("loom_replica_step", "loom_replica_metric")
    ]
    assert good == [[5], [2.0]]
    assert list(samples(text, "loom_names_left_out").values()) == [7]
    assert len(samples(text, "loom_device_throttled")) == 1


def test_a_label_that_is_no_text_of_utf_8_is_shown_as_its_escape() -> None:
    family = metrics._labelled(
        metrics.GaugeMetricFamily, "x", "x", ["name"], [("\ud800", 1), ("b", 1 << 2000), ("c", 2)]
    )

    assert [sample.labels["name"] for sample in family.samples] == ["\\ud800", "c"]


@pytest.mark.parametrize(("since", "durable"), [(None, 1.0), (5.0, 0.0)])
def test_a_weaver_that_stores_nothing_is_seen(since: float | None, durable: float) -> None:
    assert list(samples(page(undurable_since=since), "loom_weaver_durable").values()) == [durable]
