"""One side of the comparison, in a process of its own: runs scripts by name and answers with their outcomes.

``python -m tests.parity.side native WORKER…``, ``python -m tests.parity.side loom URL TOKEN``, or ``inside``
instead of ``loom``: each script as a function that `Job.run` runs in the driver. ``bare-loom`` and ``bare-inside``
do as if torchmonarch were not installed on the laptop.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import cloudpickle

from tests.benchmarks.caller import serve
from tests.parity.api import Api
from tests.parity.outcomes import outcome_of_error, outcome_of_value

HANGS_AFTER = 60.0
"""Seconds after which a script is given up."""


Script: TypeAlias = Callable[[Any, Any], Any]


class Side:
    """What `serve` serves: `run` a script, and `close`.

    Args:
        outcome_of: runs a script; what came of it.
        close: ends what the scripts share.
    """

    def __init__(self, outcome_of: Callable[[Script], Any], close: Callable[[], None]) -> None:
        import tests.parity.actors
        from tests.parity import scripts

        # Whatever the workers' folder is: they need none of these modules.
        cloudpickle.register_pickle_by_value(tests.parity.actors)
        for module in scripts.MODULES:
            cloudpickle.register_pickle_by_value(module)
        self._scripts = scripts.SCRIPTS
        self._outcome_of = outcome_of
        self.close = close

    def run(self, name: str) -> Any:
        outcome: Any = {"raised": ["Hang"], "text": f"not done after {HANGS_AFTER:g} s"}

        def run() -> None:
            nonlocal outcome
            outcome = self._outcome_of(self._scripts[name])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(HANGS_AFTER)
        return outcome


def run_script(hosts: Any, api: Api, script: Script) -> Any:
    """What came of a script, as JSON."""
    try:
        return outcome_of_value(script(hosts, api))
    except BaseException as error:  # noqa: BLE001 - the outcome of this script
        return outcome_of_error(error, trace=True)


def run_inside(hosts: Any, procs: Any, script: Script) -> Any:
    """What came of a script, as JSON; for the driver, with the shared processes as Monarch's own."""
    import loom

    return run_script(hosts, Api(loom, hosts, loom.SupervisionError, procs), script)


def make_native(*workers: str) -> Side:
    from loom_gateway.workers.monarch_env import set_monarch_environment

    set_monarch_environment()
    import monarch.actor
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
    from monarch.actor import ChannelTransport, attach_to_workers, enable_transport

    from loom_gateway.workers.monarch_env import service_address

    # The default ends the process, and some scripts kill actors. Loom's driver replaces it too.
    monarch.actor.unhandled_fault_hook = lambda failure: None
    enable_transport(ChannelTransport.TcpWithLocalhost)
    hosts = attach_to_workers(
        ca="trust_all_connections", workers=list(map(service_address, workers)), name="parity"
    )
    api = Api(monarch.actor, hosts, SupervisionError)
    return Side(partial(run_script, hosts, api), api.close)


def make_loom(url: str, token: str) -> Side:
    import loom

    job = loom.connect(url, token)
    api = Api(loom, job.hosts, loom.SupervisionError)
    return Side(partial(run_script, job.hosts, api), job.close)


def make_inside(url: str, token: str) -> Side:
    import loom

    job = loom.connect(url, token)
    procs = job.hosts.spawn_procs(per_host={"gpus": 2}, name="shared")

    def outcome_of(script: Script) -> Any:
        try:
            return job.run(run_inside, job.hosts, procs, script)
        except Exception as error:  # noqa: BLE001 - the script could not be sent, or its outcome not come back
            return outcome_of_error(error, trace=True)

    return Side(outcome_of, job.close)


_MAKERS = {"native": make_native, "loom": make_loom, "inside": make_inside}


def main(kind: str, *arguments: str) -> None:
    if kind.startswith("bare-"):
        sys.modules["monarch"] = None  # type: ignore[assignment]
    serve(lambda: _MAKERS[kind.removeprefix("bare-")](*arguments))  # type: ignore[arg-type, return-value, operator]


if __name__ == "__main__":
    main(*sys.argv[1:])
