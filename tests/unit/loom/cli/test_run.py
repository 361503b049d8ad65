"""``loom run``: the name of a run, its environment, and the command in this process's place."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic

import pytest

from loom.cli.run import (
    SITE,
    _checked,
    _find_in_slurm,
    _is_first,
    check_free,
    default_name,
    environment,
    find_weaver,
    start,
)
from loom.errors import WrongArguments
from loom.instrument.training import MAX_RUN_NAME, as_run_name
from loom.slurm.folder import GatewayFacts
from loom.slurm.spec import AllocationSpec
from tests.support.needs import skip_because
from tests.support.paths import ROOT

LOOM = [str(Path(sys.executable).with_name("loom"))]


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOM_AUTO", "LOOM_WEAVER", "LOOM_URL", "LOOM_TOKEN", "LOOM_RUN", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_start_has_an_id_of_its_own_unless_it_has_one_already() -> None:
    first, second = start({}, ["torchrun", "train.py"]), start({}, ["torchrun", "train.py"])
    assert first["LOOM_RUN_ID"] != second["LOOM_RUN_ID"]
    assert json.loads(first["LOOM_RUN_COMMAND"]) == ["torchrun", "train.py"]
    for given in ({"LOOM_RUN_ID": "mine"}, {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}):
        assert "LOOM_RUN_ID" not in start(given, ["train"])
    assert "LOOM_RUN_ID" in start({"SLURM_JOB_ID": "1"}, ["train"])
    assert start({}, ["x" * 20_000]).keys() == {"LOOM_RUN_ID"}


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 0.1", "train"),
        ("torchrun --nproc-per-node 2 scripts/train_gpt.py config.py", "train_gpt"),
        ("python -m torch.distributed.run --nproc-per-node 2 fit.py", "fit"),
        ("torchrun -m project.train", "train"),
        ("python -m project.__main__", "project"),
        ("accelerate launch --num_processes 2 run me.py", "me"),
        ("bash start.sh", "start"),
        ("/usr/bin/trainer --x", "trainer"),
    ],
)
def test_a_run_is_named_after_its_script(command: str, name: str) -> None:
    assert default_name(command.split(" ")) == name


@pytest.mark.parametrize("name", ["", "a b", "x*", "a/b", "[x]", "a\nb", "x" * 191, "x" * 201])
def test_a_name_that_a_target_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(WrongArguments, match="--name"):
        _checked(name)


@pytest.mark.parametrize("name", ["a b", "*", "[ab]", "../etc", "tab\tname", "\u202eevil", "x" * 300, ""])
def test_the_name_that_a_variable_or_a_script_gives_becomes_one_that_a_target_can_have(name: str) -> None:
    assert _checked(as_run_name(name))
    assert len(f"{as_run_name(name)}_{10**8}") <= 200
    assert as_run_name("naïve-模型.2") == "naïve-模型.2"
    assert len(as_run_name("x" * 300)) == MAX_RUN_NAME


def test_nothing_of_the_users_path_is_removed() -> None:
    made = environment({"PYTHONPATH": f"a{os.pathsep}b"}, "tcp://h:1/k", "fit")

    assert made == {
        "LOOM_WEAVER": "tcp://h:1/k",
        "LOOM_RUN": "fit",
        "PYTHONPATH": f"{SITE}{os.pathsep}a{os.pathsep}b",
    }
    assert environment({}, "w", "fit")["PYTHONPATH"] == str(SITE)
    assert environment({}, "", "fit") == {"LOOM_AUTO": "1", "LOOM_RUN": "fit", "PYTHONPATH": str(SITE)}
    assert environment(made, "w", "fit")["PYTHONPATH"] == made["PYTHONPATH"]


@pytest.mark.parametrize(
    ("variables", "command", "first"),
    [
        ({}, "torchrun train.py", True),
        ({"RANK": "0"}, "python train.py", True),
        ({"SLURM_PROCID": "3"}, "python train.py", False),
        ({}, "torchrun --nnodes 2 --node_rank 1 train.py", False),
        ({}, "torchrun --nnodes=2 --node-rank=0 train.py", True),
        ({}, "torchrun --nnodes 2 --master-addr h train.py", True),
        ({}, "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint h:29400 train.py", False),
        ({}, "torchrun --nnodes=1:4 --rdzv_endpoint=h:29400 train.py", False),
        ({}, "torchrun --nnodes=2 --rdzv_endpoint=h:29400 --node_rank 0 train.py", True),
        ({}, "torchrun --nproc-per-node 2 --rdzv-endpoint localhost:0 train.py", True),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "h:29400"}, "torchrun train.py", False),
    ],
)
def test_only_the_first_process_of_a_job_asks_for_the_name(
    variables: dict[str, str], command: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert _is_first(command.split()) is first


def loom_run(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    arguments = [*LOOM, "run", *command]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_without_a_weaver_it_says_so_and_runs(config: Path) -> None:
    done = loom_run(["--", "sh", "-c", "cat; echo done; exit 7"], input="given ")

    assert (done.stdout, done.returncode) == ("given done\n", 7)
    assert done.stderr.startswith("loom run: nothing to report to")


def test_a_gateway_that_is_away_does_not_keep_it_from_running(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOM_URL", "ws://127.0.0.1:1")

    done = loom_run(["true"])

    assert done.returncode == 0
    assert "cannot report to ws://127.0.0.1:1 (from LOOM_URL)" in done.stderr


ANSWERS = {
    "nothing": (b"", b""),
    "a byte now and then": (b"", b"H"),
    "a body byte by byte": (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"t"),
    "garbage": (bytes(range(255, 0, -1)) * 9, b""),
    "a frame byte by byte": (b"\0\1\0\0", b"x"),
    "an end": (None, b""),
}


@contextlib.contextmanager
def listener(kind: str) -> Iterator[str]:
    """An address at which something answers that is neither a gateway nor a weaver."""
    first, then = ANSWERS[kind]
    ended = threading.Event()

    def answer(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            if first is not None:
                sock.recv(1 << 16)
                sock.sendall(first)
                while not ended.wait(0.02):
                    sock.sendall(then)

    def accept(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threads.append(threading.Thread(target=answer, args=(listening.accept()[0],)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads = [threading.Thread(target=accept, args=(listening,))]
        threads[0].start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("kind", ANSWERS)
def test_whatever_answers_the_command_starts_in_time(
    kind: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with listener(kind) as address:
        monkeypatch.setenv("LOOM_URL", f"ws://{address}")
        assert find_weaver(monotonic() + 0.5) == ""
        check_free(f"tcp://{address}/k", "fit", monotonic() + 0.5)

    assert capsys.readouterr().err.startswith(f"loom run: it cannot report to ws://{address} (from LOOM_URL): ")


def made_gateway(root: Path, name: str, job: int, **asked: bool) -> None:
    (root / name).mkdir(parents=True)
    (root / name / "spec.json").write_text(AllocationSpec(**asked).to_json())
    (root / name / "gateway.json").write_text(GatewayFacts("127.0.0.1", 1, job).to_json())


def test_in_a_job_of_slurm_it_reports_to_the_users_only_gateway_there(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOM_URL", "")  # which is set below
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("LOOM_SLURM_FOLDER", str(tmp_path / "slurm"))
    queue = tmp_path / "squeue"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert _find_in_slurm() is None
    made_gateway(tmp_path / "slurm", "one", 1)
    assert str(_find_in_slurm()).startswith("slurm://one")

    monkeypatch.setenv("LOOM_URL", "")
    made_gateway(tmp_path / "slurm", "two", 2)
    assert find_weaver(monotonic() + 60.0) is None
    assert capsys.readouterr().err == (
        "loom run: it cannot report: you have 2 gateways in Slurm, slurm://one and slurm://two: name one, such as "
        "by `export LOOM_URL=slurm://one` in the batch script\n"
    )
    queue.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo slurm 21.08.8\n'
        "echo '2|RUNNING|ada|main|(null)|1|N/A|N/A|1700000000|10:00|n1|None|two'\n"
    )
    queue.chmod(0o755)
    assert str(_find_in_slurm()).startswith("slurm://two")  # the node of the other one was lost

    made_gateway(tmp_path / "slurm", "watch", 3, gateway_only=True)
    monkeypatch.setenv("LOOM_URL", "")
    assert str(_find_in_slurm()).startswith("slurm://watch")


PLACES = {
    "LOOM_TOKEN": "a\nb",
    "XDG_CONFIG_HOME": "/etc/passwd",
    "LOOM_URL": "nonsense",
    "LOOM_CA": "/no/such/file",
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_to_report_to_that_makes_no_sense_is_told(
    name: str, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "XDG_CONFIG_HOME":
        monkeypatch.setenv("LOOM_URL", "wss://127.0.0.1:1" if name == "LOOM_CA" else "ws://127.0.0.1:1")
    monkeypatch.setenv(name, PLACES[name])

    done = loom_run(["echo", "started"])

    assert (done.stdout, done.returncode) == ("started\n", 0)
    assert done.stderr.startswith("loom run: it cannot report")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_command_starts_with_closed_streams(closed: Sequence[int], config: Path) -> None:
    shut = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(["sh", "-c", f'"{LOOM[0]}" run sh -c "exit 3" {shut}'], timeout=60)

    assert done.returncode == 3


def test_a_script_without_an_interpreter_runs_as_a_shell_runs_it(config: Path, tmp_path: Path) -> None:
    (tmp_path / "start").write_text('echo "$1"; exit 5\n')
    (tmp_path / "start").chmod(0o755)

    for command in (str(tmp_path / "start"), "start"):
        done = loom_run([command, "given"], env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
        assert (done.stdout, done.returncode) == ("given\n", 5)


def test_a_user_without_a_home_runs_a_command(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))

    assert find_weaver(monotonic() + 10) is None


READ_ONLY = """
for place in $(cut -d' ' -f2 /proc/mounts); do
    case $place in /proc*|/sys*|/dev*) ;; *) mount -o remount,bind,ro "$place";; esac
