"""Attempts to deliver alerts: real sockets and processes, hostile receivers, and kills of the weaver."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from loom.alerting import send
from loom.alerting.attempts import LOST, AttemptOutcome, attempt
from loom.process.child import python
from tests.support.webhooks import Hook, WebhookReceiver, receiving, status

HERE = ["127.0.0.0/8", "::1/128"]


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with receiving() as found:
        yield found


def job_of(url: str, networks: list[str] = HERE, **more: Any) -> dict[str, Any]:
    body = base64.b64encode(json.dumps({"message": "é"}).encode()).decode()
    return {"id": "a1b2", "url": url, "body": body, "networks": networks, "within": 1.0, **more}


def posted(url: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> int:
    """Post in this process; standard output stays what it is."""
    monkeypatch.setattr(send, "_write", lambda line: None)
    return send._post(job_of(url, **more))


def test_an_alert_is_posted_with_its_key_and_its_outcome_is_in_the_file(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    file = tmp_path / "alerts" / "a1b2-0-0"
    outcome = attempt(file, json.dumps(job_of(receiver.url("/T0/secret?x=1"))).encode())

    assert outcome == AttemptOutcome(204, None)
    (hook,) = receiver.hooks
    assert (hook.path, hook.body) == ("/T0/secret?x=1", {"message": "é"})
    assert hook.headers["Idempotency-Key"] == "a1b2"
    assert hook.headers["Content-Type"] == "application/json"
    assert attempt(file, b"nothing is read") == outcome  # a weaver that comes after takes it from there
    assert len(receiver.hooks) == 1
    assert file.stat().st_mode & 0o077 == 0


def test_a_weaver_that_is_killed_while_its_receiver_thinks_neither_loses_nor_repeats_the_alert(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    go_on = threading.Event()

    def slowly(hook: Hook, line: socket.socket) -> bytes:
        go_on.wait(20)
        return b"HTTP/1.1 200 OK\r\n\r\n"

    receiver.answer = slowly
    file, job = tmp_path / "one", json.dumps(job_of(receiver.url(), within=20.0))
    script = "from loom.alerting.attempts import *; attempt(Path(sys.argv[1]), sys.argv[2].encode())"
    weaver = subprocess.Popen([sys.executable, "-c", f"import sys; {script}", str(file), job])
    receiver.wait(1)
    weaver.kill()
    weaver.wait()

    def wait(seconds: float) -> None:
        go_on.set()
        time.sleep(seconds)

    outcome = attempt(file, job.encode(), wait)

    assert outcome == AttemptOutcome(200, None)
    assert len(receiver.hooks) == 1


def test_a_weaver_that_is_killed_before_it_has_said_everything_sends_nothing(
    receiver: WebhookReceiver, tmp_path: Path
) -> None:
    file = tmp_path / "one"
    half = json.dumps(job_of(receiver.url()))[:-9].encode()
    with open(file, "wb") as out:
        done = subprocess.run(python("loom.alerting.send"), input=half, stdout=out, check=False)
    assert (done.returncode, file.read_bytes(), receiver.hooks) == (1, b"", [])

    assert attempt(file, json.dumps(job_of(receiver.url())).encode()).delivered
    assert len(receiver.hooks) == 1


@pytest.mark.parametrize("left", [b"begun\n", b'begun\n{"status": 2'])
def test_an_attempt_whose_own_process_died_is_one_of_unknown_outcome(tmp_path: Path, left: bytes) -> None:
    file = tmp_path / "one"
    file.write_bytes(left)

    assert attempt(file, b"{}") == LOST


def test_a_process_that_says_nothing_or_is_killed_has_lost_the_attempt(tmp_path: Path) -> None:
    kill = [sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"]

    assert attempt(tmp_path / "one", b"{}", command=kill) == LOST


def test_the_process_has_no_variable_of_the_weavers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_TOKEN", "secret")
    tell = [
        sys.executable,
        "-c",
        "import os, json; print('begun'); print(json.dumps({'error': str(dict(os.environ))}))",
    ]

    assert "secret" not in str(attempt(tmp_path / "one", b"{}", command=tell))


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (status(500), "HTTP 500"),
        (status(302, "Location: http://169.254.169.254/"), "HTTP 302"),
        (status(307, "Location: /again"), "HTTP 307"),
        (lambda hook, line: b"", "no status"),
        (lambda hook, line: b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (lambda hook, line: b"x" * (send.MAX_HEAD + 5000), "no status"),
        (lambda hook, line: b"HTTP/1.1 100 Continue\r\n\r\n", "no status"),
    ],
)
def test_every_answer_but_2xx_is_a_failure_and_no_redirect_is_followed(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, answer: Any, why: str
) -> None:
    receiver.answer = answer
    with pytest.raises(send.Refused, match=why) as refused:
        posted(receiver.url(), monkeypatch)

    assert "secret" not in str(refused.value)
    assert len(receiver.hooks) == 1


def test_a_note_before_the_answer_is_passed_over(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.answer = lambda hook, line: b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n"

    assert posted(receiver.url(), monkeypatch) == 202


def test_an_answer_of_a_gigabyte_is_not_read(receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    def flood(hook: Hook, line: socket.socket) -> bytes:
        line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        return b"x" * 100_000_000

    receiver.answer = flood
    assert posted(receiver.url(), monkeypatch) == 200


@pytest.mark.parametrize("drip", [b"", b"H"])
def test_a_receiver_that_never_answers_or_drips_is_left_in_time(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    over = threading.Event()

    def slowly(hook: Hook, line: socket.socket) -> bytes:
        while not over.wait(0.05):
            line.sendall(drip)
        return b""

    receiver.answer = slowly
    with pytest.raises(send.Refused, match=r"did not answer within 0\.3 s"):
        posted(receiver.url(), monkeypatch, within=0.3)
    over.set()


def test_a_port_where_nobody_listens_and_a_name_without_an_address_are_failures(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver.close()
    with pytest.raises(send.Refused, match="refused"):
        posted(receiver.url(), monkeypatch)
    with pytest.raises(send.Refused, match="no address"):
        posted("http://no-such-host.invalid/secret", monkeypatch)


PRIVATE = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1", "169.254.169.254",
    "224.0.0.1", "255.255.255.255", "198.18.0.1", "::1", "::", "fe80::1%eth0", "fd00::1", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1",
]  # fmt: skip


@pytest.mark.guarantees(
    "strangers", "A webhook of an alert reaches no address that is not public, whatever its name leads to"
)
@pytest.mark.parametrize("address", PRIVATE)
def test_no_address_that_is_not_public_is_reached_unless_the_operator_allows_it(address: str) -> None:
    with pytest.raises(send.Refused, match="--alert-network"):
        send.check_address("hook", address, [], True)
    with pytest.raises(send.Refused):
        send.check_address("hook", address, ["203.0.113.0/24", "2001:db8::/32"], True)


@pytest.mark.parametrize(
    "host",
    ["127.1", "0x7f000001", "2130706433", "0177.0.0.1", "localhost", "localhost.", "[::1]", "[::ffff:7f00:1]", "0"],
)
def test_no_spelling_of_this_machine_is_reached(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for scheme in ("http", "https"):
        with pytest.raises(send.Refused, match=r"not public|no address"):
            posted(f"{scheme}://{host}:{receiver.port}/x", monkeypatch, networks=[])
    assert receiver.hooks == []


def test_the_operators_networks_and_public_addresses_over_tls_are_reached() -> None:
    send.check_address("hook", "10.1.2.3", ["10.0.0.0/8"], False)
    send.check_address("hook", "::ffff:10.1.2.3", ["10.0.0.0/8"], False)
    send.check_address("hook", "1.1.1.1", [], True)
    with pytest.raises(send.Refused, match="https"):
        send.check_address("hook", "1.1.1.1", [], False)


def test_an_address_of_this_host_is_not_public(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(socket.socket):
        def connect(self, place: Any) -> None: ...

        def getsockname(self) -> Any:
            return "1.1.1.1", 4

    monkeypatch.setattr(send.socket, "socket", Own)
    with pytest.raises(send.Refused, match="not public"):
        send.check_address("hook", "1.1.1.1", [], True)


@pytest.mark.guarantees(
    "strangers", "A webhook of an alert reaches no address that is not public, whatever its name leads to"
)
def test_a_name_that_leads_elsewhere_the_second_time_is_looked_up_once(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def rebinding(host: str, port: int, **more: Any) -> Any:
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(send.socket, "getaddrinfo", rebinding)
    assert posted(f"http://hook.example.com:{receiver.port}/x", monkeypatch) == 204
    assert asked == ["hook.example.com"]
    assert receiver.hooks[0].headers["Host"] == f"hook.example.com:{receiver.port}"
    with pytest.raises(send.Refused, match="169"):
        posted(f"http://hook.example.com:{receiver.port}/x", monkeypatch)


def test_one_bad_address_among_good_ones_refuses_the_name(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, receiver.port)) for one in ("127.0.0.1", "10.0.0.1")]
    monkeypatch.setattr(send.socket, "getaddrinfo", lambda *given, **more: both)

    with pytest.raises(send.Refused, match=r"10\.0\.0\.1"):
        posted("http://hook.example.com/x", monkeypatch)
    assert receiver.hooks == []


def test_the_certificate_has_to_be_that_of_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("hook.example.com").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line = context.wrap_socket(listener.accept()[0], server_side=True)
                line.recv(65536)
                line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                line.close()
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    port = listener.getsockname()[1]
    there = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
    monkeypatch.setattr(send.socket, "getaddrinfo", lambda *given, **more: there)
    with pytest.raises(send.Refused, match="CERTIFICATE_VERIFY_FAILED"):
        posted(f"https://hook.example.com:{port}/secret", monkeypatch)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert posted(f"https://hook.example.com:{port}/secret", monkeypatch) == 200
    with pytest.raises(send.Refused, match="CERTIFICATE_VERIFY_FAILED"):
        posted(f"https://other.example.com:{port}/secret", monkeypatch)
    listener.close()


def mail(command: list[str], tmp_path: Path, body: bytes = b"To: ann\r\n\r\nhello") -> AttemptOutcome:
    job = {"id": "a1b2", "command": command, "body": base64.b64encode(body).decode()}
    return attempt(tmp_path / f"mail-{len(os.listdir(tmp_path))}", json.dumps(job).encode())


def test_an_email_is_the_standard_input_of_the_operators_command_and_no_shell_runs_it(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    tee = [sys.executable, "-c", "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())", str(sent)]

    assert mail(tee, tmp_path) == AttemptOutcome(0, None)
    assert sent.read_bytes() == b"To: ann\r\n\r\nhello"
    failed = mail([sys.executable, "-c", "import sys; sys.exit('no such user')"], tmp_path)
    assert failed.error == "the e-mail command ended with 1: no such user"
    assert "cannot be started" in str(mail(["/no/such/command; touch x"], tmp_path).error)
