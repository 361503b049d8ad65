"""What Monarch's reports of faults say of actors that will not answer."""

from __future__ import annotations

import pytest

from loom_gateway.driver.monarch.mesh_table import Entry, MeshTable
from loom_gateway.driver.monarch.reports import Fault, read_fault
from loom_gateway.driver.session.failures import Losses

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
        # The process, or its host, is gone: its end of the lifeline tells.
        (CAME_BACK.replace(STOPPED, "ttl expired for counters<jagGnAUH3Cg>.my-m-1<j5KFJdYHmcM>"), None),
        ("The actor counters{'hosts': 0/2} failed: ValueError: undeliverable message for him", None),
    ],
)
def test_reports_of_faults(report: str, fault: Fault | None) -> None:
    assert read_fault(report) == fault


def test_a_process_is_gone_also_where_its_mesh_has_been_forgotten() -> None:
    meshes = MeshTable()
    losses = Losses(meshes)
    actors = Entry("actors", "counters", None, 2, procs=1, ranks=(0, 1))
    meshes.add(1, Entry("procs", "trainers", None, 1, procs=1, ranks=(0, 1)))
    assert losses.why_silent(actors) is None

    losses.add_process(1, 1)

    assert str(losses.why_silent(actors)).startswith("process 1 of proc mesh 'trainers' is gone")
    meshes.forget(1)
    assert str(losses.why_silent(actors)).startswith("process 1 under 'counters' is gone")
