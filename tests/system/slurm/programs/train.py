"""A training of a user's, without a word of Loom: the ranks of a step of Slurm, until the file ``enough`` is there.

Rank 0 saves each step, and a job that was requeued goes on there.
"""

import os
import time
from pathlib import Path

import torch
from torch import distributed, nn

SAVED = Path("checkpoint.pt")
ENOUGH = Path("enough")


def main():
    distributed.init_process_group(
        "gloo", rank=int(os.environ["SLURM_PROCID"]), world_size=int(os.environ["SLURM_NTASKS"])
    )
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if SAVED.exists():
        model_state, optimizer_state = torch.load(SAVED)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    go_on = torch.ones(())
    steps = 0
    while go_on:
        time.sleep(0.02)
        loss = model(torch.ones(2)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if distributed.get_rank() == 0:
            if steps == 20:
                Path(f"trained-{os.environ.get('SLURM_RESTART_COUNT', 0)}").touch()
            torch.save((model.state_dict(), optimizer.state_dict()), SAVED.with_suffix(".new"))
            SAVED.with_suffix(".new").replace(SAVED)
            go_on.fill_(not ENOUGH.exists())
        distributed.broadcast(go_on, 0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
