"""``python -m tests.system.stacks.accelerate_loop``: a loop with Accelerate that gets two commands in its step 3.

It prints the step after each batch, and each acknowledgement, in JSON.
"""

from __future__ import annotations

import json

from loom.instrument.bootstrap import begin

begin()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402

from loom.control.commands import Command, CommandKind  # noqa: E402
from loom.instrument.training import training  # noqa: E402

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    steps = []
    for batch in range(24):
        with accelerator.accumulate(model):
            loss = model(torch.rand(4, 2)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log({"loss": loss.item(), "note": "no number"})
        inbox = training().threadlet._inbox
        if batch == 5:
            inbox.receive(Command("c0", CommandKind.UPDATE_CONFIG, {"gradient_accumulation_steps": 4}))
            inbox.receive(Command("c1", CommandKind.SAVE, {}))
        steps.append(training().threadlet._whole_step())
    made = {id: one.acknowledgement.to_body() for id, one in inbox._acknowledged.items()}
    print(json.dumps({"steps": steps, "made": made, "metrics": sorted(training()._metrics)}))
