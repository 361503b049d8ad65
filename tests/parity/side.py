"""One side of the comparison, in a process of its own: runs scripts by name and answers with their outcomes.

``python -m tests.parity.side native WORKER…`` or ``python -m tests.parity.side loom URL TOKEN``; ``bare-loom`` does
as if torchmonarch were not installed on the laptop.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle

from tests.benchmarks.caller import serve
from tests.parity.api import Api
from tests.parity.outcomes import outcome_of_error, outcome_of_value

HANGS_AFTER = 60.0
"""Seconds after which a script is given up."""


class Side:
    """What `serve` serves: `run` a script, and `close`."""

    def __init__(self, hosts: Any, api: Api, close: Callable[[], None]) -> None:
        import tests.parity.actors
        from tests.parity import scripts

        # Whatever the workers' folder is: they need none of these modules.
        cloudpickle.register_pickle_by_value(tests.parity.actors)
        for module in scripts.MODULES:
            cloudpickle.register_pickle_by_value(module)
        self._scripts = scripts.SCRIPTS
        self._hosts = hosts
        self._api = api
        self.close = close

    def run(self, name: str) -> Any:
        outcome: Any = {"raised": ["Hang"], "text": f"not done after {HANGS_AFTER:g} s"}

        def run() -> None:
            nonlocal outcome
            try:
                outcome = outcome_of_value(self._scripts[name](self._hosts, self._api))
            except BaseException as error:  # noqa: BLE001 - the outcome of this script
                outcome = outcome_of_error(error, trace=True)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(HANGS_AFTER)
        return outcome


def make_native(*workers: str) -> Side:
    from loom_gateway.workers.monarch_env import set_monarch_environment

    set_monarch_environment()
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
    from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

    from loom_gateway.workers.monarch_version import service_address

    # The default ends the process, and some scripts kill actors. Loom's driver replaces it too.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    enable_transport(ChannelTransport.TcpWithLocalhost)
    hosts = attach_to_workers(
        ca="trust_all_connections", workers=list(map(service_address, workers)), name="parity"
    )
    api = Api(monarch.actor, hosts, SupervisionError)

    def close() -> None:
        if "procs" in vars(api):
            api.procs.stop().get(timeout=30)

    return Side(hosts, api, close)


def make_loom(url: str, token: str) -> Side:
    import loom

    job = loom.connect(url, token)
    return Side(job.hosts, Api(loom, job.hosts, loom.SupervisionError), job.close)


def main(kind: str, *arguments: str) -> None:
    if kind == "bare-loom":
        sys.modules["monarch"] = None  # type: ignore[assignment]
    make = make_native if kind == "native" else make_loom
    serve(lambda: make(*arguments))  # type: ignore[arg-type, return-value]


if __name__ == "__main__":
    main(*sys.argv[1:])
