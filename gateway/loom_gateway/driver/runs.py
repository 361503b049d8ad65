"""Functions that run in the driver, beside the meshes."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from loom.wire.messages import Kind, Message

if TYPE_CHECKING:
    from loom_gateway.driver.operations import Handler, Operations

__all__ = ["Runs"]


class Runs:
    """The runs of one session."""

    def __init__(self, session: Operations) -> None:
        self._session = session
        self._run_threads = ThreadPoolExecutor(32, "run")
        self.handlers: dict[int, Handler] = {Kind.RUN: self._run}

    def _run(self, message: Message, started: float) -> None:
        fn, args, kwargs = self._session.decoder.loads(message.parts, "the function or an argument of run()")

        key = self._session.expect(message, started)

        def run() -> None:
            try:
                result = fn(*args, **kwargs)
                if inspect.iscoroutine(result):
                    result = asyncio.run(result)
            except BaseException as error:  # noqa: BLE001 - raised again on the laptop
                self._session.answer(key, None, error, eager=True)
            else:
                self._session.answer(key, result, None, eager=True)

        self._run_threads.submit(run)
