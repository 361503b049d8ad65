"""`job.dashboard()` in a notebook: a frame in another origin's page, which may look only and keeps no cookie."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect

from loom.process.listen import free_ports
from loom_proxy.local import LocalCluster
from tests.support.gateways import gateway_of

pytestmark = pytest.mark.slow


@contextmanager
def notebook(port: int, html: str) -> Iterator[str]:
    """The address of a page that shows an output of a cell."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"<!doctype html><meta charset=utf-8><title>notebook</title>{html}".encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.guarantees("page access", "Where the origin is shared, or in a frame, no cookie is set")
@pytest.mark.parametrize("allowed", [True, False])
def test_a_page_in_a_frame_may_look_only_where_the_gateway_allows_the_notebook(
    browser: Browser, cluster: LocalCluster, allowed: bool
) -> None:
    (port,) = free_ports(1)
    options = ["--allow-origin", f"http://127.0.0.1:{port}"] if allowed else []
    with gateway_of(cluster, *options) as gateway, gateway.connect() as job:
        with notebook(port, job.dashboard()._repr_html_()) as address:
            page = browser.new_context().new_page()
            try:
                page.goto(address)
                frame = page.frame_locator("iframe")
                if not allowed:
                    expect(frame.get_by_test_id("connection")).to_have_count(0)
                    assert page.frames[1].url.startswith("chrome-error:")
                    return
                expect(frame.get_by_test_id("connection")).to_have_attribute("data-state", "open")
                frame.get_by_test_id("nav-chaos").click()
                expect(frame.get_by_test_id("why-disabled")).to_be_visible()
                assert not page.context.cookies()
            finally:
                page.context.close()
