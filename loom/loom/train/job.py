"""`FaultTolerantJob`: replica groups that train together, and go on when some of them are lost.

::

    training = FaultTolerantJob(DigitsTrainer, groups=3, steps=2000, spares=1, checkpoints="/shared/digits")
    run = training.start(job)                                   # in the driver: it goes on without this program
    job.weaver.update_config("train", learning_rate=0.02)       # all groups, at the same step
    job.weaver.update_config("train_job", groups=4)             # one more
    print(run.result())

A lost group (its process killed, its host gone, an exception, a hang) is started again on a living host. It takes
its state from the groups that went on, or from the last whole checkpoint if none did. The weaver's events
(``loom events``) and the result list everything that happened.

A module apart from `loom.train.spec`, because trainers import the settings, and not the controller.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, replace
from typing import Any

from loom.branches.branch import own_branch
from loom.driver_api import session
from loom.threadlet.start_facts import own_start
from loom.train.controller.controller import Controller
from loom.train.controller.summaries import JobSummary
from loom.train.spec import JobSpec


@dataclass(frozen=True)
class FaultTolerantJob(JobSpec):
    """A `JobSpec` that can be started in a session's driver, which runs its controller."""

    def start(self, job: Any, restarts: int = 0) -> Any:
        """Start the job in a session's driver, which runs it without this program.

        Args:
            job: the session, a `loom.Job`.
            restarts: times that it goes on from its last whole checkpoint, in the same run, after it has failed or
                the session's driver has died; see `loom.Job.run`.

        Returns:
            The `loom.RunHandle`, whose result is a `JobSummary`; later, ``job.runs()`` finds it by the job's name.

        Raises:
            BranchRefused: ``loom branch`` has started this program for a branch that the job cannot be.
        """
        spec = self
        if (branch := own_branch()) is not None:  # this program was started again for it
            spec = self.begun_by(branch, os.environ.get("LOOM_RUN") or self.name, own_start())
        if restarts and spec.start_id is None:
            spec = replace(spec, start_id=secrets.token_hex(6))  # of one run, however often it is started again
        return job.run(spec.run, detach=True, name=spec.name, restarts=restarts)

    def run(self) -> JobSummary:
        """Run the job in this process, a session's driver, and return when the job is over; see `start`.

        Raises:
            ReplicaTaken: the user has a job of this name in another session.
            TrainingFailed: no group is left.
        """
        return Controller(self, session()).run()