done
exec "$@"
"""

A_STEP = """
import loom, tempfile
try:
    open(".probe", "w")
except OSError as error:
    print(error.strerror)
with loom.Threadlet("train_0") as threadlet:
    with threadlet.step(1) as step:
        step.metrics["loss"] = 0.5
print("trained")
"""


def test_where_nothing_can_be_written_a_training_runs_as_ever(config: Path) -> None:
    if (
        not shutil.which("unshare")
        or subprocess.run(["unshare", "--mount", "true"], stderr=subprocess.DEVNULL).returncode
    ):
        skip_because("this user makes no file system read-only with unshare --mount")
    inside = ["unshare", "--mount", "sh", "-ec", READ_ONLY, "sh"]
    done = subprocess.run(
        [*inside, *LOOM, "run", sys.executable, "-c", A_STEP], capture_output=True, text=True, timeout=60
    )

    assert (done.stdout, done.returncode) == ("Read-only file system\ntrained\n", 0), done.stderr
    assert done.stderr.startswith("loom run: nothing to report to")
    assert done.stderr.count("\n") == 1


def test_a_command_that_cannot_be_started_is_reported_as_by_a_shell(config: Path) -> None:
    assert loom_run(["no-such-program"]).returncode == 127
    assert loom_run([""]).returncode == 127
    done = loom_run(["/etc/passwd"])
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        126,
        "loom run: cannot run /etc/passwd: Permission denied",
    )


def test_a_wrong_address_is_an_error_that_hides_the_key(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOM_WEAVER", "http://host/secret")

    done = loom_run(["true"])

    assert done.returncode != 0
    assert "secret" not in done.stderr


def site_run(code: str, *, path: str = "", options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python as a command of ``loom run`` does."""
    variables = environment({"PYTHONPATH": path}, "tcp://127.0.0.1:1/k", "fit")
    return subprocess.run(
        [sys.executable, *options, "-c", code, "argument"],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=60,
    )


