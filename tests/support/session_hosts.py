"""Several gateways and session hosts on this machine, behind one address as a Service gives it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

import loom
from tests.support.gateways import BOUND, TOKEN, await_true
from tests.support.network.namespaces import WORKER_PORT, Hosts
from tests.support.processes import read_json, start

OTHERS = ("service", "weaver", "host0", "host1", "gateway0", "gateway1")
"""The hosts of a network that `HostedCluster` needs beside its workers."""

CONNECT_TIMEOUT = 1.0
"""Seconds after which the service tries another gateway."""


class Service:
    """Passes each connection on to one of several gateways, in turn, that takes it.

    A stand-in for a Service of Kubernetes, or a load balancer without sessions.

    Args:
        address: where it listens, on any port.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.addresses: Sequence[str] = ()
        self._turn = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="service")
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._pass_on, address, 0), self._loop)
        self._server = listening.result(BOUND)
        self.url = f"ws://{address}:{self._server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        addresses = list(self.addresses)
        self._turn += 1
        for number in range(len(addresses)):
            host, _, port = addresses[(self._turn + number) % len(addresses)].rpartition(":")
            try:
                there = await asyncio.wait_for(asyncio.open_connection(host, int(port)), CONNECT_TIMEOUT)
            except (OSError, asyncio.TimeoutError):
                continue
            await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))
            return
        writer.transport.abort()

    def close(self) -> None:
        def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.call_later(0.1, self._loop.stop)

        self._loop.call_soon_threadsafe(end)
        self._thread.join(BOUND)
        self._loop.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(256 << 10):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class Member:
    """A process of a cluster, which can be killed and started again in the same place."""

    def __init__(
        self, folder: Path, name: str, *command: str, before: Sequence[str] = (), **variables: str
    ) -> None:
        self.name = name
        self._before = before
        self.variables = variables
        self._command = command
        self._output = folder / f"{name}.log"
        self.process: subprocess.Popen[str]
        self.address = ""

    def start(self) -> Member:
        command = [self.address.rpartition(":")[2] or "0" if part == "PORT" else part for part in self._command]
        command = [part.replace(":PORT", f":{self.address.rpartition(':')[2] or 0}") for part in command]
        with self._output.open("a") as output:
            self.process = start(*command, before=self._before, stderr=output, env={**os.environ, **self.variables})
        try:
            told = read_json(self.process)
        except AssertionError as error:
            raise AssertionError(f"{self.name}: {error}; its output:\n{self._output.read_text()}") from None
        self.address = str(told.get("url") or told["address"]).rpartition("/")[2]
        return self

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=BOUND)

    def upgrade(self, variables: Mapping[str, str]) -> None:
        """Tell it to stop, and start another version in its place."""
        self.end(signal.SIGTERM)
        self.variables.update(variables)
        self.start()

    def drivers(self) -> list[psutil.Process]:
        """The drivers that it has started, and that live; none if it does not."""
        if self.process.poll() is not None:
            return []
        return [
            one for one in psutil.Process(self.process.pid).children() if "loom_gateway.driver" in one.cmdline()
        ]


