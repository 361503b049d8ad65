import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loom.tracing import clock, configure, current_trace, encoding, event, files, flush, span, trace
from loom.tracing.files import EventFile
from loom.tracing.lines import parse_line
from loom.tracing.spans import listen, recorder


@pytest.fixture(autouse=True)
def fresh():
    yield
    recorder.set_folder(None)
    recorder.lines = False
    recorder.role = None
    recorder.refresh()


def written() -> list[dict]:
    flush()
    return [json.loads(line) for line in recorder.file.path.read_text().splitlines()]


@pytest.fixture
def seen():
    records = []
    end = listen(records.append)
    yield records
    end()


def test_an_event_has_the_names_of_the_contract(tmp_path):
    configure(folder=tmp_path / "timing", role="trainer")

    with trace("abc") as id:
        event("load", rows=3)

    (record,) = written()
    assert id == "abc"
    assert list(record) == ["name", "t", "time", "host", "pid", "role", "trace", "rows"]
    assert (record["name"], record["pid"], record["role"], record["trace"]) == (
        "load",
        os.getpid(),
        "trainer",
        "abc",
    )
    assert abs(record["t"] - clock.now()) < 60


def test_files_are_their_users_alone(tmp_path):
    configure(folder=tmp_path / "timing")
    event("load")
    flush()
    assert stat.S_IMODE((tmp_path / "timing").stat().st_mode) == 0o700
    assert stat.S_IMODE(recorder.file.path.stat().st_mode) == 0o600


def test_a_span_says_how_long_and_in_what(seen):
    with trace("abc"), span("outer", a=1) as outer:
        with span("inner") as inner:
            inner.set(b=2)

    assert [record["name"] for record in seen] == ["inner", "outer"]
    assert seen[0]["parent"] == seen[1]["span"]
    assert seen[1]["parent"] is None
    assert seen[0]["b"] == 2
    assert seen[1]["dur_ms"] == round(outer.dur_ms, 4) >= seen[0]["dur_ms"] >= 0
    assert outer.trace == "abc"


def test_an_exception_is_recorded_and_raised(seen):
    with pytest.raises(KeyError), span("load"):
        raise KeyError("x")
    assert seen[0]["error"] == "KeyError"


def test_a_span_knows_its_time_when_nothing_listens():
    with span("load") as load:
        pass
    assert load.dur_ms >= 0


def test_a_new_trace_is_six_hexadecimal_digits_and_ends_with_its_block():
    assert current_trace() is None
    with trace() as id:
        assert current_trace() == id
        assert len(id) == 6
        assert int(id, 16) >= 0
    assert current_trace() is None


@pytest.mark.parametrize("id", ["", "x" * 65, "a b", "a\nb", "]x", "é", "-a"])
def test_what_is_no_trace_id_is_refused(id, seen):
    with pytest.raises(ValueError, match="trace id"), trace(id):
        pass
    event("load", trace=id)
    assert seen[0]["trace"] is None


def test_lines_go_to_stdout(capfd):
    configure(lines=True)
    event("ckpt.write.done", step=3, write_ms=234.5)
    event("load", rows=3)
    event("weights.rpc.start", trace="abc", op="update_weights")
    flush()
    first, second = capfd.readouterr().out.splitlines()
    assert first == "[ckpt] write.done step=3 write_ms=234.5"
    assert abs(parse_line(second).fields["t"] - clock.now()) < 60


@pytest.mark.guarantees(
    "tracing", "A full disk, a closed output or a collector that is away costs events and nothing else"
)
def test_a_closed_stdout_ends_the_lines_only(monkeypatch, seen):
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(sys, "stdout", closed)
    configure(lines=True)
    event("ckpt.wait.start", target_step=1)
    event("ckpt.wait.start", target_step=2)
    flush()
    assert len(seen) == 2
    assert not recorder.lines