def test_a_program_finds_its_own_path_and_modules() -> None:
    code = "import sys; print(sys.path, sys.argv, [n for n in sys.modules if 'torch' in n or n == 'threading'])"
    plain = subprocess.run([sys.executable, "-c", code, "argument"], capture_output=True, text=True, timeout=60)

    assert site_run(code).stdout == plain.stdout


def test_the_users_own_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nprint('mine', __file__)\n")

    done = site_run("import sitecustomize; print(sitecustomize.__file__)", path=str(tmp_path))

    assert done.stdout == f"mine {tmp_path}/sitecustomize.py\n{tmp_path}/sitecustomize.py\n"


def test_a_sitecustomize_that_raises_is_reported_as_without_loom(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('broken')\n")
    plain = subprocess.run(
        [sys.executable, "-c", "print(1)"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        timeout=60,
    )

    done = site_run("print(1)", path=str(tmp_path))

    assert (done.stdout, done.stderr) == (plain.stdout, plain.stderr)


def test_a_python_without_loom_runs_as_ever() -> None:
    code = "import sys; print([path for path in sys.path if 'loom' in path and 'site' in path])"

    done = site_run(code, options=["-S"])  # as one that has no packages

    assert (done.returncode, done.stderr) == (0, "")
    hidden = subprocess.run(
        [sys.executable, "-c", "import sys; print(sys.path)"],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{SITE}", "PYTHONHOME": sys.base_prefix, "PATH": os.environ["PATH"]},
        timeout=60,
    )
    assert (hidden.returncode, hidden.stderr) == (0, "")
    assert str(SITE) not in hidden.stdout


def make_torch(folder: Path) -> None:
    """Make a stand-in of torch, whose import takes no time."""
    (folder / "torch" / "optim").mkdir(parents=True)
    for file in ("torch/__init__.py", "torch/optim/__init__.py", "torch/optim/optimizer.py"):
        (folder / file).touch()


def test_a_python_without_loom_that_trains_says_that_it_takes_no_part(tmp_path: Path) -> None:
    make_torch(tmp_path)
    (tmp_path / "loom_auto.py").write_text("raise ImportError('there is none')\n")
    own = {**os.environ, "PYTHONPATH": f"{SITE}:{tmp_path}"}

    for code, said in (("import torch.optim, torch.optim; print(1)", 1), ("print(1)", 0)):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=own, timeout=60)
        assert (done.stdout, done.stderr.count("its trainings are not reported")) == ("1\n", said)


RUN = {"LOOM_RUN": "fit", "LOOM_WEAVER": "tcp://127.0.0.1:1/k"}

STEPS_BACK = "Loom steps back: the program has a module of its own named 'loom'"

TRAINS = "import torch.optim.optimizer\nimport loom\nprint(loom.__file__, loom.mine)\n"

MINE = "mine = 'mine'\nprint('imported')\n"

TREES: dict[str, tuple[dict[str, str], list[str]]] = {
    "a module": ({"loom.py": MINE, "train.py": TRAINS}, ["train.py"]),
    "a package": ({"loom/__init__.py": MINE, "train.py": TRAINS}, ["train.py"]),
    "imported first": ({"loom.py": MINE, "train.py": f"import loom\n{TRAINS}"}, ["train.py"]),
    "by its module": ({"loom.py": MINE, "train.py": TRAINS}, ["-m", "train"]),
    "by its text": ({"loom.py": MINE}, ["-c", TRAINS]),
    "the script": ({"loom.py": "mine = 1\nif __name__ == '__main__': import t\n", "t.py": TRAINS}, ["loom.py"]),
    "by an entry point": ({"loom.py": MINE, "train.py":
                          f"{TRAINS}import loom_auto\nprint(loom_auto.lightning_callbacks())\n"}, ["train.py"]),
    "made by hand": ({"train.py": "import sys, types\nloom = sys.modules['loom'] = types.ModuleType('loom')\n"
                                  f"loom.mine = loom.__file__ = 1\n{TRAINS}"}, ["train.py"]),
    "which ends": ({"loom.py": "import sys\nsys.exit('not a module')\n", "train.py": TRAINS}, ["train.py"]),
    "a child": ({"loom.py": MINE, "train.py":
                 "import multiprocessing\n"
                 "def f():\n    import loom; print(loom.mine, flush=True)\n"
                 "if __name__ == '__main__':\n"
                 "    import torch.optim.optimizer\n"
                 "    child = multiprocessing.get_context('spawn').Process(target=f)\n"
                 "    child.start(); child.join()\n"},
                ["train.py"]),
}  # fmt: skip
"""Programs that have a module named loom: their files, and the arguments of Python."""


@pytest.mark.parametrize(
    ("kind", "start", "path"),
    [
        *((kind, ("loom run", "LOOM_AUTO")[number % 2], "") for number, kind in enumerate(TREES)),
        ("a module", "LOOM_AUTO", "."),
        ("a module", "loom run", "."),
    ],
)
def test_a_programs_own_module_named_loom_is_its_own(
    kind: str, start: str, path: str, tmp_path: Path, config: Path
) -> None:
    files, arguments = TREES[kind]
    make_torch(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    own = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    plain = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=own, timeout=60)

    line = [*LOOM, "run", *command] if start == "loom run" else command
    given = {"LOOM_WEAVER": RUN["LOOM_WEAVER"], "LOOM_AUTO": "" if start == "loom run" else "1"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env={**own, **given}, timeout=60)

    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode)
    said = [one for one in done.stderr.splitlines(keepends=True) if not one.startswith(STEPS_BACK)]
    assert "".join(said) == plain.stderr
    assert done.stderr.count("\n") == len(said) + 1


