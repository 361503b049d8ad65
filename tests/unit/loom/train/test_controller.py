"""What a job's controller tells the weaver of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loom.train import FaultTolerantJob, TrainerActor
from loom.train.controller.controller import Controller
from loom.train.settings import Ending
from tests.unit.loom.train.slots import Job

STEPS = 1200


class Threadlet:
    """Stands in for the job's threadlet: it notes what is published."""

    paused = should_stop = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def check_and_apply_updates(self) -> None: ...

    def publish_status(self, step: int, **about: Any) -> None:
        assert about["max_step"] == STEPS
        self.steps.append(step)


def test_the_last_step_is_published_when_the_groups_end_as_soon_as_they_have_made_it() -> None:
    job = Job(steps=STEPS)
    session: Any = SimpleNamespace(name="session", hosts=lambda: [0, 1])
    controller = Controller(FaultTolerantJob(TrainerActor, groups=2, steps=STEPS), session)
    controller._slots = job.slots
    threadlet: Any = Threadlet()

    def finish() -> None:
        for group in job.train():
            job.end(group, Ending.FINISHED, step=STEPS)

    controller._messages.put(finish)
    controller._handle_messages(threadlet)

    assert threadlet.steps == [STEPS]
