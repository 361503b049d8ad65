"""Every use of Kubetorch's private names and of what its controller tells, tried with the versions in a test.

Documented names, such as ``kubetorch.Compute``, are used where they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit


def deployable(name: str, folder: str, module: str, class_name: str) -> Any:
    """Return Kubetorch's proxy of a class that the pods have installed and this machine need not have."""
    from kubetorch.resources.callables.cls.cls import Cls

    remote: Any = Cls(name, pointers=(folder, module, class_name), sync_dir=False)
    remote.reload_prefixes = []
    return remote


def is_compute(value: Any) -> bool:
    """Return whether a value is a ``kubetorch.Compute``, without importing Kubetorch."""
    kubetorch = sys.modules.get("kubetorch")
    return kubetorch is not None and isinstance(value, kubetorch.Compute)


def selector_of(compute: Any) -> Mapping[str, str]:
    """Return the labels by which a compute selects pods that run already; empty if it has none."""
    return compute._pod_selector or {}


def reach_controller() -> Any:
    """Return Kubetorch's client of its controller, with the address of the port that is forwarded now."""
    from kubetorch import globals as kubetorch_globals

    client = kubetorch_globals.controller_client()
    client.base_url = kubetorch_globals.service_url().rstrip("/")
    return client


def workload(namespace: str, service: str) -> Mapping[str, Any] | None:
    """Return what the controller knows of a service; None if there is none. Raises errors of Kubetorch's."""
    found: Mapping[str, Any] | None = reach_controller().get_workload(namespace, service)
    return found or None


def log_of(namespace: str, pod: str, lines: int) -> str:
    """Return the last lines of a pod's log. Raises errors of Kubetorch's."""
    return str(reach_controller().get_pod_logs(namespace, pod, tail_lines=lines))


def module_of(workload: Mapping[str, Any]) -> tuple[str, str]:
    """Return the module and the name of the class or function that a service has."""
    pointers = (workload.get("module") or {}).get("pointers") or {}
    return str(pointers.get("module_name", "")), str(pointers.get("cls_or_fn_name", ""))


def kubernetes_name(name: str) -> str:
    """Return a name as Kubetorch writes it for Kubernetes. Raises ValueError if nothing is left of it."""
    from kubetorch.serving.utils import clean_and_validate_k8s_name

    return str(clean_and_validate_k8s_name(name, allow_full_length=False))


def services_to_look_for(name: str, reload_prefixes: Sequence[str]) -> list[str]:
    """Return the names of services that a name may mean, in Kubetorch's order."""
    import kubetorch
    from kubetorch.resources.callables.utils import get_names_for_reload_fallbacks

    prefixed = kubetorch.config.prefix_username
    return list(get_names_for_reload_fallbacks(name, list(reload_prefixes), prefix_username=prefixed))


def is_deployed(target: Any, kind: str) -> bool:
    """Return whether an object is a result of Kubetorch's function of that name, ``cls`` or ``fn``."""
    return getattr(type(target), "MODULE_TYPE", None) == kind and hasattr(type(target), "base_endpoint")


def endpoint_of(deployed: Any) -> str:
    """Return the URL of the service of a deployed result of ``kubetorch.cls`` or ``kubetorch.fn``."""
    return str(deployed.base_endpoint)


def is_in_cluster() -> bool:
    """Return whether this program runs in a pod."""
    from kubetorch.serving.utils import is_running_in_kubernetes

    return bool(is_running_in_kubernetes())


def server_port_of(compute: Any) -> int:
    """Return the port of Kubetorch's server in the pods of a compute, or of labels."""
    from kubetorch.provisioning.constants import DEFAULT_KT_SERVER_PORT

    return int(getattr(compute, "server_port", None) or DEFAULT_KT_SERVER_PORT)


def nginx_url() -> str:
    """Return the WebSocket URL of Kubetorch's nginx; or its ``kube://`` address, if Kubetorch forwards a port."""
    # Not Kubetorch's own port-forward: it restarts only at Kubetorch's next call, which a session may never make.
    from kubetorch import globals as kubetorch_globals

    if kubetorch_globals.config.api_url or is_in_cluster():
        parts = urlsplit(kubetorch_globals.service_url())
        scheme = "wss" if parts.scheme == "https" else "ws"
        return str(urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", "")))
    namespace = kubetorch_globals.config.install_namespace
    return f"kube://{namespace}/{kubetorch_globals.KUBETORCH_CONTROLLER}:{kubetorch_globals.DEFAULT_NGINX_PORT}"