def test_the_environment_says_where(tmp_path):
    code = "import loom.tracing as t; t.event('ckpt.wait.start', target_step=1)"
    environment = {
        **os.environ,
        "LOOM_TIMING_DIR": str(tmp_path),
        "LOOM_TIMING_LINES": "1",
        "LOOM_TIMING_ROLE": "x",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout == "[ckpt] wait.start target_step=1\n"
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["role"] == "x"


def test_a_file_is_rotated_and_bounded(tmp_path):
    file = EventFile(tmp_path, max_bytes=1000)
    for i in range(200):
        file.append([files.encode({"name": "load", "i": i})])
    file.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    lines = (file.path.with_suffix(".1.jsonl").read_text() + file.path.read_text()).splitlines()
    assert [json.loads(line)["i"] for line in lines] == list(range(200 - len(lines), 200))


@pytest.mark.guarantees(
    "tracing", "A full disk, a closed output or a collector that is away costs events and nothing else"
)
def test_a_full_disk_is_counted_and_said_once(caplog):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    file = EventFile("/dev")
    file._descriptor, file._pid = os.open("/dev/full", os.O_WRONLY), os.getpid()
    file.append(["a\n"])
    file.append(["b\n", "c\n"])
    file.close()
    assert file.lost == 3
    assert len(caplog.records) == 1


def test_a_disk_that_fills_cuts_off_one_line_and_counts_what_follows(monkeypatch, tmp_path):
    file = EventFile(tmp_path)
    rest = [5, 0, 100]
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: rest.pop(0)]))
    file.append(["one\n", "two\n", "three\n"])
    file.append(["four\n"])
    file.append(["five\n"])
    assert file.path.read_text() == "one\nt\nfive\n"
    assert file.lost == 3


def test_many_lines_at_once_are_rotated_and_bounded(tmp_path):
    file = EventFile(tmp_path, max_bytes=1000)
    file.append([f"{i:04}\n" for i in range(1000)])
    file.close()
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert file.path.read_text().splitlines() == [f"{i:04}" for i in range(800, 1000)]
    assert file.lost == 0


def test_a_folder_that_cannot_be_made_loses_events_and_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    configure(folder=tmp_path / "file" / "folder")
    event("load")
    event("load")
    flush()
    assert recorder.file.lost == 2
    assert len(caplog.records) == 1


def test_a_file_that_is_a_link_is_not_followed(tmp_path):
    file = EventFile(tmp_path)
    file.path.symlink_to(tmp_path / "other")
    file.append(["a\n"])
    assert file.lost == 1
    assert not (tmp_path / "other").exists()


def test_what_json_does_not_have_is_text(tmp_path):
    configure(folder=tmp_path)
    circle = []
    circle.append(circle)
    event("load", path=tmp_path, circle=None)
    event("load", circle=circle)
    (record,) = written()
    assert record["path"] == str(tmp_path)
    assert recorder.file.lost == 1


FLAT = (
    {},
    {"path": '/é\u2028\x1f"', "rows": 10**30, "tiny": 1e-7, "large": 1e300, "all": True, "none": None, "é": -0.0},
    {"half": "\ud800"},
)
OTHERS = (
    {"lost": float("nan")},
    {"wall_ms": float("-inf"), "half": "\ud800"},
    {"path": Path("/é"), "rows": [1, True, {"a": 0.5}], "raw": b"\xff", "ids": {3}},
)


@pytest.mark.parametrize("fields", [*FLAT, *OTHERS])
def test_a_record_reads_the_same_whatever_encodes_it(monkeypatch, tmp_path, fields):
    configure(folder=tmp_path, role='a"b')
    event("load", **fields)
    (said,) = written()
    record = {
        "name": "load", "t": said["t"], "time": said["time"], "host": files.HOST, "pid": os.getpid(),
        "role": 'a"b', "trace": None, **fields,
    }  # fmt: skip
    monkeypatch.setattr("json.encoder.c_make_encoder", None)

    assert (
        repr(said) == repr(json.loads(files._any_encoder()(record))) == repr(json.loads(files._encode_any(record)))
    )
    lines = encoding.encode("load", 1.0, 2.0, files.who(1, None), "abc", fields, False)
    assert (lines is None) == (fields in OTHERS)


