"""Classes that Kubetorch's own pod server serves, called by Loom and, for comparison, by Kubetorch's client."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

import loom
from loom.process.listen import free_ports
from tests.support.ordinary_classes import AsyncShop, OutOfStock, power
from tests.support.pod_server import pod_server

kubetorch = pytest.importorskip("kubetorch")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A pod server with an `AsyncShop`."""
    with pod_server("AsyncShop", {"stock": 1000}) as served:
        yield served


@pytest.fixture(scope="module")
def shop(url: str) -> Any:
    return loom.cls(AsyncShop).at(url)


class Module:
    """Has what Loom uses of the object that `kubetorch.cls` gives after it has been deployed.

    The real one needs a controller; what it has under these names is compared in a test.
    """

    MODULE_TYPE = "cls"
    callable_name = "AsyncShop"
    serialization = "json"

    def __init__(self, url: str) -> None:
        self._url = url

    @property
    def base_endpoint(self) -> str:
        return self._url


def kubetorchs_call(url: str, path: str, serialization: str, *args: Any, **kwargs: Any) -> Any:
    """The same call with Kubetorch's own client."""
    from kubetorch.resources.callables.utils import build_call_body
    from kubetorch.serving.http_client import HTTPClient

    client = HTTPClient(base_url=url, compute=None, service_name="shop")
    return client.call_method(
        f"{url}/{path}",
        stream_logs=False,
        logging_config=None,
        stream_metrics=False,
        body=build_call_body(*args, **kwargs),
        serialization=serialization,
    )


def test_methods_are_called_like_local_ones(shop: Any) -> None:
    stock = shop.buy(0)

    assert shop.buy(5) == stock + 5
    assert shop.sell(2, price=3) == 6
    assert shop.order(amount=2) == stock + 5


@pytest.mark.parametrize("serialization", ["json", "pickle"])
@pytest.mark.parametrize("value", [None, [1, {"a": "ä"}], {"args": [1.5, True]}])
def test_an_answer_is_the_same_as_kubetorchs_client_gets(url: str, serialization: str, value: Any) -> None:
    shop = loom.cls(AsyncShop).at(url, serialization=serialization)

    assert shop.echo(value) == kubetorchs_call(url, "AsyncShop/echo", serialization, value) == value


def test_pickle_carries_what_json_does_not(url: str, shop: Any) -> None:
    with pytest.raises(loom.UnpicklableError, match="serialization='pickle'"):
        shop.echo({1, 2})

    assert loom.cls(AsyncShop).at(url, serialization="pickle").echo({1, 2}) == {1, 2}


async def test_async_gives_an_awaitable(shop: Any) -> None:
    stock = await shop.buy(0, async_=True)

    assert await shop.order(1, async_=True) == stock + 1


def test_an_exception_is_of_the_class_that_kubetorchs_client_gives_or_the_modules_own(url: str, shop: Any) -> None:
    with pytest.raises(ZeroDivisionError) as kubetorchs:
        kubetorchs_call(url, "AsyncShop/divide", "json", 0)
    with pytest.raises(ZeroDivisionError, match="division by zero") as ours:
        shop.divide(0)
    assert type(ours.value) in type(kubetorchs.value).__mro__
    assert "in divide" in str(ours.value.__cause__)

    with pytest.raises(OutOfStock, match="closed"):  # a module's own, which Kubetorch's client makes up
        shop.refuse()
    with pytest.raises(loom.RemoteException, match="OutOfStock: closed"):
        loom.cls("AsyncShop").at(url).refuse()


def test_what_kubetorch_deployed_is_taken_as_it_is(url: str) -> None:
    from kubetorch.resources.callables.cls.cls import Cls

    assert all(hasattr(Cls, name) for name in ("base_endpoint", "callable_name", "serialization"))
    assert Cls.MODULE_TYPE == Module.MODULE_TYPE

    assert loom.cls(Module(url)).double(4) == 8


