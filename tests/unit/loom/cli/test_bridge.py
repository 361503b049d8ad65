"""Where ``loom bridge`` looks for NATS."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from loom.cli.app import app

pytest.importorskip("nats")

GATEWAY = ("--url", "ws://127.0.0.1:1", "--token", "a-token")


@pytest.mark.parametrize(
    ("argument", "variable", "expected"),
    [
        ((), "nowhere://variable", "nowhere://variable"),
        (("nowhere://argument",), "nowhere://variable", "nowhere://argument"),
        ((), None, "ws://127.0.0.1:1"),  # NATS's own address makes sense, and no gateway is there
    ],
)
def test_nats_is_where_the_variable_says_or_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, argument: tuple[str, ...], variable: str | None, expected: str
) -> None:
    monkeypatch.delenv("torchLoom_ADDR", raising=False)
    if variable is not None:
        monkeypatch.setenv("torchLoom_ADDR", variable)

    result = CliRunner().invoke(app, ["bridge", *argument, *GATEWAY])

    assert result.exit_code != 0
    assert expected in result.output + str(result.exception)


def test_the_default_is_torchlooms() -> None:
    result = CliRunner().invoke(app, ["bridge", "--help"], env={"COLUMNS": "200"})

    assert "torchLoom_ADDR" in result.output
    assert "nats://localhost:4222" in result.output
