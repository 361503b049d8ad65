"""``python -m loom_gateway``: the gateway process. `loom serve gateway` runs it."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from loom.process.hidden_secrets import (
    ancestors_that_show,
    hide_arguments,
    hide_from_proc,
    hide_headers,
    keep_memory_private,
)

if TYPE_CHECKING:
    from loom_gateway.settings import GatewaySettings


def main() -> None:
    """Run the gateway until a signal ends it."""
    # First of all: drivers of the gateway before may run already, with user code and this process's user id.
    keep_memory_private()
    hide_from_proc("LOOM_TOKEN")
    hide_arguments()

    from loom_gateway.settings import GatewaySettings, run_process

    run_process(_serve, GatewaySettings, "gateway", "uvicorn.error")


def _serve(settings: GatewaySettings) -> None:
    """Serve sessions on the workers: WebSocket, REST and health on one port. Prints one line of JSON when ready."""
    from loom.extras import GATEWAY_MODULES, require

    os.environ.pop("LOOM_TOKEN", None)  # drivers and the weaver inherit the environment
    hide_headers("uvicorn.error")
    require(GATEWAY_MODULES, "a gateway")
    _warn_of_a_shown_token(settings)
    from loom_gateway.server import serve

    serve(settings)


def _warn_of_a_shown_token(settings: GatewaySettings) -> None:
    """Say that user code can read the token, unless the gateway is of the user who drives it, as in `loom up`."""
    if not settings.token or settings.exit_with_parent:
        return
    if any(settings.token in argument for argument in sys.argv[1:]):
        logging.getLogger(__name__).warning(
            "every user of this machine could read --token on the command line: give LOOM_TOKEN or --token-file"
        )
    if settings.driver_uids:
        return
    if shown := ancestors_that_show("LOOM_TOKEN", settings.token):
        logging.getLogger(__name__).warning(
            "user code can read the gateway's token: process %s, of the user id that drivers have, has it in its "
            "environment. Among users who do not trust each other, give --driver-uids, or set LOOM_TOKEN for the "
            "gateway alone",
            " and process ".join(map(str, shown)),
        )


if __name__ == "__main__":
    main()
