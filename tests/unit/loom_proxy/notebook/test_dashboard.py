"""The page in a notebook: HTML that gives the frame its code, and nothing a hostile address could end."""

from __future__ import annotations

import re

import pytest

from loom_proxy.notebook.html import Dashboard


def test_the_frame_gets_its_code_from_the_notebook_and_not_in_its_address() -> None:
    html = Dashboard("https://host:8470/team/#code=abc")._repr_html_()

    (frame,) = re.findall(r'<iframe id="([^"]+)" src="https://host:8470/team/"', html)
    assert f'getElementById("{frame}")' in html
    assert 'postMessage({ loom_code: "abc" }, "https://host:8470")' in html
    assert html.count("abc") == 1


def test_two_frames_are_apart() -> None:
    page = Dashboard("http://host/#code=abc")
    assert page._repr_html_() != page._repr_html_()


@pytest.mark.parametrize("hostile", ["</script><b>", '"', "\\"])
def test_a_code_ends_neither_its_text_nor_the_script(hostile: str) -> None:
    html = Dashboard(f"http://host/#code={hostile}")._repr_html_()
    assert html.count("</script>") == 1
    assert "<b>" not in html


def test_its_text_has_the_address() -> None:
    assert repr(Dashboard("http://host/#code=abc")).endswith("http://host/#code=abc")