def test_a_field_may_replace_the_time_and_the_role(tmp_path):
    configure(folder=tmp_path, role="trainer")
    event("load", t=0.5, role="generator")
    event("load", t=2)
    event("load", t=float("inf"))
    first, second, third = written()
    assert (first["t"], first["role"]) == (0.5, "generator")
    assert (second["t"], third["t"]) == (2, float("inf"))


def test_a_process_that_is_killed_has_written_what_it_recorded_a_second_ago(tmp_path):
    code = f"""
import time
from loom.tracing import configure, event
configure(folder={str(tmp_path)!r}, lines=True)
for step in range(3): event("ckpt.write.done", step=step, write_ms=234.5)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline() for _ in range(3)]  # the lines are written after the file
        process.kill()
    (file,) = tmp_path.iterdir()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 2]
    assert said == [f"[ckpt] write.done step={step} write_ms=234.5\n" for step in range(3)]


@pytest.mark.parametrize("last", ["pass", "sys.exit(1)", "1 / 0", "event('last', step=3); flush(); os._exit(1)"])
def test_a_process_that_ends_has_written_all(tmp_path, last):
    code = f"""
import atexit, os, sys
from loom.tracing import configure, event, flush
atexit.register(event, "last", step=3)
configure(folder={str(tmp_path)!r})
for step in range(3): event("ckpt.write.done", step=step, write_ms=234.5)
{last}
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    (file,) = tmp_path.iterdir()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_multiprocessing_has_written_all(tmp_path, method):
    code = f"""
import multiprocessing
from loom.tracing import configure, event
def work(): event("load", rows=3)
if __name__ == "__main__":
    event("before")
    process = multiprocessing.get_context({method!r}).Process(target=work)
    process.start()
    process.join()
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    environment = {**os.environ, "LOOM_TIMING_DIR": str(tmp_path / "timing")}
    subprocess.run([sys.executable, "-W", "ignore", script], env=environment, check=True)
    texts = [file.read_text() for file in (tmp_path / "timing").iterdir()]
    found = [[json.loads(line)["name"] for line in text.splitlines()] for text in texts]
    assert sorted(found) == [["before"], ["load"]]


def test_many_threads_lose_nothing_and_write_each_event_once(tmp_path):
    configure(folder=tmp_path)

    def many(of: int) -> None:
        for number in range(2000):
            event("load", number=of * 2000 + number)
            if number % 500 == 0:
                flush()

    threads = [threading.Thread(target=many, args=(of,)) for of in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(record["number"] for record in written()) == list(range(8000))


def test_what_changes_after_its_event_is_written_as_it_was(tmp_path):
    configure(folder=tmp_path)
    rows = [1]
    event("load", rows=rows)
    rows.append(2)
    assert written()[0]["rows"] == [1]


def test_a_name_that_is_no_text_costs_its_event_only(tmp_path):
    configure(folder=tmp_path, lines=True)
    event("first")
    event(["load"])
    event("second")
    assert [record["name"] for record in written()] == ["first", "second"]
    assert recorder.file.lost == 1


def test_a_record_leaves_a_generator_as_it_is(tmp_path):
    configure(folder=tmp_path)
    rows = iter(range(3))
    event("load", rows=rows)
    assert list(rows) == [0, 1, 2]


def test_a_forked_process_has_a_file_and_span_ids_of_its_own(tmp_path):
    code = f"""
import os
from loom.tracing import configure, span
configure(folder={str(tmp_path)!r})
with span("parent"): pass
child = os.fork()
with span("after"): pass
if child: os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    records = [[json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()]
    assert sorted(len(lines) for lines in records) == [1, 2]
    ids = [record["span"] for lines in records for record in lines]
    assert len(set(ids)) == 3


def test_a_field_replaces_nothing_that_says_what_and_where(seen):
    event("load", name="x", host="y", rows=3)
    assert (seen[0]["name"], seen[0]["name_"], seen[0]["host_"], seen[0]["rows"]) == ("load", "x", "y", 3)
