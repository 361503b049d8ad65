"""Kubetorch's private names that Loom uses, in the version that is installed, and where they are used."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import version
from typing import Any

import pytest

from loom_proxy.kubernetes import kubetorch_names
from tests.support.paths import ROOT

kt = pytest.importorskip("kubetorch")

TESTED_WITH = {"0.5.0", "0.5.1"}

PARAMETERS = {
    "kubetorch.Cls": {"name", "pointers", "sync_dir"},
    "kubetorch.Cls.to": {"compute", "init_args", "stream_logs", "get_if_exists", "reload_prefixes"},
    "kubetorch.cls": {"class_obj", "name"},
    "kubetorch.fn": {"function_obj", "name"},
    "kubetorch.globals.ControllerClient.get_workload": {"namespace", "name"},
    "kubetorch.globals.ControllerClient.get_pod_logs": {"namespace", "name", "tail_lines"},
    "kubetorch.resources.callables.utils.get_names_for_reload_fallbacks": {"name", "prefixes", "prefix_username"},
    "kubetorch.serving.utils.clean_and_validate_k8s_name": {"name", "allow_full_length"},
}
"""Functions, and those of their parameters that Loom gives."""

SOURCES = [ROOT / "proxy", ROOT / "loom", ROOT / "gateway"]


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(found(module), name)


def test_the_installed_kubetorch_is_one_that_these_names_are_of() -> None:
    assert version("kubetorch") in TESTED_WITH


def test_private_modules_are_imported_in_one_module_only() -> None:
    importers = set()
    for path in (path for folder in SOURCES for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kubetorch":
                importers.add(path.name)
    assert importers == {"kubetorch_names.py"}


@pytest.mark.parametrize("path", PARAMETERS)
def test_functions_take_what_they_are_given(path: str) -> None:
    assert PARAMETERS[path] <= set(inspect.signature(found(path)).parameters)


def test_what_is_deployed_has_the_attributes_that_are_read() -> None:
    for kind in (kt.Cls, kt.Fn):
        assert [one for one in ("base_endpoint", "callable_name", "serialization") if not hasattr(kind, one)] == []
    assert (kt.Cls.MODULE_TYPE, kt.Fn.MODULE_TYPE) == ("cls", "fn")


def test_a_compute_tells_its_selector_and_its_port() -> None:
    assert kubetorch_names.selector_of(kt.Compute(selector={"app": "mine"}, namespace="ours")) == {"app": "mine"}
    assert kubetorch_names.selector_of(kt.Compute(cpus=1, namespace="ours")) == {}
    assert kubetorch_names.server_port_of(kt.Compute(cpus=1, namespace="ours")) == 32300
    assert kubetorch_names.is_compute(kt.Compute(cpus=1, namespace="ours"))
    assert not kubetorch_names.is_compute(7)


def test_services_are_looked_for_by_the_users_name_or_by_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kt.config, "_username", "ada")

    assert kubetorch_names.services_to_look_for("shelf", [])[0] == "ada-shelf"
    assert kubetorch_names.services_to_look_for("shelf", [])[-1] == "shelf"
    assert kubetorch_names.services_to_look_for("shelf", ["prod", "qa"]) == ["prod-shelf", "qa-shelf"]


def test_the_modules_of_a_workload_are_read() -> None:
    told = {"module": {"pointers": {"module_name": "loom_gateway.pod.loom_pod", "cls_or_fn_name": "LoomPod"}}}

    assert kubetorch_names.module_of(told) == ("loom_gateway.pod.loom_pod", "LoomPod")
    assert kubetorch_names.module_of({"module": None}) == ("", "")


def test_a_name_without_letters_is_no_name() -> None:
    assert kubetorch_names.kubernetes_name("MyClass") == "myclass"
    with pytest.raises(ValueError, match="alphanumeric"):
        kubetorch_names.kubernetes_name("_")
