"""The command ``loom``.

`main` is its entry point; `loom.cli.app` has all commands. Importing this package is cheap, so that the gateway and
the workers can use `loom.process.error_exit`.
"""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run the command line of this process and exit with a code of `loom.process.error_exit`."""
    from loom.process.hidden_secrets import hide_arguments

    runs = sys.argv[1:2] == ["run"]  # whose arguments are another command's
    shown = [] if runs else hide_arguments()  # before anything that takes long

    if runs:
        from loom.cli.run import app
    else:
        from loom.cli.app import app
    from loom.errors import LoomError
    from loom.process.error_exit import report, report_bug, warn
    from loom.terminal_text import fit_log_records

    fit_log_records()
    for what in shown if sys.stderr is not None and sys.stderr.isatty() else ():
        warn(
            f"every user of this machine could read {what} on the command line until now, and your shell's history "
            f"may keep it: give it by an environment variable, a file or a context"
        )
    try:
        app()
    except LoomError as error:
        sys.exit(report(error))
    except Exception as error:  # noqa: BLE001 - its traceback may hold text of the cluster's
        sys.exit(report_bug(error))
    sys.exit(0)
