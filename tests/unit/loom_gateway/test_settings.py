"""The options of a gateway: one declaration for the command, the process and a pod."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loom.errors import WrongArguments
from loom_gateway.settings import GatewaySettings, Limits, LogLevel, command

GIVEN = GatewaySettings(
    worker=["tcp://10.0.0.1:26600", "tcp://10.0.0.2:26600"],
    workers=["loaders=file:/etc/loaders"],
    port=0,
    drain=2.5,
    injectable=True,
    log_level=LogLevel.debug,
    tokens=Path("/etc/tokens.json"),
    allow_origin=["https://a.example"],
    allow_host=["a.example"],
    max_sessions=0,
)


def parsed(*arguments: str, **environment: str) -> GatewaySettings:
    found: list[GatewaySettings] = []
    app = typer.Typer()
    app.command()(command(found.append, GatewaySettings))
    result = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_without_options_they_are_the_defaults() -> None:
    assert parsed() == GatewaySettings()
    assert GatewaySettings().arguments() == []


def test_the_command_line_of_settings_makes_the_same_settings() -> None:
    assert parsed(*GIVEN.arguments()) == GIVEN


def test_a_token_comes_from_the_environment_and_is_on_no_command_line() -> None:
    settings = parsed(LOOM_TOKEN="secret")

    assert settings.token == "secret"
    assert settings.arguments() == []


def test_whether_failures_may_be_injected_comes_from_the_environment_too() -> None:
    assert parsed(LOOM_INJECTABLE="1").injectable
    assert not parsed(LOOM_INJECTABLE="0").injectable


@pytest.mark.parametrize("limit", [float("inf"), float("nan"), -1.0])
def test_a_limit_is_a_number_from_0_on(limit: float) -> None:
    with pytest.raises(WrongArguments, match="--connection-rate is a number from 0 on"):
        Limits(connection_rate=limit)


def test_a_login_window_has_a_length() -> None:
    with pytest.raises(WrongArguments, match="--login-window is larger than 0"):
        Limits(login_window=0.0)
