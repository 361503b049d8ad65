"""A gateway whose weaver is elsewhere: what it says while the weaver is away, and which options go with it."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any

import pytest

import loom
from loom.errors import Denied
from loom.process.listen import free_ports
from loom.token_file import ADMIN
from loom_gateway import weaver_process
from loom_gateway.rest.weaver_changes import Components
from loom_gateway.server import serve
from loom_gateway.settings import GatewaySettings
from loom_gateway.weaver_process import RemoteWeaver
from tests.unit.loom.weaver.raw_threadlet import BOUND
from tests.unit.loom.weaver.running import running


async def test_while_it_is_away_that_is_said_and_when_it_is_back_it_is_found(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    (port,) = free_ports(1)
    weaver = RemoteWeaver(f"127.0.0.1:{port}", b"secret")
    monkeypatch.setattr(weaver.client, "_patience", 0.1)
    weaver.start()

    async def ask() -> Any:
        return await weaver.client.ask("policies", user=ADMIN)

    with pytest.raises(loom.WeaverUnavailable, match=r"it has not come up yet|does not answer since"):
        await ask()
    async with running(port, over_tcp=True):
        await asyncio.wait_for(weaver.client.available(), BOUND)
        assert await ask() == {}
    await until_away(weaver)
    with pytest.raises(loom.WeaverUnavailable) as raised:
        await ask()
    since = weaver._since
    async with running(port, over_tcp=True):
        await asyncio.wait_for(weaver.client.available(), BOUND)
        assert await ask() == {}
        await weaver.close(end=True)

    text = f"the weaver at 127.0.0.1:{port} does not answer since {since}: .*; replicas go on meanwhile"
    assert re.fullmatch(text, str(raised.value))
    # Monarch puts words before each line of its root client, which another test may have made of this process.
    said = [
        record.getMessage().rpartition("] ")[2]
        for record in caplog.records
        if record.name == weaver_process.__name__
    ]
    away, again = f"the weaver at 127.0.0.1:{port} does not answer", f"the weaver at 127.0.0.1:{port} answers again"
    assert [text.partition(" since")[0] for text in said] == [away, again, away, again]


async def until_away(weaver: RemoteWeaver) -> None:
    """Wait until the gateway has noticed."""
    for _ in range(3000):
        if weaver._since is not None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it was not noticed")


async def test_one_that_refuses_the_key_is_away_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(over_tcp=True) as running_weaver:
        weaver = RemoteWeaver(running_weaver.client.place, b"another secret")
        monkeypatch.setattr(weaver.client, "_patience", 0.1)
        weaver.start()
        await until_away(weaver)

        with pytest.raises(
            loom.WeaverUnavailable, match=r"does not answer since .*: the key is not of this weaver"
        ):
            await weaver.client.ask("policies", user=ADMIN)
        await weaver.close(end=False)


async def test_a_weaver_elsewhere_is_not_killed_from_here() -> None:
    class Admits:
        def require(self, *_: Any) -> None: ...

    components = Components(Admits(), RemoteWeaver("10.0.0.5:8471", b"secret"), injectable=True)  # type: ignore[arg-type]

    with pytest.raises(Denied, match=r"the weaver at 10\.0\.0\.5:8471 is no process of this gateway's"):
        await components.kill("dead_weaver", "", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weaver": "h:8471"}, "--weaver needs --weaver-secret, the file that `loom serve weaver` has, too"),
        ({"weaver_secret": Path("file")}, "--weaver-secret needs --weaver"),
        (
            {"weaver": "h", "weaver_secret": Path("file")},
            "'h' is not the address of a weaver for --weaver: write HOST:PORT",
        ),
        (
            {"weaver": "h:1", "weaver_secret": Path("file"), "weaver_listen": "h:2"},
            "give --listen to `loom serve weaver`",
        ),
        (
            {"weaver": "h:1", "weaver_secret": Path("file"), "alert_mail": "mail"},
            "give --alert-mail to `loom serve weaver`",
        ),
        ({"weaver": "h:1", "weaver_secret": Path("file")}, "cannot read the weaver's secret in file"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = GatewaySettings(worker=["tcp://127.0.0.1:1"], port=0, **options)

    with pytest.raises((loom.WrongArguments, loom.errors.InvalidAddress), match=re.escape(said)):
        serve(settings)
