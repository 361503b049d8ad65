"""``python -m loom_gateway``: the gateway process. `loom serve gateway` runs it."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from loom.process.own_secrets import hide_from_proc, keep_memory_private

if TYPE_CHECKING:
    from loom_gateway.settings import GatewaySettings


def main() -> None:
    """Run the gateway until a signal ends it."""
    # First of all: drivers of the gateway before may run already, with user code and this process's user id.
    keep_memory_private()
    hide_from_proc("LOOM_TOKEN")

    import typer

    from loom.errors import LoomError
    from loom.process.exit_codes import report
    from loom_gateway.settings import command

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command(_serve))
    try:
        app(prog_name="loom serve gateway")
    except LoomError as error:
        sys.exit(report(error))


def _serve(settings: GatewaySettings) -> None:
    """Serve sessions on the workers: WebSocket, REST and health on one port. Prints one line of JSON when ready."""
    from loom.extras import GATEWAY_MODULES, require

    os.environ.pop("LOOM_TOKEN", None)  # drivers and the weaver inherit the environment
    logging.basicConfig(level=settings.log_level.value.upper(), format="%(levelname)s %(name)s: %(message)s")
    require(GATEWAY_MODULES, "a gateway")
    from loom_gateway.server import serve

    serve(settings)


if __name__ == "__main__":
    main()