class HostedCluster:
    """A weaver, session hosts and gateways, for the workers of a cluster. ``url`` leads to any of the gateways.

    Args:
        network: gives each process a host of its own by its name, of those in `OTHERS`; and with it the workers.
        before_hosts: begins the commands of session hosts.
    """

    def __init__(
        self,
        workers: Sequence[str],
        hosts: int = 2,
        gateways: int = 2,
        host_options: Sequence[str] = (),
        gateway_options: Sequence[str] = (),
        peers: bool = False,
        variables: Mapping[str, str] | None = None,
        network: Hosts | None = None,
        before_hosts: Sequence[str] = (),
    ) -> None:
        self._before_hosts = before_hosts
        self.variables = dict(variables or {})
        """In the environment of the processes that are made from now on."""
        self.folder = Path(tempfile.mkdtemp(prefix="loom-test-"))
        self.folder.chmod(0o711)  # for drivers with user ids of their own
        self.key = self.secret("key")
        self.network = network
        self._workers: list[Member] = []
        for name in network.workers if network is not None else ():
            at = f"tcp://{self.address(name)}:{WORKER_PORT}"
            one = self._member(name, "-m", "loom_gateway.workers.host", "--address", at, "--exit-with-parent")
            self._workers.append(one.start())
            workers = [*workers, at]
        weaver_secret = self.secret("weaver-secret")
        given = [part for worker in workers for part in ("--worker", worker)]
        self.weaver = self._member(
            "weaver", "-m", "loom.weaver", "--state", str(self.folder / "weaver"),
            "--listen", f"{self.address('weaver')}:PORT", "--secret-file", weaver_secret,
        ).start()  # fmt: skip
        shared = ["--weaver", self.weaver.address, "--weaver-secret", weaver_secret, "--host-key", self.key]
        addresses = self.folder / "hosts"
        addresses.touch()
        if peers:
            host_options = [*host_options, "--peer", f"file:{addresses}"]
        self._of_hosts = [*shared, *given, *host_options]
        self.hosts = [self.host(f"host{number}").start() for number in range(hosts)]
        addresses.write_text("".join(f"tcp://{host.address}\n" for host in self.hosts))
        of_hosts = [part for host in self.hosts for part in ("--session-host", f"tcp://{host.address}")]
        self._of_gateways = [*shared, *of_hosts, *gateway_options]
        self.gateways = [self.gateway(f"gateway{number}").start() for number in range(gateways)]
        with self.on("service"):
            self.service = Service(self.address("service"))
        self.service.addresses = [gateway.address for gateway in self.gateways]
        self.url = self.service.url

    def host(self, name: str) -> Member:
        """One more session host, of which the gateways have to be told."""
        return self._member(
            name, "-m", "loom_gateway.session_hosts", "--listen", f"{self.address(name)}:PORT",
            "--state-dir", str(self.folder / name), *self._of_hosts, before=self._before_hosts,
            LOOM_CACHE=str(self.folder / f"cache-{name}"),
        )  # fmt: skip

    def gateway(self, name: str, key: str | None = None) -> Member:
        """One more gateway, perhaps with another key."""
        return self._member(
            name, "-m", "loom_gateway", "--host", self.address(name), "--port", "PORT", "--token", TOKEN,
            "--gateways-listen", f"{self.address(name)}:0",
            "--state-dir", str(self.folder / name), *self._of_gateways, "--host-key", key or self.key,
        )  # fmt: skip

    def secret(self, name: str) -> str:
        """The path of a file with a new secret."""
        path = self.folder / name
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
        return str(path)

    def _member(self, name: str, *command: str, before: Sequence[str] = (), **variables: str) -> Member:
        if self.network is not None:
            before = ("ip", "netns", "exec", self.network.name(name), *before)
        return Member(self.folder, name, *command, before=before, **self.variables, **variables)

    def address(self, name: str) -> str:
        """The IP address of the host of a process."""
        return "127.0.0.1" if self.network is None else Hosts.address(name)

    def on(self, name: str) -> AbstractContextManager[None]:
        """Run this thread, and the threads that it starts meanwhile, on a host of the network, if there is one."""
        return nullcontext() if self.network is None else self.network.on(name)

    @property
    def members(self) -> list[Member]:
        return [*self.gateways, *self.hosts, self.weaver, *self._workers]

    def connect(self, session: str | None = None, gateway: Member | None = None, **options: Any) -> loom.Job:
        url = self.url if gateway is None else f"ws://{gateway.address}"
        # Nobody else is on a network of namespaces.
        return loom.connect(url, TOKEN, session, insecure=self.network is not None, **options)

    def rest(self, path: str, gateway: Member | None = None, method: str = "GET", body: Any = None) -> Any:
        url = self.url.replace("ws://", "http://") if gateway is None else f"http://{gateway.address}"
        request = urllib.request.Request(url + path, method=method)
        request.add_header("Authorization", f"Bearer {TOKEN}")
        data = None
        if body is not None:
            request.add_header("Content-Type", "application/json")
            data = json.dumps(body).encode()
        with self.on("service"), urllib.request.urlopen(request, data, timeout=BOUND) as response:
            return json.load(response)

    def member_of(self, session: str) -> Member | None:
        """The session host that has a session's driver; None while none has."""
        pids = [one["pid"] for one in self.rest("/api/v1/sessions")["sessions"] if one["name"] == session]
        found = [host for host in self.hosts if {driver.pid for driver in host.drivers()}.intersection(pids)]
        return found[0] if found else None

    def host_of(self, session: str) -> Member:
        """The session host that has a session, once the gateway that the service chooses knows it."""
        await_true(lambda: self.member_of(session) is not None)
        found = self.member_of(session)
        assert found is not None
        return found

    def close(self) -> None:
        self.service.close()
        for member in self.members:
            if member.process.poll() is None:
                member.end(signal.SIGINT if member in self.hosts else signal.SIGTERM)
        for process in psutil.process_iter(["cmdline"]):
            if any(part.startswith(str(self.folder)) for part in process.info["cmdline"] or []):
                os.kill(process.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> HostedCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        self.close()
