"""Failures in the cluster as a notebook shows them."""

from __future__ import annotations

import linecache
import pickle
from collections.abc import Iterator

import pytest

from loom import remote_traceback
from loom.errors import ActorError, NoSuchMesh, RemoteException
from loom.remote_traceback import HIDDEN, read_frames, show_internal_frames

REMOTE = """\
Traceback of where the remote call failed (most recent call last):
  File "/env/lib/python3.11/site-packages/monarch/_src/actor/actor_mesh.py", line 1822, in handle_sync
    result = the_method(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/srv/gateway/loom_gateway/driver/monarch/endpoint_errors.py", line 77, in call
    result = method(*args, **kwargs)
  File "/tmp/ipykernel_7/1.py", line 3, in boom
  File "/home/u/loom/trainers.py", line 8, in inner
    return values["missing"]
           ~~~~~~^^^^^^^^^^^
KeyError: 'missing'
"""


@pytest.fixture(autouse=True)
def _cell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cell that has run here."""
    source = ["def boom():\n", "    values = {}\n", "    return inner(values)\n", "\n", "class T: ...\n", "x = 1\n"]
    name = "/tmp/ipykernel_7/1.py"
    linecache.cache[name] = (1, None, source, name)
    monkeypatch.setattr(remote_traceback, "_shows_internal", None)
    monkeypatch.delenv("LOOM_INTERNAL_FRAMES", raising=False)
    yield
    linecache.cache.pop(name, None)


def failure(raised: Exception | None = None, place: str = "rank 1 (hosts=0, gpus=1)") -> ActorError:
    error = ActorError(raised or KeyError("missing"), "Actor call trainers.boom failed.", REMOTE)
    error.place = place
    return error


def test_the_first_line_names_the_rank_the_endpoint_and_the_error() -> None:
    first = failure()._render_traceback_()[0]
    assert first == "rank 1 (hosts=0, gpus=1) of trainers.boom: KeyError: 'missing'"
    assert failure(place="")._render_traceback_()[0] == "trainers.boom: KeyError: 'missing'"
    stand_in = RemoteException("trainers.Missing", "no: such key")
    assert failure(stand_in)._render_traceback_()[0].endswith("of trainers.boom: Missing: no: such key")


def test_the_rank_travels_with_the_error() -> None:
    assert pickle.loads(pickle.dumps(failure())).place == "rank 1 (hosts=0, gpus=1)"


def test_users_lines_are_shown_from_the_cell_and_others_from_the_text() -> None:
    lines = failure()._render_traceback_()
    shown = "\n".join(lines)
    assert "monarch" not in shown
    assert "loom_gateway" not in shown
    place = lines.index('  File "/tmp/ipykernel_7/1.py", line 3, in boom')
    assert [line.split()[0] for line in lines[place + 1 : place + 6] if line.split()] == [
        "1",
        "2",
        "---->",
        "4",
        "5",
    ]
    assert '  File "/home/u/loom/trainers.py", line 8, in inner' in lines
    assert '    return values["missing"]' in lines
    assert lines[-1] == HIDDEN


def test_a_file_here_that_differs_from_the_one_there_is_not_shown() -> None:
    remote = 'Traceback:\n  File "/tmp/ipykernel_7/1.py", line 3, in boom\n    something = else_()\nKeyError\n'
    shown = ActorError(KeyError(), "Actor call a.b failed.", remote)._render_traceback_()
    assert "    something = else_()" in shown
    assert not any("return inner" in line for line in shown)


def test_internal_frames_are_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    show_internal_frames()
    shown = "\n".join(failure()._render_traceback_())
    assert "in handle_sync" in shown
    assert HIDDEN not in shown
    show_internal_frames(False)
    monkeypatch.setenv("LOOM_INTERNAL_FRAMES", "1")
    assert HIDDEN in failure()._render_traceback_()
    monkeypatch.setattr(remote_traceback, "_shows_internal", None)
    assert HIDDEN not in failure()._render_traceback_()


def test_an_error_of_the_laptop_shows_where_it_was_called() -> None:
    try:
        raise NoSuchMesh("no mesh")
    except NoSuchMesh as error:
        lines = error._render_traceback_()
    assert lines[0] == "NoSuchMesh: no mesh"
    assert "Called here:" in lines
    assert any('raise NoSuchMesh("no mesh")' in line and "---->" in line for line in lines)
    assert HIDDEN not in lines


def test_text_of_others_obeys_no_terminal() -> None:
    assert "\x1b" not in "\n".join(failure(KeyError("\x1b[2J"), "rank \x1b[31m")._render_traceback_())


def test_frames_of_causes_and_groups_are_found() -> None:
    text = 'x\n  File "a.py", line 1, in f\n    one\n\nThe above\n  | File "b.py", line 2, in g\n    two\n'
    assert [(frame.file, frame.line, frame.function) for frame in read_frames(text)] == [
        ("a.py", 1, "f"),
        ("b.py", 2, "g"),
    ]