def test_a_function_is_called_with_its_arguments() -> None:
    with pod_server("power") as served:
        assert loom.fn(power).at(served)(3, exponent=3) == 27 == kubetorchs_call(served, "power", "json", 3, 3)
        assert loom.fn("power").at(served)(3) == 9


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda url: loom.cls(AsyncShop).at(url).bye(), loom.NoSuchMethod, "did you mean 'buy'"),
        (lambda url: loom.cls("AsyncShop").at(url).bye(), loom.NoSuchMethod, "'bye' not found"),
        (lambda url: loom.cls("AsyncShop").at(url)._secret, loom.NoSuchMethod, "private"),
        (lambda url: loom.cls(AsyncShop).at(url).buy(), loom.WrongArguments, r"buy\(amount\)"),
        (lambda url: loom.cls("AsyncShop").at(url).buy(), TypeError, "missing 1 required"),
        (lambda url: loom.cls(AsyncShop).at(url).items(), loom.WrongArguments, "yields"),
        (lambda url: loom.cls(AsyncShop).at(url).block(timeout=0.2), loom.WaitTimeout, r"within 0\.2 s"),
        (lambda url: loom.cls("Bakery").at(url).bake(), loom.ServiceUnreachable, "does not serve Bakery"),
        (lambda url: loom.cls("Shop").at(url, serialization="xml"), loom.WrongArguments, "'xml'"),
        (lambda url: loom.cls("Shop").at("tcp://host:1"), loom.InvalidAddress, "tcp://host:1"),
    ],
)
def test_what_cannot_be_called_is_an_error(url: str, call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call(url)


class Loading(http.server.BaseHTTPRequestHandler):
    """In the place of a pod server that says it is ready before it has loaded its class, as Kubetorch's does."""

    answers: ClassVar[list[tuple[int, str]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *args: object) -> None:
        pass


def test_a_server_that_is_loading_is_asked_again() -> None:
    loading = (503, '{"detail": "Server is loading the callable. Please retry in a moment."}')
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Loading) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        shop = loom.cls("Shop").at(f"http://127.0.0.1:{server.server_port}")
        try:
            Loading.answers = [loading, loading, (200, "5")]
            assert shop.buy(5) == 5
            Loading.answers = [loading]
            with pytest.raises(loom.ServiceUnreachable, match=r"loading the callable.*503"):
                shop.buy(5, timeout=0.5)
        finally:
            server.shutdown()


def test_a_deployment_that_fails_again_is_told_and_the_pods_are_asked_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("loom_proxy.remote.kubetorch.LOADED_WITHIN", 0.3)
    loading = (503, '{"detail": "Server is loading the callable. Please retry in a moment."}')
    tried = []

    class Late(Module):
        """The same, of a cluster that is too slow for Kubetorch's minute after the first time."""

        def to(self, compute: Any, **options: Any) -> Late:
            tried.append(options)
            if len(tried) > 1:
                Loading.answers = [(200, "5")] if len(tried) == 3 else [loading]
                raise kubetorch.ServiceTimeoutError("Service shop not ready after 60s")
            return self

        def teardown(self) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Loading) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        late = Late(f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("kubetorch.cls", lambda target, name: late)
        compute = kubetorch.Compute(cpus=1, namespace="research")
        shop = loom.cls(AsyncShop, "shop").to(compute, connection_mode="http")
        try:
            Loading.answers = [loading]
            assert shop.buy(5) == 5
        finally:
            server.shutdown()
    told = [one.getMessage() for one in caplog.records if one.name == "loom_proxy.remote.kubetorch"]
    why = "Kubetorch has not deployed shop in namespace research: Service shop not ready after 60s"
    assert [line for line in told if "has not" in line] == [why] * 2


def test_nobody_there_is_an_error() -> None:
    (port,) = free_ports(1)

    with pytest.raises(loom.ServiceUnreachable, match="refused"):
        loom.cls("Shop").at(f"http://127.0.0.1:{port}").buy(1)


def test_something_else_there_is_an_error(cluster: Any) -> None:
    with pytest.raises(loom.ServiceUnreachable):
        loom.cls("Shop").at(cluster.url.replace("ws://", "http://")).buy(1)


class Moving(Module):
    """The same, whose port is forwarded by a kubectl that ends, and is started again."""

    def __init__(self, *urls: str) -> None:
        self._urls = list(urls)

    @property
    def base_endpoint(self) -> str:
        if not self._urls:
            raise RuntimeError("kubectl port-forward exited (rc=1): network is unreachable")
        return self._urls.pop(0)


def test_the_port_that_kubetorch_forwards_may_change(url: str) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    stock = loom.cls(AsyncShop).at(url).buy(3)
    shop = loom.cls(Moving(gone, gone, url))

    with pytest.raises(loom.ServiceUnreachable, match="refused"):
        shop.buy(0)
    assert shop.buy(1) == stock + 1
    with pytest.raises(loom.ServiceUnreachable, match="does not reach AsyncShop: kubectl port-forward exited"):
        shop.buy(0)
