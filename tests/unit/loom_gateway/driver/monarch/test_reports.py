"""What Monarch's reports of faults say: of actors that will not answer, and of the element that failed."""

from __future__ import annotations

import pytest

from loom_gateway.driver.monarch.errors import (
    Fault,
    MeshElement,
    about_endpoint,
    failed_element,
    failed_spawn,
    read_fault,
    unanswered_spawn,
)

STOPPED = "invalid reference counters<jagGnAUH3Cg>.my-m-1<j5KFJdYHmcM>.tcp://127.0.0.1:38013: actor stopped"
CAME_BACK = f"""\
The actor <monarch._src.actor.actor_mesh.RootClientActor client> and all its descendants have failed:
  undeliverable message for counters.add() (call):
  \tdescription: delivery of message from sender to dest failed
  \tsender: client.local<EdPsiRhQXQq>@tcp://127.0.0.1:37257
  \tdest: counters<jagGnAUH3Cg>.my-m-1<j5KFJdYHmcM>:<fth3VPi8YCK>@my-m-1<j5KFJdYHmcM>.tcp://127.0.0.1:38013
  \tmessage type: monarch_hyperactor::actor::PythonMessage
  \tdata_len: 148
  \terror: delivery failure: {STOPPED}
"""
CONTROLLER = """\
The actor actor_mesh_controller_counters-jaggnauh3cg<q2D9n1h2TA4>.local<EdPsiRhQXQq>@tcp://127.0.0.1:37257 and all \
its descendants have failed:
  undeliverable message to proc_agent.m-0<jP93x59yoru>:<Dnam76yK2mF>@m-0<jP93x59yoru>.tcp://127.0.0.1:51683:
"""


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (CAME_BACK, Fault("counters-jaggnauh3cg", 1, STOPPED)),
        (CONTROLLER, Fault("counters-jaggnauh3cg", None, "Monarch's controller of the mesh has failed")),
        # The process, or its host, is gone: its end of the process link tells.
        (CAME_BACK.replace(STOPPED, "ttl expired for counters<jagGnAUH3Cg>.my-m-1<j5KFJdYHmcM>"), None),
        ("The actor counters{'hosts': 0/2} failed: ValueError: undeliverable message for him", None),
    ],
)
def test_reports_of_faults(report: str, fault: Fault | None) -> None:
    assert read_fault(report) == fault


@pytest.mark.parametrize(
    ("mesh", "report", "place"),
    [
        (
            "echoes-4xYz",
            "The actor <root>.<user.Echo echoes{'hosts': 1/2, 'gpus': 0/2}> and all its descendants have failed: x",
            MeshElement("echoes", {"hosts": (1, 2), "gpus": (0, 2)}),
        ),
        ("echoes", "echoes-4xYz{'gpus': 3/8} failed", MeshElement("echoes", {"gpus": (3, 8)})),
        ("echoes-4xYz", "", None),
        ("echoes-4xYz", "echoes{", None),
        ("echoes-4xYz", "echoes{'hosts': x/2}", MeshElement("echoes", {})),
        ("echoes-4xYz", "others{'hosts': 0/2}", None),
        ("echoes-4xYz", "❄" * 10_000, None),
    ],
)
def test_the_element_that_a_report_names(mesh: str, report: str, place: MeshElement | None) -> None:
    assert failed_element(mesh, report) == place


@pytest.mark.parametrize("name", ["add", "add()", "add(port)"])
def test_a_failed_sentinel_is_told_of_with_the_endpoint_that_a_client_called(name: str) -> None:
    text = "Endpoint call counters.__sizeof__() failed, its process is gone"
    assert about_endpoint(text, "__sizeof__", name) == "Endpoint call counters.add() failed, its process is gone"


@pytest.mark.parametrize("kind", ["proc", "actor"])
def test_a_spawn_that_a_host_has_not_answered(kind: str) -> None:
    text = f"error spawning {kind} mesh: statuses: Timeout(60.001704494s)=0..1"

    explained = str(unanswered_spawn(f"{text}\n\nStack backtrace:\n 0: hyperactor"))

    assert text in explained
    assert "backtrace" not in explained
    assert unanswered_spawn("error spawning proc mesh: statuses: Failed(no such file)=0..1") is None


def test_a_mesh_that_was_not_made_because_an_actor_failed() -> None:
    event = "Supervision event: actor <root>.<Broken broken{'hosts': 1/2}> failed:\n  ValueError: cannot be made"
    text = f"RuntimeError: error spawning actor mesh: statuses: Failed({event}\n)=1..2;Running=0..1\n\nStack"

    assert failed_spawn(text) == event
    assert failed_spawn("error spawning proc mesh: statuses: Failed(no such file)=0..1") is None
    assert failed_spawn("error spawning actor mesh: statuses: Timeout(60.001704494s)=0..1") is None
