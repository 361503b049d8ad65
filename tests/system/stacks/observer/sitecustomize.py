"""The start of each process of an observed script: the process writes down its own steps, and their learning rates.

The folder is on the script's ``PYTHONPATH``, with ``loom run`` and without. The lines say what a process did,
whatever Loom says of it. A line is a list: the time, the rank, and then the number and the learning rate of a step
that begins, the id of a command that has come, or ``made`` at the end of each of the first two steps.
"""

import json
import os
import time

from loom.instrument.imports import when_imported


class Observer:
    def __init__(self):
        self.step = 0
        self.rank = None

    def begin_step(self, optimizer, args, kwargs):
        if "lr" not in optimizer.param_groups[0]:
            return  # a container of optimizers
        if self.rank is None:
            from loom.instrument.training import global_rank

            # torchft's replica groups count their ranks from 0, and each has one here.
            self.rank = int(os.environ.get("REPLICA_GROUP_ID", global_rank()))
        self.step += 1
        if self.step == 1:  # hooks of an optimizer come before those of all, such as Loom's
            optimizer.register_step_post_hook(self.make_step)
        self.note(self.step, float(optimizer.param_groups[0]["lr"]))

    def make_step(self, optimizer, args, kwargs):
        if self.step <= 2:
            self.note("made")

    def note(self, *what):
        with open(os.path.join(os.environ["LOOM_OBSERVED"], str(os.getpid())), "a") as file:
            file.write(json.dumps([time.time(), self.rank, *what]) + "\n")


if "LOOM_OBSERVED" in os.environ:
    observer = Observer()
    when_imported(
        "torch.optim.optimizer", lambda torch: torch.register_optimizer_step_pre_hook(observer.begin_step)
    )

    def watch_inbox(module):
        receive = module.CommandInbox.receive

        def note_and_receive(inbox, command):
            observer.note(command.id)
            return receive(inbox, command)

        module.CommandInbox.receive = note_and_receive

    when_imported("loom.threadlet.inbox", watch_inbox)
