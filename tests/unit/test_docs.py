"""The pages that readers have: links lead somewhere, commands exist, code compiles, and nothing is left out."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import loom
from loom.control.operations import OPERATIONS
from loom.errors import error_for_code
from loom.train import FaultTolerantJob
from loom_proxy.weaver.client import WeaverProxy
from tests.support import frameworks_page, guarantees_page
from tests.support.cli_page import commands
from tests.support.docs import PAGES, Block, Page
from tests.support.paths import ROOT

SOURCES = ("loom/loom", "gateway/loom_gateway", "proxy/loom_proxy")

CLI_PAGES = (
    "cli",
    "cli-serve",
    "cli-access",
    "cli-training",
    "cli-runs",
    "cli-history",
    "cli-slurm",
    "cli-faults",
    "cli-devices",
    "cli-timing",
)

README_LINES, PAGE_LINES = 150, 260

OF_A_JOB = {"hosts", "session", "token", "versions", "service_url", "apply", "kill"}
"""Attributes that a `Job` gets when it is made, and those of a `KubernetesJob`."""


def every(language: str) -> list[Block]:
    return [block for page in PAGES for block in page.blocks(language)]


# Links and sizes.


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Page) -> None:
    for link in page.links():
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        assert path.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in Page(path).anchors(), f"{link}: no such heading"


def test_every_page_of_docs_is_in_the_index() -> None:
    index = Page.of("docs/README.md")
    results = Page.of("docs/results/README.md")
    linked = {(page.path.parent / link).resolve() for page in (index, results) for link in page.links()}
    pages = {path for path in (ROOT / "docs").rglob("*.md") if path != index.path}
    assert not pages - linked


def test_pages_are_short() -> None:
    assert len(Page.of("README.md").text.splitlines()) <= README_LINES
    long = [str(page) for page in PAGES if len(page.text.splitlines()) > PAGE_LINES]
    assert not long


# Commands.


def words_of_loom(line: str) -> Iterator[list[str]]:
    """The words of each command of `loom` in a line of a shell."""
    line = re.sub(r"^\$ ", "", line)
    for part in re.split(r"&&|\|\||;|\||\$\(|&$", line):
        try:
            words = shlex.split(part.strip().rstrip(")"), comments=True)
        except ValueError:
            continue  # a part of a quoted text
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words[:1] == ["export"]:
            continue
        if words and words[0].removeprefix(".venv/bin/") == "loom":
            yield ["loom", *words[1:]]


def check_command(words: list[str]) -> None:
    """Fail unless there is such a command with such options."""
    known = commands()
    name = next((" ".join(words[:n]) for n in (3, 2) if " ".join(words[:n]) in known), None)
    if name is None:
        groups = {" ".join(one.split()[:2]) for one in known}
        plain = [word for word in words if not word.startswith("-")]
        assert len(plain) < 2 or (" ".join(words) in groups) or words[1] == "COMMAND", f"no command {words}"
        return
    options = {option for one in known[name].params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
    own = words[: words.index("--")] if "--" in words else words  # not those of a command that it runs
    for word in own[len(name.split()) :]:
        if word.startswith("-") and not re.fullmatch(r"-?[\d.]+( s)?", word):
            assert word.partition("=")[0] in options, f"{name} has no option {word}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_command_that_a_page_shows_exists(page: Page) -> None:
    for block in [*page.blocks("sh"), *page.blocks("")]:
        for line in block.lines:
            for words in words_of_loom(line):
                check_command(words)
    for code in page.inline():
        if code.startswith("loom "):
            check_command(re.sub(r"[\[\]]", " ", code).split())


@pytest.mark.parametrize("name", commands())
def test_every_command_and_option_is_in_the_reference(name: str) -> None:
    pages = [Page.of(f"docs/reference/{name}.md").text for name in CLI_PAGES]
    (found,) = (page.partition(f"\n## {name}\n")[2] for page in pages if f"\n## {name}\n" in page)
    section = found.partition("\n## ")[0]
    shared = {"--url", "--token", "--ca"}
    for parameter in commands()[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--") and option not in shared:
                assert option in section, f"run python -m tests.support.cli_page: {option} is missing"


def test_every_option_of_a_gateway_is_explained() -> None:
    text = Page.of("docs/reference/gateway.md").text
    options = [parameter.opts[0] for parameter in commands()["loom serve gateway"].params]
    assert not [option for option in options if f"`{option}`" not in text]


# Code.


@pytest.mark.parametrize("block", every("python"), ids=str)
def test_a_block_of_python_compiles_and_its_names_exist(block: Block) -> None:
    tree = compile("\n".join(block.lines), str(block), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "loom":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert has(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Attribute):
            check_attribute(node)


def has(module: ModuleType, name: str) -> bool:
    """Whether a module has a name; one that it imports only when it is used counts without being imported."""
    return name in dir(module) or hasattr(module, name)


def check_attribute(node: ast.Attribute) -> None:
    """Fail where an attribute of `loom`, of a job or of its weaver does not exist."""
    match node.value:
        case ast.Name(id="loom"):
            assert hasattr(loom, node.attr) or is_module(f"loom.{node.attr}"), f"loom has no {node.attr}"
        case ast.Name(id="job"):
            assert hasattr(loom.Job, node.attr) or node.attr in OF_A_JOB, f"a job has no {node.attr}"
        case ast.Attribute(value=ast.Name(id="job"), attr="weaver"):
            assert hasattr(WeaverProxy, node.attr), f"a weaver has no {node.attr}"
        case ast.Name(id="training"):
            assert hasattr(FaultTolerantJob, node.attr), f"a training has no {node.attr}"


def is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_name_of_loom_in_the_prose_exists(page: Page) -> None:
    for code in page.inline():
        for name in re.findall(r"^(?:except )?loom((?:\.\w+)+)", code):
            assert exists(name[1:].split(".")), f"loom{name} does not exist"


def exists(names: list[str]) -> bool:
    value: Any = loom
    path = "loom"
    for name in names:
        path += f".{name}"
        if name == names[-1] and name in dir(value):
            return True
        if hasattr(value, name):
            value = getattr(value, name)
        elif is_module(path):
            value = importlib.import_module(path)
        else:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_that_a_page_names_exists(page: Page) -> None:
    roots = ("loom/", "gateway/", "proxy/", "tests/", "examples/", "images/", "docs/", ".ci/")
    for code in page.inline():
        for word in code.split():
            name = word.partition("::")[0].rstrip(",:")
            if name.startswith(roots) and re.fullmatch(r"[\w./-]+", name):
                made = name.endswith("token.env") or "SUITE" in name  # by the reader
                assert made or (ROOT / name).exists(), f"{name} does not exist"


# Nothing is left out.


def sources() -> Iterator[Path]:
    for root in SOURCES:
        yield from (ROOT / root).rglob("*.py")


def test_every_environment_variable_is_explained() -> None:
    named = {name for path in sources() for name in re.findall(r"\"(LOOM_[A-Z_]+)\"", path.read_text())}
    assert len(named) > 15
    text = Page.of("docs/reference/environment.md").text
    assert not [name for name in sorted(named) if f"`{name}`" not in text]


def test_every_public_error_is_explained() -> None:
    text = Page.of("docs/reference/errors.md").text
    errors = [
        name
        for name in dir(loom)
        if isinstance(value := getattr(loom, name), type) and issubclass(value, loom.LoomError)
    ]
    assert len(errors) > 50
    assert not [name for name in errors if f"`{name}`" not in text and name != "LoomError"]


def test_every_code_of_an_error_that_a_page_names_exists() -> None:
    named = {(page.path.name, code) for page in PAGES for code in re.findall(r"\bcode `(\w+)`", page.text)}
    assert named
    assert not [one for one in named if type(error_for_code(one[1], "")) is loom.LoomError]


def test_every_route_is_explained() -> None:
    text = Page.of("docs/reference/rest.md").text
    routes = set()
    for path in (ROOT / "gateway").rglob("*.py"):
        if "pod" in path.parts:  # what the pods of a job ask each other
            continue
        source = path.read_text()
        routes |= set(re.findall(r"(?:Route|app\.\w+)\(\s*\"(/[^\"]*)\"", source))
        for router in source.split('APIRouter(prefix="')[1:]:
            prefix = router.partition('"')[0]
            routes |= {f"{prefix}{one}" for one in re.findall(r"router\.\w+\(\s*\"(/[^\"]*)\"", router)}
    routes |= {f"/api/v1{one.route.shown_path}" for one in OPERATIONS.values()}
    routes |= {f"/api/v1/sessions/{{name}}/{one}" for one in ("replicas", "commands")}
    assert len(routes) > 30
    assert not [route for route in routes if f"{route.replace(':path', '')}`" not in text]


def test_the_page_of_frameworks_is_written_from_their_tables() -> None:
    page = Page.of("docs/reference/rl-frameworks.md")
    assert page.text == frameworks_page.page(), "run python -m tests.support.frameworks_page"


@pytest.mark.parametrize("name", guarantees_page.PAGES)
def test_the_marks_of_the_tests_write_the_pages_of_guarantees(name: str) -> None:
    page = guarantees_page.page(name)

    assert page.count("::test_") > 10
    assert Page.of(f"docs/design/{name}.md").text == page, "run python -m tests.support.guarantees_page"
