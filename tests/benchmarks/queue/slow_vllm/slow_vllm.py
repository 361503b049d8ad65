"""Waiting in a vLLM server, as its requests ask for: no work for the processor.

vLLM imports this file by its name, in an environment of its own. ``SlowSteps`` lets each step of the engine take as
long as the newest request's ``vllm_xargs`` say, ``SlowLoop`` keeps the API server's event loop for each piece of a
stream as long as the header ``x-decode-s`` says.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor


class SlowSteps(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that changes nothing, and waits."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._seconds = 0.0

    def is_argmax_invariant(self) -> bool:
        return False  # or it is left out for greedy requests

    def update_state(self, batch_update: Any) -> None:
        for _, params, *_ in batch_update.added if batch_update else ():
            self._seconds = float((params.extra_args or {}).get("step_s", 0.0))

    def apply(self, logits: Any) -> Any:
        time.sleep(self._seconds)
        return logits


class SlowLoop:
    """An ASGI middleware that waits for each piece of an answer."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        seconds = float(dict(scope["headers"]).get(b"x-decode-s", b"0")) if scope["type"] == "http" else 0.0

        async def send_slowly(message: Any) -> None:
            if message["type"] == "http.response.body":
                time.sleep(seconds)  # noqa: ASYNC251 - the loop is to be busy
            await send(message)

        await self._app(scope, receive, send_slowly if seconds else send)