@pytest.mark.parametrize(
    ("variables", "options", "hooked"),
    [
        ({"LOOM_AUTO": "1"}, [], True),
        ({"LOOM_AUTO": "1"}, ["-I"], True),
        ({"LOOM_AUTO": ""}, [], False),
        ({"LOOM_AUTO": "0"}, [], False),
        ({"LOOM_RUN": "fit"}, [], False),
        (RUN, [], True),  # a script of the command's has set another PYTHONPATH
        (RUN, ["-E"], False),
        (RUN, ["-I"], False),
        ({**RUN, "LOOM_AUTO": "0"}, [], False),
    ],
)
def test_the_line_that_python_reads_at_its_start(
    variables: dict[str, str], options: list[str], hooked: bool
) -> None:
    line = (ROOT / "loom" / "loom_auto.pth").read_text()
    assert line.startswith("import ")  # else Python takes it for a folder
    assert line.count("\n") == 1
    # Python reads the installed line too, which may be that of another version: not with -S.
    path = next(path for path in sys.path if path.endswith("site-packages"))
    code = f"import sys; sys.path += {[path, str(ROOT / 'loom')]!r}; exec({line!r}); "
    code += "print('loom.instrument.bootstrap' in sys.modules)"

    done = subprocess.run(
        [sys.executable, "-S", *options, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        timeout=60,
    )

    assert (done.stdout, done.stderr) == (f"{hooked}\n", "")


def test_nothing_is_asked_when_the_time_to_ask_is_over(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_weaver(monotonic() - 4) == ""
    assert "cannot report: no answer within 5 s" in capsys.readouterr().err
