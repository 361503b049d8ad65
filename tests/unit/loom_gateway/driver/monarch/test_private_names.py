"""Monarch's private names that the driver uses: each is there in the installed version, and in one folder."""

from __future__ import annotations

import ast
import importlib
from typing import Any

import pytest

from loom_gateway.workers.monarch_env import monarch_version
from tests.support.paths import ROOT

DRIVER = ROOT / "gateway" / "loom_gateway" / "driver"

ELSEWHERE = {"loom/loom/actor.py"}
"""What builds Monarch's own objects from those that stand for them on a laptop."""

TESTED_WITH = {(0, 7), (0, 8)}
"""Versions of torchmonarch, pre-releases included."""

ATTRIBUTES: dict[str, list[str]] = {
    "monarch._rust_bindings.monarch_hyperactor.actor.PythonMessage": ["decode", "kind"],
    "monarch._rust_bindings.monarch_hyperactor.actor_mesh.PythonActorMesh": ["cast_unresolved", "name"],
    "monarch._rust_bindings.monarch_hyperactor.endpoint.ActorEndpoint": [
        *("_actor_mesh", "_name", "_send", "_signature"),
        *("call", "call_one", "choose", "stream"),  # are replaced, as Future's are
    ],
    "monarch._rust_bindings.monarch_hyperactor.pickle.PicklingState": [],
    "monarch._src.actor.actor_mesh.ActorMesh": ["_endpoint", "_ndslice", "_labels", "_new_with_shape"],
    "monarch._src.actor.actor_mesh.Port": [
        "exception",
        "_pending_result",
        "_resolve_and_send",
        "_resolve_and_send_blocking",
    ],
    "monarch._src.actor.actor_mesh.RootClientActor": ["__supervise__"],
    "monarch._src.actor.actor_mesh": [
        *("_create_endpoint_message", "_dispatch_loop", "log_endpoint_exception", "pickle"),
    ],
    "monarch._src.actor.actor_mesh._Actor": [
        *("_lookup", "_prepare", "handle", "handle_sync"),
        *("_report_exception", "_report_panic", "__cleanup__", "_run_cleanup"),
    ],
    "monarch._src.actor.debugger.debug_controller": ["DebugController"],
    "monarch._src.actor.debugger.debug_controller.DebugController": ["_enter", "_serve"],
    "monarch._src.actor.debugger.debug_io": ["DebugIO", "DebugIOError"],
    "monarch._src.actor.debugger.debug_session.DebugSessions": ["info", "insert", "remove"],
    "monarch._src.actor.future.Future": ["get", "as_asyncio", "__await__"],
    "monarch._src.actor.host_mesh.HostMesh": ["_ndslice", "_labels", "_new_with_shape", "spawn_procs"],
    "monarch._src.actor.pickle": [
        *("_TorchPickler", "_ensure_torch_pickle", "_orig_function_getstate", "_torch_pickle_initialized"),
    ],
    "monarch._src.actor.proc_mesh.ProcMesh": ["_ndslice", "_labels", "_new_with_shape"],
    "monarch.actor": ["unhandled_fault_hook"],
}
"""Private attributes, and the one hook that is replaced, by the class or module that has them."""

BY_VERSION: dict[tuple[int, int], dict[str, list[str]]] = {
    (0, 7): {
        "monarch._rust_bindings.monarch_hyperactor.mailbox.PortReceiver": ["recv_task"],
        "monarch._src.actor.actor_mesh.PortReceiver": ["_process"],
    },
    (0, 8): {
        "monarch._rust_bindings.monarch_hyperactor.endpoint.PendingReply": ["block_on", "spawn_handle"],
        "monarch._rust_bindings.monarch_hyperactor.mailbox.Mailbox": ["open_accum_port"],
        "monarch._rust_bindings.monarch_hyperactor.mailbox.PortReceiver": ["recv"],
    },
}
"""Those that only one version has, or that only its receivers use."""

ATTRIBUTES |= BY_VERSION.get(monarch_version(), {})

INSTANCE_ATTRIBUTES = {
    "monarch._src.actor.actor_mesh.ActorMesh": {"_inner", "_shape", "_mesh_name", "_class", "_proc_mesh"},
    "monarch._src.actor.actor_mesh.Instance": {"_children", "_mailbox", "_as_rust"},
    "monarch._src.actor.future.Future": {"_status"},
    "monarch._src.actor.host_mesh.HostMesh": {"_pending_spawns", "_proc_meshes"},
    "monarch._src.actor.proc_mesh.ProcMesh": {"_host_mesh", "_pending_actor_spawns"},
    "monarch._src.actor.actor_mesh.Port": {"_port_ref", "_rank"},
    "monarch._src.actor.actor_mesh.PortReceiver": {"_receiver"},
}
"""Private attributes that only instances have."""


def private_imports(tree: ast.AST) -> set[tuple[str, str]]:
    """The private modules of Monarch's that a module imports from, and the names."""
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("monarch._")
        for alias in node.names
    }


def found(path: str) -> Any:
    """The module, or the class of a module, of a dotted name."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def test_the_installed_monarch_is_the_one_that_these_names_are_of() -> None:
    assert monarch_version() in TESTED_WITH


def test_every_private_name_that_is_imported_is_there() -> None:
    imported = set().union(*(private_imports(ast.parse(path.read_text())) for path in DRIVER.rglob("*.py")))
    assert imported
    for module, name in imported:
        assert found(f"{module}.{name}") is not None


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_every_private_attribute_is_there(owner: str) -> None:
    assert [name for name in ATTRIBUTES[owner] if not hasattr(found(owner), name)] == []


@pytest.mark.parametrize("owner", INSTANCE_ATTRIBUTES)
def test_every_private_attribute_of_an_instance_is_set_by_its_class(owner: str) -> None:
    import inspect

    source = inspect.getsource(found(owner))
    assert {name for name in INSTANCE_ATTRIBUTES[owner] if name not in source} == set()


def test_private_names_of_monarch_are_used_in_one_folder() -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for package in ("loom/loom", "gateway/loom_gateway", "proxy/loom_proxy")
        for path in (ROOT / package).rglob("*.py")
        if private_imports(ast.parse(path.read_text()))
    }
    outside = {user for user in users if not user.startswith("gateway/loom_gateway/driver/monarch/")}
    assert outside == ELSEWHERE


def test_private_attributes_are_used_in_one_folder() -> None:
    names = {name for names in INSTANCE_ATTRIBUTES.values() for name in names}
    names |= {"_ndslice", "_labels", "_new_with_shape"}
    names -= {"_rank", "_shape", "_class", "_receiver", "_inner"}  # Loom's own classes have such, too
    users = {
        path.relative_to(DRIVER).as_posix()
        for path in DRIVER.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in names
    }
    assert {user for user in users if not user.startswith("monarch/")} == set()
