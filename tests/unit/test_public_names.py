"""`loom` has Monarch's public names, with Monarch's signatures; what it lacks is named with its reason."""

from __future__ import annotations

import importlib
import inspect
import json
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import monarch
import monarch.actor
import pytest
from monarch._rust_bindings.monarch_hyperactor.endpoint import ActorEndpoint
from monarch._src.actor.actor_mesh import ActorMesh

import loom
from loom._former_names import FORMER_NAMES
from tests.parity.absent import ABSENT
from tests.support.paths import ROOT

DIFFERENCES = ROOT / "docs" / "guide" / "monarch.md"

TENSOR_ENGINE = "part of the tensor engine, which needs torch and GPUs in the root client"

WIRE_FORMAT = "Monarch's own wire format"

ALLOWED = {
    "Channel.open": "also takes the job, for a program that has several",
    "Channel.open_ranked": "also takes the job, for a program that has several",
    "HostMesh.is_fake_in_process": "for Monarch's own tests",
    "HostMesh.region": "Monarch's arithmetic of ranks, no public class; `extent` has the sizes",
    "HostMesh.stream_logs": "always off in torchmonarch 0.7; `logging_option` says where output goes",
    "HostMesh.sync_workspace": "`job.sync` ships a folder to every host",
    "ProcMesh.activate": TENSOR_ENGINE,
    "ProcMesh.from_host_mesh": "how Monarch's `spawn_procs` makes its result",
    "ProcMesh.rank_tensor": TENSOR_ENGINE,
    "ProcMesh.rank_tensors": TENSOR_ENGINE,
    "ProcMesh.sync_workspace": "not implemented in Monarch either; `job.sync` ships a folder to every host",
    "ProcMesh.to_table": TENSOR_ENGINE,
    "Extent.from_bytes": WIRE_FORMAT,
    "Extent.region": "Monarch's arithmetic of ranks, no public class",
    "Point.from_bytes": WIRE_FORMAT,
    "NDSlice.from_list": "how Monarch covers single ranks; a mesh has one slice",
    "Shape.from_bytes": WIRE_FORMAT,
    "Shape.region": "Monarch's arithmetic of ranks, no public class",
}
"""What differs from Monarch on purpose, and why: a method that is missing, or has another signature."""

CLASSES = {
    "HostMesh": (monarch.actor.HostMesh, "HostMeshProxy"),
    "ProcMesh": (monarch.actor.ProcMesh, "ProcMeshProxy"),
    "ActorMesh": (ActorMesh, "ActorMeshProxy"),
    "ValueMesh": (monarch.actor.ValueMesh, "ValueMeshProxy"),
    "Future": (monarch.actor.Future, "FutureProxy"),
    "Endpoint": (ActorEndpoint, "EndpointProxy"),
    "Point": (monarch.actor.Point, "Point"),
    "Extent": (monarch.actor.Extent, "Extent"),
    "Shape": (monarch.Shape, "Shape"),
    "NDSlice": (monarch.NDSlice, "NDSlice"),
    "ActorError": (monarch.actor.ActorError, "ActorError"),
    "Accumulator": (monarch.actor.Accumulator, "Accumulator"),
    "Channel": (monarch.actor.Channel, "Channel"),
    "Port": (monarch.actor.Port, "Port"),
    "PortReceiver": (monarch.actor.PortReceiver, "PortReceiver"),
}
"""Monarch's class and the name of Loom's."""


def test_every_name_of_monarch_is_provided_or_listed_as_absent() -> None:
    provided = {name for name in monarch.actor.__all__ if hasattr(loom, name)}
    assert provided | set(ABSENT) == set(monarch.actor.__all__)
    assert not provided & set(ABSENT), "names that are provided after all"


def test_every_lazy_name_can_be_imported() -> None:
    for name in dir(loom):
        getattr(loom, name)


def test_every_public_exception_is_a_name_of_loom() -> None:
    classes = {name for name, value in vars(loom.errors).items() if inspect.isclass(value) and name[0] != "_"}
    public = {name for name in classes if issubclass(getattr(loom.errors, name), loom.LoomError)}

    assert public == {name for name in loom.errors.__all__ if inspect.isclass(getattr(loom.errors, name))}
    assert set(loom.errors.__all__) <= set(dir(loom))
    with pytest.raises(loom.NotInjectable):  # one of five that were not
        raise loom.errors.NotInjectable


