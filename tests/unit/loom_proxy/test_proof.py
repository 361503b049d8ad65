"""A gateway behind a forwarded port proves that it knows a token before the token is shown to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

import loom
from loom.errors import AuthenticationError, NotAGateway
from loom.mutual_auth import Exchange, Purpose, Side, new_nonce, over_http
from loom.mutual_auth.over_http import gateway_proof, key_id, listener_of, note_forwarded
from loom.rest_client import Gateway
from loom.token_file import digest
from loom_proxy.weaver.watch import WeaverWatch

TOKEN = "a secret of the tests"
BOUND = 10.0


class Squatter:
    """Whoever has taken the port: it answers each request for a proof, and keeps all that it is sent."""

    def __init__(self, answer: Callable[[dict[str, str]], dict[str, Any] | None]) -> None:
        self.received = b""
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=[sock], daemon=True).start()

    def _talk(self, sock: socket.socket) -> None:
        request = b""
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                self.received += data
                request += data
                if b"\r\n\r\n" in request:
                    query = parse_qs(urlsplit(request.split(b" ")[1].decode()).query)
                    answer = self._answer({name: values[0] for name, values in query.items()})
                    body = b"{}" if answer is None else json.dumps(answer).encode()
                    sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    request = b""

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(BOUND)


@pytest.fixture
def squat() -> Iterator[Callable[..., Squatter]]:
    all_of_them: list[Squatter] = []

    def start(answer: Callable[[dict[str, str]], dict[str, Any] | None]) -> Squatter:
        squatter = Squatter(answer)
        all_of_them.append(squatter)
        note_forwarded(squatter.port)
        return squatter

    yield start
    for squatter in all_of_them:
        over_http._forwarded.discard(("127.0.0.1", squatter.port))
        squatter.close()


def ways(url: str, token: str = TOKEN) -> list[Callable[[], object]]:
    """Every way to show a token to a gateway."""

    async def watch() -> object:
        return await anext(WeaverWatch(url, token).updates_async(BOUND))

    return [
        lambda: loom.connect(url, token),
        lambda: loom.connect(url, token, transport="http"),
        lambda: Gateway(url, token).status(),
        lambda: next(WeaverWatch(url, token).updates(BOUND)),
        lambda: asyncio.run(watch()),
    ]


def reflected(challenge: str) -> dict[str, Any]:
    """The proof of who asks in place of that of who answers."""
    exchange = Exchange(Purpose.GATEWAY, digest(TOKEN), challenge, new_nonce())
    return {"nonce": exchange.answering, "proof": exchange.proof(Side.ASKS)}


@pytest.mark.guarantees(
    "strangers",
    "Whoever has taken the port of a `kubectl port-forward` gets no token; that of a context goes to its "
    "address only",
)
@pytest.mark.parametrize("way", range(5))
@pytest.mark.parametrize(
    "answer",
    [
        lambda asked: None,
        lambda asked: {"proof": "0" * 64},
        lambda asked: {"nonce": new_nonce(), "proof": "0" * 64},
        lambda asked: {"nonce": asked["challenge"], "proof": asked["challenge"]},
        lambda asked: gateway_proof(digest("another token"), asked["challenge"]),
        lambda asked: gateway_proof(digest(TOKEN), new_nonce()),  # an earlier one
        lambda asked: {**gateway_proof(digest(TOKEN), asked["challenge"]), "nonce": new_nonce()},
        lambda asked: {name: said + "0" for name, said in gateway_proof(digest(TOKEN), asked["challenge"]).items()},
        lambda asked: {name: said[:-1] for name, said in gateway_proof(digest(TOKEN), asked["challenge"]).items()},
        lambda asked: reflected(asked["challenge"]),
    ],
)
def test_who_cannot_prove_it_gets_no_token(
    squat: Callable[..., Squatter], way: int, answer: Callable[[dict[str, str]], dict[str, Any] | None]
) -> None:
    squatter = squat(answer)

    with pytest.raises(NotAGateway, match="the token was not sent"):
        ways(f"ws://127.0.0.1:{squatter.port}")[way]()

    assert b"/api/v1/proof?key=" in squatter.received
    for secret in (TOKEN, digest(TOKEN), "authorization"):
        assert secret.lower().encode() not in squatter.received.lower()


@pytest.mark.parametrize("way", range(5))
def test_who_proves_it_gets_the_token(squat: Callable[..., Squatter], way: int) -> None:
    def answer(asked: dict[str, str]) -> dict[str, Any] | None:
        if asked.get("key") == key_id(digest(TOKEN)):
            return gateway_proof(digest(TOKEN), asked["challenge"])
        return None

    squatter = squat(answer)
    with pytest.raises(NotAGateway):  # for it knows nothing else
        ways(f"ws://127.0.0.1:{squatter.port}")[way]()
    assert f"Bearer {TOKEN}".encode() in squatter.received


def test_the_gateways_refusal_is_told(squat: Callable[..., Squatter]) -> None:
    squatter = squat(lambda asked: {"error": {"code": "authentication", "message": "not accepted"}})
    with pytest.raises(AuthenticationError, match="not accepted"):
        loom.connect(f"ws://127.0.0.1:{squatter.port}", TOKEN)


def test_a_gateway_of_another_version_of_the_proof_is_named(squat: Callable[..., Squatter]) -> None:
    squatter = squat(lambda asked: {**gateway_proof(digest(TOKEN), asked["challenge"]), "nonce": f"2-{'0' * 64}"})
    with pytest.raises(NotAGateway, match="by version 2 of the proof, and this one by version 1"):
        loom.connect(f"ws://127.0.0.1:{squatter.port}", TOKEN)


def test_a_port_of_another_user_gets_nothing_at_all(
    squat: Callable[..., Squatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which could pass the challenge on to the gateway."""
    squatter = squat(lambda asked: gateway_proof(digest(TOKEN), asked["challenge"]))
    monkeypatch.setattr(over_http, "listener_of", lambda port: os.getuid() + 1)

    for token in (TOKEN, "an.openid.token"):
        with pytest.raises(NotAGateway, match="in place of kubectl"):
            Gateway(f"ws://127.0.0.1:{squatter.port}", token).status()
    assert squatter.received == b""


def test_an_openid_token_is_shown_only_where_the_listener_is_known(
    squat: Callable[..., Squatter], monkeypatch: pytest.MonkeyPatch
) -> None:
    squatter = squat(lambda asked: None)
    monkeypatch.setattr(over_http, "listener_of", lambda port: None)
    with pytest.raises(NotAGateway, match="before it sees it"):
        Gateway(f"ws://127.0.0.1:{squatter.port}", "an.openid.token").status()
    assert squatter.received == b""


def test_the_listener_of_a_port_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listener_of(listener.getsockname()[1]) == os.getuid()
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1234        0 99 1\n"
        "   1: 0100007F:1F91 00000000:0000 01 00000000:00000000 00:00000000 00000000  1234        0 99 1\n"
    )
    assert listener_of(8080, tmp_path / "tcp") == 1234
    assert listener_of(8081, tmp_path / "tcp") is None
    assert listener_of(8080, tmp_path / "nothing") is None
