"""Every kind of bad input has its own exception, raised in a sentence that says what to do."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect as websocket_connect

import loom
from loom.wire.frames import decode_frame
from loom.wire.handshake import Hello, error_from_refusal
from loom.wire.messages import Kind, Message
from loom.wire.stream import unnumbered_frame
from loom_proxy.local import LocalCluster
from loom_proxy.session import open as opening
from loom_proxy.session import transport_and_handshake
from tests.support.actors import Broken, Counter, WithLock


@pytest.fixture(scope="module")
def counters(procs: loom.ProcMeshProxy) -> Any:
    return procs.spawn("counters", Counter, 10)


def sent(job: loom.Job) -> int:
    """How many frames the client has sent."""
    return job._connection._stream.sent


# -- reaching a gateway -------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["wrong", "", None], ids=["wrong", "empty", "missing"])
def test_wrong_or_missing_token(cluster: LocalCluster, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_TOKEN", raising=False)
    with pytest.raises(loom.AuthenticationError, match="token"):
        loom.connect(cluster.url, token)


def test_unreachable_gateway() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"ws://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(loom.GatewayUnreachable, match="loom serve gateway"):
        loom.connect(url, "token")


def test_unknown_host_name() -> None:
    with pytest.raises(loom.GatewayUnreachable, match=r"no-such-host\.invalid"):
        loom.connect("ws://no-such-host.invalid:8470", "token", insecure=True)


@pytest.mark.parametrize("url", ["", "8470", "ftp://host", "ws://", "ws://host:port", "ws://host:99999"])
def test_malformed_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_URL", raising=False)
    with pytest.raises(loom.InvalidAddress, match=r"LOOM_URL|ws://"):
        loom.connect(url, "token")


def test_url_of_an_ordinary_web_server() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        try:
            with pytest.raises(loom.NotAGateway, match="not a Loom gateway"):
                loom.connect(f"ws://127.0.0.1:{server.server_port}", "token")
        finally:
            server.shutdown()
            serving.join()


def test_url_of_something_that_is_no_web_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"220 mail.example ESMTP\r\n")
            connection.close()

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(loom.NotAGateway, match="not a Loom gateway"):
            loom.connect(f"ws://127.0.0.1:{server.getsockname()[1]}", "token")
        answering.join()


def test_url_of_something_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(loom.NotAGateway, match="did not answer"):
        loom.connect(f"ws://127.0.0.1:{server.getsockname()[1]}", "token", timeout=0.2)


def test_gateway_url_with_another_path(cluster: LocalCluster) -> None:
    with pytest.raises(loom.NotAGateway, match=r"HTTP 40[34]"):
        loom.connect(f"{cluster.url}/elsewhere", cluster.token)


def test_unknown_session(cluster: LocalCluster) -> None:
    with pytest.raises(loom.UnknownSession, match="'nobody'"):
        loom.connect(cluster.url, cluster.token, session="nobody")


def test_session_that_has_a_client(cluster: LocalCluster, shared: loom.Job) -> None:
    with pytest.raises(loom.SessionInUse, match=shared.session):
        loom.connect(cluster.url, cluster.token, session=shared.session)
    assert not shared.closed


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://127.0.0.1:9"])
def test_worker_that_nobody_answers_for(address: str) -> None:
    command = [sys.executable, "-m", "loom_gateway", "--port", "0", "--worker", address, "--exit-with-parent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        import json

        ready = json.loads(gateway.stdout.readline())
        with pytest.raises(loom.WorkerUnreachable, match=address):
            loom.connect(ready["url"], ready["token"])
        assert gateway.stdin is not None
        gateway.stdin.close()
        gateway.wait(30)


# -- protocol -----------------------------------------------------------------------------------------------


def refused(cluster: LocalCluster, first: bytes | str) -> loom.LoomError:
    """What the gateway says to a client that begins with this message."""
    headers = {"Authorization": f"Bearer {cluster.token}"}
    with websocket_connect(f"{cluster.url}/ws/v1", additional_headers=headers) as websocket:
        websocket.send(first)
        answer = websocket.recv(timeout=30)
        assert isinstance(answer, bytes)
        (message,) = decode_frame(answer).messages
        assert message.kind == Kind.REFUSE
        return error_from_refusal(message)


def test_peer_of_another_major_version_is_refused(cluster: LocalCluster) -> None:
    hello = b"".join(unnumbered_frame(Hello(protocol=(2, 0)).message()))
    error = refused(cluster, hello)
    assert isinstance(error, loom.ProtocolMismatch)
    assert "2.0" in str(error)
    assert "1.0" in str(error)


@pytest.mark.parametrize(
    "first",
    [b"", b"nonsense", b"\xff" * 1000, "text", b"".join(unnumbered_frame(Message(Kind.CALL, 1, (1, "add"))))],
    ids=["empty", "nonsense", "bytes", "text", "no hello"],
)
def test_client_that_does_not_speak_the_protocol_is_refused(cluster: LocalCluster, first: bytes | str) -> None:
    assert isinstance(refused(cluster, first), loom.ProtocolMismatch)


def test_gateway_of_another_major_version_is_refused(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "Hello", lambda **values: Hello(**{**values, "protocol": (9, 1)}), raising=True)
    with pytest.raises(loom.ProtocolMismatch, match=r"9\.1"):
        loom.connect(cluster.url, cluster.token)


# -- programs -----------------------------------------------------------------------------------------------


def test_endpoint_that_does_not_exist(shared: loom.Job, counters: Any) -> None:
    before = sent(shared)
    with pytest.raises(loom.EndpointNotFound, match=r"no endpoint 'ad'; did you mean 'add'\?"):
        counters.ad.call(1)
    with pytest.raises(AttributeError, match="Its endpoints: add"):
        counters.completely_different.call(1)
    with pytest.raises(loom.EndpointNotFound, match="add a @endpoint decorator"):
        counters.not_an_endpoint.call(1)
    with pytest.raises(loom.WrongArguments, match=r"\.call_one"):
        counters.add(1)
    assert sent(shared) == before


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((), {"wrong": 1}), ((1,), {"k": 2})])
def test_wrong_arguments(shared: loom.Job, counters: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    before = sent(shared)
    with pytest.raises(loom.WrongArguments, match=r"Counter\.add\(k\)"):
        counters.add.call(*args, **kwargs)
    assert sent(shared) == before


def test_wrong_constructor_arguments(procs: loom.ProcMeshProxy) -> None:
    with pytest.raises(TypeError, match=r"Counter\(start=\.\.\.\)"):
        procs.spawn("counter", Counter, 1, 2)
    with pytest.raises(loom.WrongArguments, match="takes an actor class"):
        procs.spawn("counter", Counter())  # type: ignore[arg-type]


def test_call_one_on_several_actors(counters: Any) -> None:
    with pytest.raises(loom.NotOneActor, match="4"):
        counters.add.call_one(1)


def test_class_that_cannot_be_pickled(procs: loom.ProcMeshProxy) -> None:
    with pytest.raises(loom.UnpicklableError, match=r"WithLock.*\.guard cannot be pickled: it is a _thread\.lock"):
        procs.spawn("locked", WithLock)


def test_argument_that_cannot_be_pickled(counters: Any) -> None:
    with pytest.raises(loom.UnpicklableError, match=r"\['lock'\] cannot be pickled"):
        counters.echo.call({"fine": 1, "lock": threading.Lock()})


def test_result_that_cannot_be_pickled(counters: Any) -> None:
    with pytest.raises(loom.LoomError, match="pickle"):
        counters.unpicklable.call().get(timeout=30)
    assert list(counters.echo.call(1).get().values()) == [1] * 4


def test_endpoint_with_the_name_of_a_mesh_attribute(procs: loom.ProcMeshProxy) -> None:
    class Sized(loom.Actor):
        @loom.endpoint
        def sizes(self) -> None: ...

    with pytest.raises(loom.EndpointNameTaken, match=r"Sized\.sizes"):
        procs.spawn("sized", Sized)


class OnlyOnTheLaptop:
    """Can be pickled, and unpickled in no other process."""

    def __reduce__(self) -> Any:
        return _only_in, (os.getpid(),)


def _only_in(pid: int) -> OnlyOnTheLaptop:
    if os.getpid() != pid:
        raise RuntimeError("not on this machine")
    return OnlyOnTheLaptop()


def test_what_depends_on_a_failed_operation_fails_with_the_same_cause(tidied: loom.Job) -> None:
    counters = tidied.hosts.spawn_procs().spawn("counters", Counter, OnlyOnTheLaptop())
    with pytest.raises(loom.UnpicklableError, match="not on this machine"):
        counters.value.call().get(timeout=30)
    with pytest.raises(loom.UnpicklableError, match="not on this machine"):
        counters.slice(hosts=0).value.call_one().get(timeout=30)
    assert any(event.name == "operation_failed" for event in tidied.events(timeout=0))


def test_a_class_that_mixes_def_and_async_def(procs: loom.ProcMeshProxy) -> None:
    class Mixed(loom.Actor):
        @loom.endpoint
        def one(self) -> None: ...

        @loom.endpoint
        async def other(self) -> None: ...

    with pytest.raises(loom.NotAnActor, match=r"Mixed'> mixes both .*one.*other"):
        procs.spawn("mixed", Mixed)


def test_constructor_that_raises(tidied: loom.Job) -> None:
    broken = tidied.hosts.spawn_procs().spawn("broken", Broken)
    with pytest.raises(loom.LoomError, match="cannot be made"):
        broken.anything.call().get(timeout=30)
    assert list(tidied.hosts.spawn_procs().spawn("fine", Counter).add.call(1).get().values()) == [1, 1]


@pytest.mark.parametrize("selection", [{"hosts": 2}, {"hosts": -1}, {"gpus": slice(2, 2)}, {"gpus": slice(7, 9)}])
def test_slice_out_of_range(counters: Any, selection: dict[str, Any]) -> None:
    with pytest.raises(loom.SliceOutOfRange, match="has 2"):
        counters.slice(**selection)


def test_dimension_that_does_not_exist(shared: loom.Job, counters: Any) -> None:
    for mesh in (shared.hosts, counters, counters.value.call().get()):
        with pytest.raises(loom.NoSuchDimension, match=r"'racks'.*hosts"):
            mesh.slice(racks=0)
        with pytest.raises(KeyError):
            mesh.size("racks")


def test_per_host_that_makes_no_sense(shared: loom.Job) -> None:
    for per_host in ({"hosts": 2}, {"gpus": 0}, {"gpus": "2"}):
        with pytest.raises(ValueError, match=r"hosts|gpus"):
            shared.hosts.spawn_procs(per_host=per_host)  # type: ignore[arg-type]


def test_mesh_of_a_closed_session(cluster: LocalCluster) -> None:
    with loom.connect(cluster.url, cluster.token) as job:
        counters = job.hosts.spawn_procs().spawn("counters", Counter)
        counters.add.call(1).get()
    for use in (
        lambda: counters.add.call(1),
        lambda: job.hosts.spawn_procs(),
        lambda: counters.stop(),
        lambda: job.run(print),
    ):
        with pytest.raises(loom.SessionClosed, match=job.session):
            use()
    job.close()  # again is harmless


def test_mesh_of_another_session(cluster: LocalCluster, counters: Any) -> None:
    with loom.connect(cluster.url, cluster.token) as other:
        mine = other.hosts.spawn_procs().spawn("mine", Counter)
        with pytest.raises(loom.NoSuchMesh, match="belongs to session"):
            mine.echo.call(counters)


def test_mesh_pickled_outside_a_call(counters: Any) -> None:
    import pickle

    with pytest.raises(loom.UnpicklableError, match="own session"):
        pickle.dumps(counters)


# -- another version of Python ------------------------------------------------------------------------------


@pytest.fixture
def other_python(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[loom.Job]:
    """A session whose cluster says that it runs Python 3.99; two real versions need two interpreters."""
    from_body = transport_and_handshake.Welcome.from_body
    monkeypatch.setattr(
        transport_and_handshake.Welcome, "from_body", lambda body: from_body([{**body[0], "python": (3, 99)}])
    )
    with loom.connect(cluster.url, cluster.token) as job:
        yield job


def test_code_by_value_cannot_travel_to_another_python(other_python: loom.Job) -> None:
    procs = other_python.hosts.spawn_procs()
    with pytest.raises(loom.PythonVersionMismatch, match=r"Counter.*3\.99.*What still works"):
        procs.spawn("counters", Counter)
    with pytest.raises(loom.PythonVersionMismatch):
        other_python.run(lambda: 1)


def test_installed_code_and_plain_data_travel_to_another_python(other_python: loom.Job) -> None:
    import math

    assert other_python.run(math.sqrt, 4.0) == 2.0