def test_a_type_checker_sees_every_name_of_loom(tmp_path: Path) -> None:
    uses = tmp_path / "uses.py"
    uses.write_text("import loom\n" + "".join(f"loom.{name}\n" for name in [*dir(loom), "no_such_name"]))
    sources = [ROOT / "loom" / "loom" / "__init__.pyi", Path(loom.errors.__file__)]
    flags = ["--strict", "--follow-imports=skip", f"--cache-dir={tmp_path}"]
    command = [sys.executable, "-m", "mypy", *flags, *sources, uses]

    checked = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)

    unseen = [line.partition("error: ")[2] for line in checked.stdout.splitlines() if line.startswith(str(uses))]
    assert unseen == ['Module has no attribute "no_such_name"  [attr-defined]']


def test_names_that_actors_use_are_monarchs_own_where_it_is_installed() -> None:
    names = set(loom.actor.__all__) & set(monarch.actor.__all__)
    assert {"Actor", "endpoint", "context", "this_proc", "get_or_spawn_controller", "MeshFailure"} <= names
    assert all(getattr(loom.actor, name) is getattr(monarch.actor, name) for name in names)


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_the_page_about_differences_says_why_a_name_is_absent(name: str) -> None:
    assert f"`{name}`" in DIFFERENCES.read_text()


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter but ``self``. Callers do not see the names of ``*`` and ``**``."""
    found = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    collected = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [("" if p.kind in collected else p.name, p.kind, p.default) for p in found]


def functions() -> list[str]:
    return sorted(
        name
        for name in monarch.actor.__all__
        if inspect.isfunction(getattr(monarch.actor, name)) and name not in ABSENT
    )


@pytest.mark.parametrize("name", functions())
def test_a_function_has_monarchs_signature(name: str) -> None:
    assert parameters(getattr(loom, name)) == parameters(getattr(monarch.actor, name))


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, those that it inherits too."""
    for name in dir(cls):
        if not name.startswith("_"):
            yield name, inspect.getattr_static(cls, name)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_monarchs_public_methods_and_properties(name: str) -> None:
    monarchs, ours_name = CLASSES[name]
    ours = getattr(loom, ours_name)
    missing = [
        member
        for member, _ in public_members(monarchs)
        if not hasattr(ours, member) and f"{name}.{member}" not in ALLOWED
    ]
    assert not missing


@pytest.mark.parametrize("name", CLASSES)
def test_a_method_has_monarchs_signature(name: str) -> None:
    monarchs, ours_name = CLASSES[name]
    ours = getattr(loom, ours_name)
    for member, function in public_members(monarchs):
        if not hasattr(ours, member) or f"{name}.{member}" in ALLOWED:
            continue
        found = inspect.getattr_static(ours, member)
        if isinstance(function, property):
            assert not inspect.isfunction(found), f"{name}.{member} is no method"
        # Methods of Monarch's native classes have no names and defaults to compare.
        elif inspect.isfunction(function):
            assert parameters(getattr(ours, member)) == parameters(function), f"{name}.{member}"


def test_nothing_is_allowed_that_does_not_differ() -> None:
    for difference, reason in ALLOWED.items():
        name, _, member = difference.partition(".")
        monarchs, ours_name = CLASSES[name]
        ours = getattr(loom, ours_name)
        assert reason
        assert hasattr(monarchs, member), f"Monarch has no {difference}"
        if callable(getattr(ours, member, None)):
            assert parameters(getattr(ours, member)) != parameters(getattr(monarchs, member)), difference


BARE = """
import sys
sys.modules["monarch"] = None
import inspect, pickle, cloudpickle
import loom, loom.actor
assert not loom.actor.has_monarch
for name in dir(loom):
    getattr(loom, name)
for name in "current_rank current_size current_actor_name context this_host this_proc get_meter".split():
    try:
        getattr(loom, name)()
    except RuntimeError as error:
        assert "inside an actor in the cluster" in str(error)
    else:
        raise AssertionError(name)
try:
    loom.get_or_spawn_controller("name", int)
except RuntimeError as error:
    assert "get_or_spawn_controller" in str(error)
@loom.traced(name="a span")
def traced(a): return a + 1
@loom.traced
def plainly(a): return a + 1
@loom.returns_future
async def later(): return 1
with loom.span("block"):
    assert traced(1) == plainly(1) == 2
assert str(inspect.signature(traced)) == "(a)"
try:
    later()
except RuntimeError as error:
    assert "returns_future" in str(error)
else:
    raise AssertionError("later")
class Failure:
    def __supervise__(self, failure: loom.MeshFailure) -> bool: return loom.current_rank is not None
signatures = {name: str(inspect.signature(getattr(loom, name))) for name in sys.argv[1:]}
from loom.shape import for_cluster
reduce = for_cluster(loom.Point(5, loom.Extent(["a", "b"], [2, 3])))
class Reduced:
    def __reduce__(self): return reduce
payload = cloudpickle.dumps((traced, plainly, later, Failure, Reduced()))
sys.stdout.buffer.write(pickle.dumps((signatures, payload)))
"""


