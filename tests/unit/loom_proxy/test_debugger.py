"""What the laptop makes of the debugger's text."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loom.wire.bodies import Debug
from loom_proxy.debugger import Debugger

HERE = "/nowhere/here.py"


class Calls:
    """Answers as a driver that says these pieces, and waits for a line after the last of each list."""

    def __init__(self, *pieces: list[str]) -> None:
        self.progress: bool | None = None
        self.said: list[Any] = []
        self._hears = [(text, text is said[-1], False) for said in pieces for text in said]

    def ask(self, operation: Debug, key: int | None) -> Any:
        if operation.operation == "hear":
            answer: Any = self._hears.pop(0) if self._hears else ("bye\n", False, True)
        else:
            answer = (
                7
                if operation.operation == "enter"
                else self.said.append([operation.operation, *operation.arguments])
            )
        return SimpleNamespace(get=lambda: answer)


@pytest.fixture(autouse=True)
def source() -> Iterator[None]:
    linecache.cache[HERE] = (8, None, ["one\n", "  two\n"], HERE)
    yield
    del linecache.cache[HERE]


def talk(calls: Calls, *lines: str) -> list[str]:
    """The prompts and texts of a talk."""
    seen: list[str] = []
    left = iter(lines)

    def read(prompt: str) -> str:
        seen.append(f"prompt {prompt}")
        return next(left)

    Debugger(calls).interact(read=read, write=seen.append)  # type: ignore[arg-type]
    return seen


def test_the_last_words_before_a_line_are_its_prompt() -> None:
    calls = Calls(["Enter help.\n", "dbg> "], ["x\ndbg> "])

    assert talk(calls, "list", "quit") == ["Enter help.\n", "", "prompt dbg> ", "x\n", "prompt dbg> ", "bye\n"]
    assert calls.said == [["say", 7, "list"], ["say", 7, "quit"], ["leave", 7]]


@pytest.mark.parametrize(
    "pieces",
    [[f"> {HERE}(2)f()\n(Pdb) "], [f"> {HERE}", "(2)f()", "\n", "(Pdb) "], [f"> {HERE}(2)f()\n", "(Pdb) "]],
)
def test_a_line_that_the_process_lacks_is_added_and_its_file_is_sent(pieces: list[str]) -> None:
    calls = Calls(pieces)

    assert "".join(talk(calls, "q")) == f"> {HERE}(2)f()\n-> two\nprompt (Pdb) bye\n"
    assert calls.said[0] == ["show", 7, HERE, "one\n  two\n"]


@pytest.mark.parametrize("text", [f"> {HERE}(2)f()->None\n-> two\n(Pdb) ", "> /nowhere/else.py(2)f()\n(Pdb) "])
def test_nothing_is_sent_of_a_file_that_the_process_has_or_nobody_has(text: str) -> None:
    calls = Calls([text])

    assert "".join(talk(calls, "q")) == text.replace("(Pdb)", "prompt (Pdb)") + "bye\n"
    assert [each[0] for each in calls.said] == ["say", "leave"]


@pytest.mark.guarantees(
    "laptop", "The debugger sends the cluster no file of the laptop but source of the program, or in its folder"
)
@pytest.mark.parametrize("where", ["elsewhere", "here"])
@pytest.mark.parametrize("name", ["key", "id_rsa.pub", "module.py", "link.py"])
def test_a_process_of_the_cluster_gets_no_file_but_source_of_this_program(
    where: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "key").write_text("the secret")
    path = tmp_path / where / name
    path.symlink_to(tmp_path / "key") if name == "link.py" else path.write_text("a line\n")
    monkeypatch.chdir(tmp_path / "here")
    calls = Calls([f"> {path}(1)f()\n(Pdb) "])

    talk(calls, "q")

    sent = [each for each in calls.said if each[0] == "show"]
    assert sent == ([["show", 7, str(path), "a line\n"]] if (where, name) == ("here", "module.py") else [])


def test_what_the_debugger_says_is_fit_for_a_terminal() -> None:
    assert "".join(talk(Calls(["a\x1b[2J\n\x9b1m(Pdb) "]), "q")) == "a\\x1b[2J\nprompt \\x9b1m(Pdb) bye\n"


def test_the_end_of_the_input_leaves_and_progress_is_shown_again() -> None:
    calls = Calls(["dbg> "])
    calls.progress = True

    def read(prompt: str) -> str:
        assert calls.progress is False
        raise EOFError

    Debugger(calls).interact(read=read, write=lambda text: None)  # type: ignore[arg-type]

    assert calls.said == [["leave", 7]]
    assert calls.progress is True
