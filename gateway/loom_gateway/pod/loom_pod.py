"""`LoomPod`, the class that Kubetorch runs in each pod of a job.

Kubetorch holds it in a process that it ends at every deployment, together with that process's children. The worker
and the sessions have to outlive that. They belong to the pod's keeper (`loom_gateway.pod`), which is not a child of
that process. A new `LoomPod` finds the present keeper and sends it the new settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, cast

from loom.control.address import MONARCH_PORT
from loom.errors import LoomError, PodUnreachable
from loom.extras import GATEWAY_MODULES, require
from loom.process.child import python
from loom_gateway.pod.settings_and_peers import (
    CONFIGURE,
    GATEWAY_PORT,
    KEEPER_PORT,
    KeptPod,
    KeptPods,
    MeshPods,
    PodSettings,
    ask_pod,
    pod_key,
)

START_TIMEOUT = 60.0  # seconds that a keeper has to start: it imports a web server


class KeptJob(KeptPods):
    """The states of a job's pods."""

    gateway: str | None
    """The address of a pod whose gateway listens; None if there is none."""
    weaver: str | None
    """The address of the pod that has the weaver; None if there is none."""


class EndingPods(TypedDict):
    """The names of the pods that end."""

    pods: list[str]


class LoomPod:
    """One pod of a job. Its methods can be called over Kubetorch's HTTP, and return values that JSON can hold.

    Args:
        mesh: the name of this pod's mesh.
        meshes: the meshes of the job, each with the DNS name of its headless service and its number of pods:
            ``[["workers", "NAME-headless.NAMESPACE.svc.cluster.local", 3]]``. The pods of the first
            mesh have a gateway and a session host each, and one of them has the weaver.
        token_sha256: hexadecimal SHA-256 of the token that the gateways accept.
        monarch_port: the port of each pod's worker.
        gateway_port: the port of the gateways; the weaver, session hosts and gateways have the three after it, too.
        session_linger: seconds that a session lives on when nothing goes on in it.
        session_max: seconds that a session lives at most, whatever goes on in it; 0: any time.

    Raises:
        MissingDependency: the image lacks a dependency of a worker or a gateway.
        WrongArguments: the job has no such mesh.
        LoomError: the keeper does not start; the text has its last output.
    """

    def __init__(
        self,
        mesh: str,
        meshes: Sequence[Sequence[Any]],
        token_sha256: str,
        monarch_port: int = MONARCH_PORT,
        gateway_port: int = GATEWAY_PORT,
        session_linger: float = 3600.0,
        session_max: float = 0.0,
    ) -> None:
        require(GATEWAY_MODULES, "a pod")
        self._settings = PodSettings(
            mesh=mesh,
            meshes=tuple(MeshPods(*given) for given in meshes),
            token_sha256=token_sha256,
            monarch_port=monarch_port,
            gateway_port=gateway_port,
            keeper_port=KEEPER_PORT + monarch_port - MONARCH_PORT,
            session_linger=session_linger,
            session_max=session_max,
        )
        self._find_or_start_keeper()

    def status(self) -> KeptJob:
        """Return the state of the job's pods that answer.

        Returns:
            ``pods``: for each its ``name``, ``address``, ``mesh``, ``versions``, its ``worker`` (``address``,
                ``pid``, ``listening``, ``starts``, ``problem`` and ``state``, a `ProcessState`), whether it has a
                ``gateway`` and the ``weaver``, ``gateway_listening``, ``gateway_starts`` and ``gateway_problem``;
                ``gateway``: the address of a pod whose gateway listens, or None; ``weaver``: the address of the pod
                that has it, or None.
        """
        pods: list[KeptPod] = self._ask("GET", "/pods")["pods"]
        serving = [pod["address"] for pod in pods if pod["gateway"] and pod["gateway_listening"]]
        weavers = [pod["address"] for pod in pods if pod.get("weaver")]
        return {"pods": pods, "gateway": next(iter(serving), None), "weaver": next(iter(weavers), None)}

    def restart_worker(self, pod: str | None = None) -> KeptPod:
        """End a pod's worker, with everything that runs on it, and start another.

        Args:
            pod: the pod's name or address; None: whichever pod this call reaches.
        """
        return self._command(pod, "/restart_worker")

    def shutdown(self, pod: str | None = None) -> EndingPods:
        """End a pod's worker, its gateway and its sessions until the next deployment.

        Args:
            pod: the pod's name or address; None: all pods of the job.

        Returns:
            ``pods``: the names of the pods that end.
        """
        if pod is not None:
            return {"pods": [self._command(pod, "/shutdown")["name"]]}
        states = self.status()["pods"]
        for state in states:
            with contextlib.suppress(PodUnreachable):
                ask_pod(self._settings, state["address"], "POST", "/shutdown")
        return {"pods": [state["name"] for state in states]}

    def _ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Any:
        return ask_pod(self._settings, "127.0.0.1", method, path, body)

    def _command(self, pod: str | None, path: str) -> KeptPod:
        """Send a command to the keeper of a pod, by name or address; None: of this one."""
        if pod is None:
            return cast(KeptPod, self._ask("POST", path))
        states = self.status()["pods"]
        for state in states:
            if pod in (state["name"], state["address"]):
                return cast(KeptPod, ask_pod(self._settings, state["address"], "POST", path))
        named = ", ".join(state["name"] for state in states)
        raise PodUnreachable(f"no pod of this job that answers is {pod!r}; those that do: {named}")

    def _find_or_start_keeper(self) -> None:
        try:
            ask_pod(self._settings, "127.0.0.1", "POST", CONFIGURE, asdict(self._settings), key=pod_key(_folder()))
            return
        except PodUnreachable:
            pass  # there is no keeper yet
        folder = _folder()
        self._settings.write(folder)
        log = folder / "keeper.log"
        _start_apart(python("loom_gateway.pod", str(folder)), log)
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                self._ask("GET", "/pod")
                return
            except PodUnreachable as error:
                if time.monotonic() > deadline:
                    raise LoomError(f"the pod's keeper did not start: {error}; {_end_of(log)}") from error
            time.sleep(0.1)


def _folder() -> Path:
    given = os.environ.get("LOOM_POD_DIR")
    return Path(given) if given else Path.home() / ".loom" / "pod"


def _start_apart(command: Sequence[str], log: Path) -> None:
    """Start a process that is not a child of this one: Kubetorch ends this process with its children."""
    # The shell ends at once. Its background process then belongs to the container's first process.
    with open(log, "ab") as output:
        subprocess.run(
            ["sh", "-c", 'exec "$@" & ', "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            check=True,
        )


def _end_of(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-3:]
        return "its last output: " + json.dumps(lines)
    return f"nothing was written to {log}"