IN_THE_CLUSTER = """
import inspect, pickle, sys
import monarch.actor
traced, plainly, later, failure, point = pickle.load(sys.stdin.buffer)
assert traced(1) == plainly(1) == 2
assert inspect.isfunction(traced)
assert isinstance(later(), monarch.actor.Future)
assert failure().__supervise__(None)
assert type(point) is monarch.actor.Point
assert (point.rank, dict(point)) == (5, {"a": 1, "b": 2})
"""


def test_without_monarch_stand_ins_become_monarchs_own_in_the_cluster() -> None:
    names = [name for name in functions() if getattr(loom, name).__module__ != "loom.actor"]
    done = subprocess.run([sys.executable, "-c", BARE, *names], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    signatures, payload = pickle.loads(done.stdout)
    assert set(signatures) == set(names)

    # In a process of its own: a future makes its process a root client, which prefixes later log lines.
    subprocess.run([sys.executable, "-c", IN_THE_CLUSTER], input=payload, timeout=60, check=True)


def test_without_monarch_functions_have_monarchs_parameters() -> None:
    program = (
        "import sys; sys.modules['monarch'] = None\n"
        "import inspect, json, loom\n"
        "signatures = {name: inspect.signature(getattr(loom, name)) for name in sys.argv[1:]}\n"
        "print(json.dumps({name: [[p.name, int(p.kind)] for p in signature.parameters.values()]"
        " for name, signature in signatures.items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *functions()], capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    for name in functions():
        assert found[name] == [
            [p.name, int(p.kind)] for p in inspect.signature(getattr(monarch.actor, name)).parameters.values()
        ], name


@pytest.mark.parametrize("name", [name for name in dir(monarch.actor) if hasattr(loom, name)] + ["ActorMesh"])
def test_what_is_generic_in_monarch_is_so_in_loom(name: str) -> None:
    monarchs = getattr(monarch.actor, name, ActorMesh)
    if isinstance(monarchs, type) and hasattr(monarchs, "__class_getitem__"):
        count = len(getattr(monarchs, "__parameters__", ()) or (None,))
        # Of a ParamSpec, ... is any parameters.
        for given in ((int,) * count, (..., *(int,) * (count - 1))):
            try:
                monarchs[given[0] if count == 1 else given]  # type: ignore[index]
            except TypeError:
                continue
            assert getattr(loom, name)[given[0] if count == 1 else given] is not None


@pytest.mark.parametrize("name", ["chaos", "devices", "errors", "rl", "tensors", "threadlet", "tracing", "train"])
def test_a_package_is_there_after_loom_is_imported(name: str) -> None:
    check = f"import sys, loom; loom.{name}; assert 'torch' not in sys.modules and 'monarch' not in sys.modules"

    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


@pytest.mark.parametrize(("former", "todays"), FORMER_NAMES.items())
def test_a_former_name_imports_the_same_module_with_a_warning(former: str, todays: str) -> None:
    sys.modules.pop(former, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(former.rpartition(".")[0])  # its package may have a former name, too
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(former)} is now {re.escape(todays)}") as warned:
        assert importlib.import_module(former) is importlib.import_module(todays)
    assert [one.filename for one in warned] == [__file__]


def test_a_former_package_is_an_attribute_of_loom_and_its_modules_are_todays_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert loom.timing is loom.tracing  # type: ignore[attr-defined]
        assert importlib.import_module("loom.timing.lines") is importlib.import_module("loom.tracing.lines")
        assert pickle.loads(b"cloom.timing.spans\nSpan\n.") is loom.tracing.Span
