"""Reports of a job's pods from `LoomPod.status`, and their consequences for the job."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from loom._version import __version__
from loom.errors import LoomError, ProtocolMismatch, PythonVersionMismatch
from loom.process.child import ProcessState

# Errors of a pod that only another image or other arguments can cure.
_FINAL = frozenset({"ImportError", "MissingDependency", "WrongArguments"})
_NO_LOOM = re.compile(r"No module named '?loom(_gateway|_proxy)?\b")
_INSTALL = ". An image needs torchmonarch and Loom, as those of loom.images.cpu_image() and gpu_image() have them"


class NotLoaded(LoomError):
    """A pod that answers has not loaded `LoomPod` yet. Kubetorch returns that answer as a call's result."""


def answer(status: Any) -> dict[str, Any]:
    """Return a result of `LoomPod.status`, or raise `NotLoaded` if it is another."""
    if not isinstance(status, dict) or "pods" not in status:
        detail = status.get("detail", status) if isinstance(status, dict) else status
        raise NotLoaded(f"{detail!s:.300}")
    return status


def what_is_wrong(status: Mapping[str, Any], expected: int) -> str:
    """Return why a job cannot be used yet; empty if it can."""
    pods = status["pods"]
    wrong = [f"pod {pod['name']}: {pod['worker']['problem']}" for pod in pods if pod["worker"]["problem"]]
    wrong += [f"pod {pod['name']}: {pod['gateway_problem']}" for pod in pods if pod["gateway_problem"]]
    if len(pods) < expected:
        wrong.append(f"{len(pods)} of {expected} pods answer: {', '.join(pod['name'] for pod in pods) or 'none'}")
    if not wrong and status["gateway"] is None:
        wrong.append("no pod has the gateway yet")
    return "; ".join(wrong)


def fails_again(status: Mapping[str, Any]) -> bool:
    """Return whether a process of a pod does not run after several starts, or cannot be started."""
    for pod in status["pods"]:
        worker = pod["worker"]
        if worker["state"] == ProcessState.PORT_TAKEN or (not worker["listening"] and worker["starts"] > 2):
            return True
        if pod["gateway"] and not pod["gateway_listening"] and pod["gateway_starts"] > 2:
            return True
    return False


def check_versions(pod: Mapping[str, Any]) -> None:
    """Raise `PythonVersionMismatch` or `ProtocolMismatch` if this program does not work with a pod's."""
    versions = pod["versions"]
    here = ".".join(map(str, sys.version_info[:2]))
    there = ".".join(versions["python"].split(".")[:2])
    if here != there:
        raise PythonVersionMismatch(
            f"pod {pod['name']} has Python {there} and this is Python {here}: classes travel as bytecode, which "
            f"differs. Use an image with Python {here}, or run this program with Python {there}"
        )
    theirs = versions.get("monarch-loom", __version__)
    if theirs.split(".")[0] != __version__.split(".")[0]:
        raise ProtocolMismatch(
            f"pod {pod['name']} has Loom {theirs} and this is Loom {__version__}: install the same major "
            "version on both sides"
        )


def is_final(error: BaseException) -> bool:
    """Return whether a pod has answered that it cannot run, so that asking again is useless."""
    return not _FINAL.isdisjoint(_class_names(error))


def _class_names(error: BaseException) -> set[str]:
    """Return the names of an error's classes. Kubetorch's client makes a class of the name that the pod raised."""
    return {cls.__name__ for cls in type(error).__mro__}


def what_a_pod_says(error: BaseException) -> str:
    """Return the text of a final error: which pod, why, and what to do."""
    reason = str(error).strip().partition("\n\n")[0]  # Kubetorch's client appends the traceback
    pod = f"pod {name}" if (name := getattr(error, "pod_name", None)) else "a pod"
    if missing := _NO_LOOM.search(str(error)):
        return (
            f"{pod} has no Loom in its image ({missing[0]}): use loom.images.cpu_image() or gpu_image(), or "
            "install monarch-loom[gateway] in yours"
        )
    advice = "" if "WrongArguments" in _class_names(error) else _INSTALL
    return f"{pod} cannot run a worker: {reason}{advice}"
