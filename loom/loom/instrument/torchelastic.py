"""torchrun's agent: it tells the ranks that it has started them again, also when a host has come or left.

The agent counts failures alone in ``TORCHELASTIC_RESTART_COUNT``. The module is one of its own because a launcher
imports nothing else of Loom.
"""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "LOOM_STARTED_AGAIN"


def hook(module: Any) -> None:
    """Hook ``torch.distributed.elastic.agent.server.api``: processes that are started again get the variable."""
    restart = module.SimpleElasticAgent._restart_workers

    @functools.wraps(restart)
    def start_again(self: Any, *args: Any, **kwargs: Any) -> None:
        os.environ[VARIABLE] = "1"
        try:
            restart(self, *args, **kwargs)
        finally:
            os.environ.pop(VARIABLE, None)

    module.SimpleElasticAgent._restart_workers = start_again
