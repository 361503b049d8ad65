"""`OneMachineCluster`: starts and ends a cluster on this machine."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.support.cluster.kubelet.image import Image
from tests.support.cluster.kubelet.memory import groups, remove_group
from tests.support.cluster.kubelet.sandbox import write_image
from tests.support.cluster.laptop import Laptop
from tests.support.cluster.network import (
    CONTROL,
    INGRESS_PORT,
    LAPTOP_SIDE,
    NGINX_PORT,
    Network,
    owner_prefix,
    remove_stale,
)
from tests.support.cluster.nginx import configuration
from tests.support.cluster.service_accounts import make_certificates
from tests.support.paths import ROOT

__all__ = ["OneMachineCluster", "PodInfo"]

STARTED_IN_TIME = 30.0
GRACE = 10.0
"""Seconds that the parts of the cluster may take to start, and to end."""

POLL = 0.05

_numbers = itertools.count()


@dataclass(frozen=True)
class PodInfo:
    """A pod as it was when asked about.

    Args:
        pid: on this machine, of its first process; None if it does not run.
        state: ``Running``, or why it does not.
        host: its network namespace is the cluster's prefix and this.
    """

    name: str
    namespace: str
    address: str
    pid: int | None
    ready: bool
    owner: str
    labels: dict[str, str]
    host: str
    state: str


class OneMachineCluster:
    """A cluster on this machine, with a laptop outside it. A context manager.

    Start it in a thread that lives as long as it: its processes die with the thread. With KEEP_CLUSTER_FILES in the
    environment its files and logs are kept.

    Args:
        namespaces: of Kubernetes, that exist besides ``kubetorch``.
        missing_images: images that cannot be pulled. All others are this machine's file system.
        images: what those say that are known. Containers of others have a home of their own.
        kubectl: that the laptop has, such as ``/usr/bin/kubectl``; without, it has a stand-in.
    """

    def __init__(
        self,
        namespaces: Sequence[str] = ("default",),
        missing_images: Sequence[str] = (),
        images: Mapping[str, Image] | None = None,
        kubectl: str | None = None,
    ) -> None:
        self._network = Network(owner_prefix(next(_numbers)))
        self._namespaces = list(namespaces)
        self._missing_images = list(missing_images)
        self._images = {name: asdict(image) for name, image in (images or {}).items()}
        self._kubectl = kubectl
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.kt_api_url = f"http://{LAPTOP_SIDE}:{NGINX_PORT}"
        """Where the laptop reaches nginx."""
        self.ingress_url = f"http://{LAPTOP_SIDE}:{INGRESS_PORT}"
        """Where the laptop reaches an ingress, in the namespace ``ingress-nginx``, with nginx's routes."""

    def _start(self) -> None:
        remove_stale()
        self.folder = Path(tempfile.mkdtemp(prefix=self._network.prefix))
        self._network.make()
        for name in ("logs", "pods", "nginx"):
            (self.folder / name).mkdir()
        write_image(self.folder)
        make_certificates(self.folder)
        self.laptop = Laptop(self._network, self.folder, self._kubectl)
        try:
            kubetorch = version("kubetorch")
        except PackageNotFoundError:
            kubetorch = "none"
        (self.folder / "names").write_text("")
        (self.folder / "resolv.conf").write_text(f"nameserver {CONTROL}\noptions timeout:1 attempts:1\n")
        (self.folder / "nginx.conf").write_text(configuration(self.folder, kubetorch))
        self._run("control", "dnsmasq", [
            "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", f"--pid-file={self.folder}/dnsmasq.pid",
            "--user=root", "--group=root", "--no-resolv", "--no-hosts", f"--addn-hosts={self.folder}/names",
            "--local=/cluster.local/", "--bind-interfaces", f"--listen-address={CONTROL}", "--no-negcache",
            f"--log-facility={self.folder}/logs/dnsmasq.log",
        ])  # fmt: skip
        written = self.folder / "dnsmasq.pid"
        self._wait_for("dnsmasq", lambda: written.exists() and written.read_text() != "")
        self._run(
            "data-store", "data_store", [sys.executable, "-m", "tests.support.cluster.data_store", str(self.folder)]
        )
        self._run("control", "nginx", ["nginx", "-p", str(self.folder), "-c", str(self.folder / "nginx.conf")])
        self._run("control", "controller", [
            sys.executable, "-m", "tests.support.cluster.controller",
            "--prefix", self._network.prefix, "--folder", str(self.folder),
            "--namespaces", json.dumps(self._namespaces), "--missing-images", json.dumps(self._missing_images),
            "--images", json.dumps(self._images),
        ])  # fmt: skip
        self._tool = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.folder / "controller.sock")),
            base_url="http://controller",
            timeout=60.0,
        )
        self._wait_for("controller", self._controller_answers)
        self._wait_for("data_store", (self.folder / "rsyncd.conf").exists)
        self._wait_for("nginx", (self.folder / "nginx.pid").exists)

    def _run(self, host: str, name: str, command: list[str]) -> None:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._network.inside(host), *command],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _controller_answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._tool.get("/cluster/pods").is_success
        return False

    def _wait_for(self, name: str, ready: Callable[[], bool]) -> None:
        def ended_or_ready() -> bool:
            if self._processes[name].poll() is not None:
                text = (self.folder / "logs" / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(
                    f"{name} ended with exit code {self._processes[name].returncode}:\n{text[-3000:]}"
                )
            return ready()

        self.wait_until(ended_or_ready, STARTED_IN_TIME, f"{name} to start")

    @staticmethod
    def wait_until(true: Callable[[], bool], timeout: float, what: str) -> None:
        """Wait until something is true; TimeoutError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s for {what}")
            time.sleep(POLL)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._tool.request(method, path, **options)
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            log = self.folder / "logs" / "controller.log"
            raise RuntimeError(f"the controller has ended:\n{log.read_text(errors='replace')[-3000:]}") from error
        if answer.is_error:
            raise LookupError(answer.json()["detail"] if answer.status_code == 404 else answer.text)
        return answer.json()

    @property
    def prefix(self) -> str:
        """What the names of its network namespaces start with."""
        return self._network.prefix

    def pods(self, owner: str | None = None, namespace: str = "default") -> list[PodInfo]:
        """The pods of a workload, or all of the namespace."""
        found = [PodInfo(**item) for item in self._ask("GET", "/cluster/pods")]
        return [pod for pod in found if pod.namespace == namespace and owner in (None, pod.owner)]

    def pod(self, name: str, namespace: str = "default") -> PodInfo:
        """One pod. Raises LookupError."""
        for pod in self.pods(namespace=namespace):
            if pod.name == name:
                return pod
        raise LookupError(f"no pod named {name}; there are: {', '.join(p.name for p in self.pods()) or 'none'}")

    def wait_ready(
        self, owner: str, count: int, timeout: float = 60.0, namespace: str = "default"
    ) -> list[PodInfo]:
        """Wait until a workload has exactly so many pods, all ready; the pods."""

        def ready() -> bool:
            found = self.pods(owner, namespace)
            return len(found) == count and all(pod.ready for pod in found)

        try:
            self.wait_until(ready, timeout, f"{count} ready pods of {owner}")
        except TimeoutError as error:
            states = "\n".join(
                f"{pod.name}: {pod.state}, ready: {pod.ready}\n{self.logs(pod.name, namespace)[-2000:]}"
                for pod in self.pods(owner, namespace)
            )
            raise TimeoutError(f"{error}; there are:\n{states or 'none'}") from None
        return self.pods(owner, namespace)

    def apply(self, *manifests: Mapping[str, Any]) -> None:
        """Create or replace objects, as ``kubectl apply`` does."""
        self._ask("POST", "/cluster/apply", json=list(manifests))

    def remove(self, name: str, namespace: str = "default") -> None:
        """Remove a workload, its pods, its Service and its headless Service, and what Kubetorch knows of it."""
        self._ask("POST", f"/cluster/remove/{namespace}/{name}")

    def run_container(
        self,
        name: str,
        command: Sequence[str],
        *,
        replicas: int = 1,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        stateful: bool = False,
        namespace: str = "default",
        readiness: Mapping[str, Any] | None = None,
        ports: Sequence[int] = (),
        image: str = "local",
    ) -> None:
        """Run a command in pods of its own.

        It makes a Deployment, or a StatefulSet (whose pods have ordinals, and names that stay), a headless Service
        ``NAME-headless`` and, if there are ports, a Service ``NAME`` with them.

        Args:
            readiness: a readiness probe, as in a manifest; without, a pod is ready when it runs.
        """
        labels = {"app": name, **(labels or {})}
        container: dict[str, Any] = {
            "name": "main",
            "image": image,
            "command": list(command),
            "env": [{"name": key, "value": value} for key, value in (env or {}).items()],
        }
        if readiness:
            container["readinessProbe"] = dict(readiness)
        spec: dict[str, Any] = {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        }
        if stateful:
            spec |= {"serviceName": f"{name}-headless", "podManagementPolicy": "Parallel"}
        metadata = {"name": name, "namespace": namespace}
        service: dict[str, Any] = {"selector": labels, "ports": [{"port": port} for port in ports]}
        self.apply(
            {"kind": "StatefulSet" if stateful else "Deployment", "metadata": metadata, "spec": spec},
            {
                "kind": "Service",
                "metadata": {**metadata, "name": f"{name}-headless"},
                "spec": {**service, "clusterIP": "None"},
            },
        )
        if ports:
            self.apply({"kind": "Service", "metadata": metadata, "spec": service})

    def kill_pod(self, name: str, namespace: str = "default") -> None:
        """Kill all processes of a pod and take its network away, as if its host were lost."""
        self._ask("POST", f"/cluster/kill/{namespace}/{name}")

    def delete_pod(self, name: str, namespace: str = "default") -> None:
        """Delete a pod as ``kubectl delete pod`` does: SIGTERM, then SIGKILL after its grace period."""
        self._ask("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def execute(self, name: str, command: Sequence[str], namespace: str = "default") -> str:
        """Run a command in a pod, as ``kubectl exec`` does; its output. Raises RuntimeError if it fails."""
        answer = self._ask(
            "POST", f"/api/v1/namespaces/{namespace}/pods/{name}/exec", json={"command": list(command)}
        )
        if answer["exit_code"] != 0:
            raise RuntimeError(
                f"{' '.join(command)} in {name} ended with {answer['exit_code']}: {answer['output']}"
            )
        return str(answer["output"])

    def described(self, name: str, namespace: str = "default") -> dict[str, Any]:
        """A pod as the API of Kubernetes has it."""
        found: dict[str, Any] = self._ask("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        return found

    def logs(self, name: str, namespace: str = "default") -> str:
        """What a pod printed; of a pod that is gone, too."""
        log = self.folder / "logs" / f"{namespace}.{name}.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def resolve(self, name: str) -> list[str]:
        """The addresses that the cluster's DNS has for a name, sorted; the names that it has for an address."""
        addresses = name.replace(".", "").isdigit()
        looked_up = ["getent", "hosts" if addresses else "ahostsv4", name]
        bound = f'mount --bind "{self.folder}/resolv.conf" /etc/resolv.conf && exec "$@"'
        command = [*self._network.inside("control"), "unshare", "--mount", "sh", "-c", bound, "sh", *looked_up]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30.0)
        return sorted({line.split()[1 if addresses else 0] for line in done.stdout.splitlines()})

    def cut_laptop(self) -> None:
        """Take the laptop's link down."""
        self._network.set_laptop_link("down")

    def restore_laptop(self) -> None:
        """Bring the laptop's link up again."""
        self._network.set_laptop_link("up")

    @contextlib.contextmanager
    def outage(self, silent: bool = False) -> Iterator[None]:
        """The laptop's link is down meanwhile; or, silently, nothing comes through it."""
        if silent:
            self._network.set_laptop_drops(True)
        else:
            self.cut_laptop()
        try:
            yield
        finally:
            if silent:
                self._network.set_laptop_drops(False)
            else:
                self.restore_laptop()

    def __enter__(self) -> OneMachineCluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End all that runs in it, and remove its networks and files."""
        if hasattr(self, "_tool"):
            self._tool.close()
        # The controller first, for it ends the pods and needs dnsmasq until then.
        for process in reversed(self._processes.values()):
            process.terminate()
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._network.remove_all()
        for group in groups(self._network.prefix):
            remove_group(group)
        if hasattr(self, "folder") and not os.environ.get("KEEP_CLUSTER_FILES"):
            shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
