"""`Dashboard`, the gateway's page in a notebook."""

from __future__ import annotations

import json
import secrets
from html import escape
from urllib.parse import urlsplit

_STYLE = "width:100%;height:720px;border:1px solid rgba(128,128,128,.4);border-radius:6px"

_SCRIPT = """\
<script>
addEventListener("message", (event) => {{
  const frame = document.getElementById({id});
  if (frame && event.source === frame.contentWindow && event.data && event.data.loom === "ready")
    frame.contentWindow.postMessage({{ loom_code: {code} }}, {origin});
}});
</script>"""


class Dashboard:
    """A gateway's page, which a notebook shows in a frame.

    The gateway has to allow the notebook's origin: ``--allow-origin http://localhost:8888``. The page in the frame
    may look only. ``url`` opens it in a tab of its own.
    """

    def __init__(self, address: str) -> None:
        self.url = address
        """An address that signs one browser in, once, within a minute."""

    def __repr__(self) -> str:
        return f"the page of the gateway: {self.url}"

    def _repr_html_(self) -> str:
        page, _, code = self.url.partition("#code=")
        parts = urlsplit(page)
        id = f"loom-{secrets.token_hex(6)}"
        origin = f"{parts.scheme}://{parts.netloc}"
        script = _SCRIPT.format(
            **{name: _in_script(text) for name, text in (("id", id), ("code", code), ("origin", origin))}
        )
        return (
            f'<iframe id="{id}" src="{escape(page)}" title="Loom" style="{_STYLE}"></iframe>\n{script}\n'
            f'<div style="opacity:.75;font-size:90%">Is the frame empty? The gateway has to allow this notebook: '
            f"<code>--allow-origin</code> with the notebook's address.</div>"
        )


def _in_script(text: str) -> str:
    """Return a text as a literal of JavaScript that cannot end the script."""
    return json.dumps(text).replace("<", "\\u003c")
