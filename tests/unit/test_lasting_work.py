"""Whatever loops in a thread or a task of Loom's goes on after an error, or says what else its end leads to."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGES = ("loom/loom", "proxy/loom_proxy", "gateway/loom_gateway")

STARTS = {"Thread", "start_thread", "create_task", "ensure_future", "_start", "run"}
"""Names by which threads and tasks are started; ``run`` is that of `loom.process.tasks`."""

GUARDS = {"keep_going", "keep_running", "run_to_end"}

_CONNECTION = "its connection ends with it, and the other side of that sees so"
_ITSELF = "it catches every error inside its loop"

ENDS = {
    "nats/requests.py:_answer": "one request, whose sender waits for so long only",
    "nats/jetstream.py:say": "one request; NATS gives it to another bridge if nobody says that it goes on",
    "chaos/host/network.py:carry": "the agent's process ends, and the host removes its fault",
    "cli/remote_exec.py:_pass_input": "it closes the command's input, whatever ends it",
    "cli/remote_exec.py:pass_on": "one command, whose session is over",
    "driver/handlers/hosts.py:_ends_cleanly": _CONNECTION,
    "driver/remote_exec/command.py:_read": _CONNECTION,
    "driver/remote_exec/command.py:_write": _CONNECTION,
    "process/parent_pipe.py:watch": "what it reads is a pipe: an error is its end",
    "process/tasks.py:_again": "it is `keep_running` and `run_to_end`",
    "remote_exec/forward.py:_send": _CONNECTION,
    "remote_exec/terminal.py:_send": "one command, whose session is over",
    "rest/sessions.py:_client_gone": _CONNECTION,
    "rl/generation/http_app.py:_left": _CONNECTION,
    "tensors/sending/dispatcher.py:_send": _ITSELF,
    "threadlet/reporting.py:_await_events": _ITSELF,
    "threadlet/link.py:_run": _ITSELF,
    "threadlet/threadlet.py:_call": _ITSELF,
    "train/controller/host_agents.py:_ask": "the agent is gone, which the session reports",
    "trainer_status.py:_beat": "the weaver hears nothing of the replica any more, and says so",
    "weaver_socket/endpoint.py:_answer_until_disconnected": _CONNECTION,
    "weaver_socket/commands.py:_follow": "one command, whose end the page also hears of by its state",
    "workers/end_notice.py:_heed": "what it reads is a pair of sockets: an error is the worker's end",
    "workers/host.py:_end_with_descendants": "it ends the process",
}
"""Loops that nothing starts again, and why."""


Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _modules() -> dict[str, ast.Module]:
    """Return the modules of the product by their paths in their packages."""
    roots = [ROOT / package for package in PACKAGES]
    return {
        str(path.relative_to(root)): ast.parse(path.read_text())
        for root in roots
        for path in sorted(root.rglob("*.py"))
    }


def _functions(tree: ast.AST) -> dict[str, Function]:
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _named(node: ast.AST) -> str:
    match node:
        case ast.Attribute():
            return node.attr
        case ast.Name():
            return node.id
        case ast.Call():
            return _named(node.func)
        case ast.Lambda():
            return _named(node.body)
        case ast.Constant():
            return str(node.value)
    return ""


def _starts(tree: ast.AST) -> Iterator[str]:
    """Yield the name of the function of each thread or task that a module starts."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _named(node.func) not in STARTS:
            continue
        if _named(node.func) == "run" and ast.unparse(node.func) not in ("tasks.run", "self._tasks.run"):
            continue
        targets = [one.value for one in node.keywords if one.arg == "target"] or node.args
        names = [_named(one) for one in targets]
        if names and not GUARDS.intersection(names):
            yield from filter(None, names)


def _loops(function: ast.AST) -> bool:
    """Return whether a function has a loop that ends by itself only when its work is over."""
    nested = {
        below
        for inner in ast.walk(function)
        if inner is not function and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for below in ast.walk(inner)
    }
    return any(isinstance(node, ast.While | ast.AsyncFor) for node in ast.walk(function) if node not in nested)


def _unguarded() -> Iterator[str]:
    for path, tree in _modules().items():
        functions = _functions(tree)
        for name in set(_starts(tree)):
            if name in functions and _loops(functions[name]):
                yield f"{path}:{name}"


def test_a_thread_or_a_task_that_loops_is_started_again_after_an_error() -> None:
    assert sorted(set(_unguarded()) ^ set(ENDS)) == []


def _repeats(part: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield the calls by which a function lets the event loop call it again."""
    for node in ast.walk(part):
        if (
            isinstance(node, ast.Call)
            and _named(node.func) == "call_later"
            and ({ast.unparse(one) for one in node.args} & {name, f"self.{name}"})
        ):
            yield node


def _first(function: Function) -> ast.AST:
    return function.body[1 if ast.get_docstring(function) else 0]


HANDLED = {"driver/session/replies.py:_fail_explained"}
"""It has an end, and handles the errors of what it does."""


def test_what_calls_itself_later_does_so_before_it_does_what_may_fail() -> None:
    late = []
    for path, tree in _modules().items():
        for name, function in _functions(tree).items():
            if any(_repeats(function, name)) and not any(_repeats(_first(function), name)):
                late.append(f"{path}:{name}")
    assert set(late) == HANDLED
