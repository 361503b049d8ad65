"""The hook for failures that nothing handles, which a program assigns as Monarch's: `loom.unhandled_fault_hook`."""

from __future__ import annotations

import _thread
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any

from loom.process.threads import keep_going
from loom.screen_text import fit_lines
from loom_proxy.session.events import Event, MeshFailure, failure_of


def unhandled_fault_hook(failure: Any) -> None:
    """Do nothing about a failure that nothing in the cluster handles. A program may assign another function.

    ``loom.unhandled_fault_hook = mine``, as with ``monarch.actor.unhandled_fault_hook``. On the laptop the function
    gets the failures of all jobs of the program, from then on. If it returns, the failure is dropped; if it raises,
    the report is printed and the main thread is interrupted (`KeyboardInterrupt`), as by Monarch. In `Job.run` it
    gets those of the session, and an exception of it is logged. In an actor nothing calls it.
    """


def assigned_hook() -> Callable[[Any], object] | None:
    """Return the function that this program has assigned, if any."""
    hook = vars(sys.modules["loom"]).get("unhandled_fault_hook")
    return None if hook is unhandled_fault_hook else hook


class FaultHook:
    """Calls the program's hook with each failure of one session, on a thread that the first failure starts."""

    def __init__(self) -> None:
        self._failures: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, event: Event) -> None:
        """Take an event of the session. On the connection's thread."""
        failure = failure_of(event)
        if failure is None or assigned_hook() is None:
            return
        self._failures.put(failure)
        if self._thread is None:
            calling = "call the hook for failures", self._run
            self._thread = threading.Thread(target=keep_going, args=calling, name="loom-fault-hook", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            failure = self._failures.get()
            hook = assigned_hook()
            if hook is None:
                continue
            try:
                hook(failure)
            except BaseException:  # noqa: BLE001 - also a SystemExit: Monarch takes it for the end, too
                sys.stderr.write(fit_lines(f"{traceback.format_exc()}{_last_words(failure)}"))
                sys.stderr.flush()
                _interrupt_main()


def _interrupt_main() -> None:
    """Raise KeyboardInterrupt in the main thread, also while it waits: ``interrupt_main`` would not wake it."""
    main = threading.main_thread().ident
    if main is None or not hasattr(signal, "pthread_kill"):  # not on Windows
        _thread.interrupt_main()
    elif callable(signal.getsignal(signal.SIGINT)):  # else nobody heeds it, and by default it ends the process
        signal.pthread_kill(main, signal.SIGINT)


def _last_words(failure: MeshFailure) -> str:
    where = f"hostname={socket.gethostname()}, PID={os.getpid()} at time {datetime.now()}"
    return f"Unhandled monarch error on the root actor, {where}:\n{failure.report()}\n"
