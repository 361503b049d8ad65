"""`Allocation`: a submitted allocation, found again by its name in the user's home on the cluster."""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from loom.errors import AllocationFailed, LoomError, NameTaken, NotFound, Unavailable, WrongArguments
from loom.process.backoff import Backoff
from loom.slurm.folder import GATEWAY, GROWN, JOBS, LOG, SCRIPT, SPEC, STATE, TOKEN, WORKERS, GatewayFacts
from loom.slurm.login import LocalLogin, Login
from loom.slurm.queue import QueuedJob, QueueState, Slurm, explain
from loom.slurm.script import batch_script
from loom.slurm.spec import NAME, AllocationSpec, check_name, rest_of_array
from loom.token_file import generate_token

logger = logging.getLogger("loom.slurm")

POLL = Backoff(0.5, 5.0)
"""Seconds between two looks at a job that waits for its nodes."""

STARTING_POLL = 0.5
"""Seconds between two looks at a job that runs, and whose gateway does not answer yet."""

LASTING = 2
"""Looks in a row at which a job waits for a reason that does not pass, until it counts as one that never starts."""

END_TIMEOUT = 90.0
"""Seconds that `Allocation.end` waits for Slurm to end the jobs: longer than ``KillWait``, usually 30."""

SHOWN_LINES = 8
"""Lines of a log that an error shows."""

_ROOT = 'printf %s "${LOOM_SLURM_FOLDER:-$HOME/.loom/slurm}"'

_PREPARE = f"""
umask 077
mkdir -p -- "$1" || exit 1
chmod 700 -- "$1" || exit 1
cd -- "$1" || exit 1
mkdir -p -- "$2/{WORKERS}" "$2/{LOG}" "$2/{STATE}" || exit 1
chmod 700 -- "$2" || exit 1
if [ -s "$2/{TOKEN}" ]; then exit 0; fi
cat >"$2/{TOKEN}.new" && [ -s "$2/{TOKEN}.new" ] && mv -- "$2/{TOKEN}.new" "$2/{TOKEN}"
"""

_APPEND = """
umask 077
grep -qx -- "$2" "$1" 2>/dev/null || printf '%s\\n' "$2" >>"$1"
"""

_CLAIM = 'if [ -d "$2" ]; then exit 0; fi; mv -T -- "$1" "$2" 2>/dev/null || [ -d "$2" ]'

_LIST = f"""
[ -e "$1" ] || exit 0
cd -- "$1" || exit 1
for ids in */{JOBS}; do
    [ -f "$ids" ] || continue
    folder=${{ids%/*}}
    grown=$(cat "$folder/{GROWN}" 2>/dev/null)
    printf '%s\\t%s\\t%s\\n' "$folder" "$(cat "$ids" | tr '\\n' ' ')" "$(printf %s "$grown" | tr '\\n' ' ')"
done
"""

_LAST_LINES = f"""
cd -- "$1" || exit 1
lines=$2
node=$3
shift 3
for log in "$@" {LOG}/$node.log; do
    [ -s "$log" ] || continue
    printf '==> %s <==\\n' "$log"
    tail -n "$lines" -- "$log"
done
"""


Tell = Callable[[str], object]
"""Gets a sentence for the user whenever there is news."""


@dataclass(frozen=True)
class ListedAllocation:
    """An allocation in the user's home, with the job that it has now; None if Slurm has forgotten it."""

    name: str
    job_ids: tuple[int, ...]
    grown_ids: tuple[int, ...]
    job: QueuedJob | None

    @property
    def lives(self) -> bool:
        return self.job is not None and not self.job.state.is_over


class Allocation:
    """A submitted allocation of this user's.

    Its folder on the cluster's shared home has the token and what the nodes write; see `loom.slurm.folder`.
    """

    def __init__(self, slurm: Slurm, name: str, folder: str, job_ids: Sequence[int]) -> None:
        self.slurm = slurm
        self.name = name
        self.folder = folder
        """Its absolute path on the cluster."""
        self._job_ids = list(job_ids)

    @property
    def login(self) -> Login:
        return self.slurm.login

    @property
    def job_id(self) -> int:
        """The id of its newest job."""
        return self._job_ids[-1]

    @classmethod
    def find(cls, login: Login, name: str) -> Allocation:
        """Return the allocation of a name, whether it lives or not; nobody but its user can.

        Raises:
            NotFound: there is none of the name.
        """
        if not NAME.fullmatch(name):
            check_name(name)
        folder = f"{root_of(login)}/{name}"
        try:
            ids = _numbers(login.read(f"{folder}/{JOBS}").decode())
        except FileNotFoundError:
            known = ", ".join(sorted(entry[0] for entry in _entries(login))) or "none"
            raise NotFound(
                f"there is no allocation {name!r} in {root_of(login)} on {login.name}; there are: {known}",
                code="unknown_allocation",
            ) from None
        return cls(Slurm(login), name, folder, ids)

    @classmethod
    def submit(cls, slurm: Slurm, spec: AllocationSpec, tell: Tell = lambda text: None) -> Allocation:
        """Submit an allocation, and return it as soon as Slurm has given it an id.

        Raises:
            NameTaken: an allocation of the name lives.
            AllocationFailed: Slurm refused, in its words; or the home has no room.
            MissingDependency: there is no Slurm on the login node.
        """
        login = slurm.login
        slurm.version()
        python, spec = _python(login, spec), _with_wheels(login, spec)
        root = root_of(login)
        if spec.name is not None:
            _check_free(slurm, spec.name)
        new = spec.name or f".new-{secrets.token_hex(6)}"
        _prepare(login, root, new)
        unnamed = "" if spec.name else new
        script = batch_script(replace(spec, array=None), root, python, ids=JOBS, new=unnamed)
        login.write(f"{root}/{new}/{SPEC}", spec.to_json().encode())
        login.write(f"{root}/{new}/{SCRIPT}", script.encode())
        try:
            job_id = _submitted(slurm, script, spec.name or f"loom{new}", tell)
        except LoomError:
            if unnamed:
                login.run(["rm", "-r", "--", f"{root}/{new}"])
            raise
        name = spec.name or f"loom-{job_id}"
        if unnamed:
            _shell(login, _CLAIM, f"{root}/{new}", f"{root}/{name}")
            slurm.rename(job_id, name)
        allocation = cls(slurm, name, f"{root}/{name}", [job_id])
        _shell(login, _APPEND, f"{allocation.folder}/{JOBS}", str(job_id))
        _withdraw_if_taken(allocation)
        if spec.array is not None and (others := rest_of_array(spec.array)) is not None:
            try:
                allocation.grow(spec.nodes, spec, tell, others)
            except BaseException:
                slurm.cancel(job_id)
                raise
        return allocation

    def grow(
        self,
        nodes: int,
        spec: AllocationSpec | None = None,
        tell: Tell = lambda text: None,
        array: str | None = None,
    ) -> int:
        """Submit a job that brings further workers to the gateway of this one; return its id.

        Args:
            nodes: how many.
            spec: what to ask Slurm for; by default what this allocation was asked for.
            array: several such jobs, as ``sbatch --array`` takes them.
        """
        asked = spec or self.spec()
        spec = replace(asked, nodes=nodes, array=array, meshes={}, chain=1, gateway_only=False)
        login, root = self.login, self.folder.rpartition("/")[0]
        script = batch_script(spec, root, _python(login, spec), ids=GROWN, name=self.name, arguments=" --grown")
        job_id = _submitted(self.slurm, script, self.name, tell)
        _shell(login, _APPEND, f"{self.folder}/{GROWN}", str(job_id))
        return job_id

    def spec(self) -> AllocationSpec:
        """Return what was asked for."""
        return AllocationSpec.from_json(self._read(SPEC) or "{}")

    def token(self) -> str:
        """Return the token of its gateway."""
        token = self._read(TOKEN)
        if not token:
            raise AllocationFailed(f"the allocation {self.name} has no token in {self.folder} on {self.login.name}")
        return token.strip()

    def gateway(self) -> GatewayFacts | None:
        """Return where its gateway listens; None if it does not, as before its start and during a requeue."""
        text = self._read(GATEWAY)
        try:
            return GatewayFacts.from_json(text) if text else None
        except (ValueError, TypeError):
            return None

    def job(self) -> QueuedJob | None:
        """Return the job that it has now, after it has looked for successors; None if Slurm has forgotten it."""
        self._job_ids = _numbers(self._read(JOBS) or "") or self._job_ids
        return _current(self.slurm.jobs(ids=self._job_ids)) or self.slurm.accounting(self.job_id)

    def wait(self, tell: Tell = lambda text: None, timeout: float | None = None) -> GatewayFacts:
        """Wait until the gateway answers, and return where.

        Args:
            tell: gets the queue's reason and the expected start, when they change.
            timeout: seconds; None: as long as Slurm takes.

        Raises:
            AllocationFailed: the allocation ended before, or never starts, or a node cannot be reached; the text
                says why.
            TimeoutError: it took longer.
        """
        told = ""
        lasting = 0
        begun = time.monotonic()
        waits = iter(POLL)
        while True:
            try:
                job = self.job()
                if job is not None and not job.state.waits and not job.state.is_over:
                    facts = self.gateway()
                    if facts is not None and facts.job_id == job.id:
                        return self._checked(facts)
                text = progress(self.name, job)
                lasting = lasting + 1 if job and job.state.waits and explain(job.reason).lasts else 0
            except Unavailable as error:
                job, text = None, f"{error}; waiting for it"
            else:
                if job is None or job.state.is_over:
                    raise self._ended(job)
                if lasting >= LASTING:
                    raise self._never_starts(job)
            if text != told:
                told = text
                tell(text)
            pause = next(waits) if job is None or job.state.waits else STARTING_POLL
            if timeout is not None and time.monotonic() + pause > begun + timeout:
                raise TimeoutError(f"{text}; this has taken {timeout:g} s")
            time.sleep(pause)

    def end(self, tell: Tell = lambda text: None) -> list[int]:
        """End its jobs, successors first, and wait until they have ended; return the ids of those that lived.

        What trains there has the allocation's notice to save its state, and is cancelled then.
        """
        living = self._living()
        notice = self.spec().notice
        for job in living:
            if notice and job.state is QueueState.RUNNING:
                if job.is_array:
                    self.slurm.cancel(job.id, waiting=True)
                self.slurm.signal_script(job.id, "USR1")
            else:
                self.slurm.cancel(job.id)
        ids = [job.id for job in living]
        if ids:
            tell(f"{self.name}: waiting for the end of job {', '.join(map(str, ids))}")
        self._wait_for_end(ids, notice)
        self.cancel()
        return ids

    def cancel(self) -> list[int]:
        """Cancel its jobs at once, and wait until they have ended; return the ids of those that lived."""
        ids = [job.id for job in self._living()]
        for job_id in ids:
            self.slurm.cancel(job_id)
        if left := self._wait_for_end(ids, END_TIMEOUT):
            raise AllocationFailed(
                f"job {', '.join(map(str, left))} of {self.name} does not end, though it was cancelled: see "
                f"`scontrol show job {left[0]}`"
            )
        return ids

    def _living(self) -> list[QueuedJob]:
        """Return its jobs that have not ended, the newest first."""
        self._job_ids = _numbers(self._read(JOBS) or "") or self._job_ids
        ids = self._job_ids + _numbers(self._read(GROWN) or "")
        living = [job for job in self.slurm.jobs(ids=ids) if not job.state.is_over]
        return sorted(living, key=lambda job: job.id, reverse=True)

    def _wait_for_end(self, ids: list[int], timeout: float) -> list[int]:
        """Wait for so many seconds at most; return the jobs that have not ended."""
        until = time.monotonic() + timeout
        while (ids := self._not_over(ids)) and time.monotonic() < until:
            time.sleep(STARTING_POLL)
        return ids

    def _not_over(self, ids: list[int]) -> list[int]:
        return [job.id for job in self.slurm.jobs(ids=ids) if not job.state.is_over] if ids else []

    def last_lines(self, lines: int, node: str | None = None) -> str:
        """Return the last lines of its logs: of each job's batch script, and of each node or of one."""
        batch = [] if node else [f"../slurm-{job_id}.log" for job_id in self._job_ids]
        done = self.login.run(["sh", "-c", _LAST_LINES, "sh", self.folder, str(lines), node or "*", *batch])
        if done.code:
            raise AllocationFailed(f"cannot read the logs of {self.name} in {self.folder}: {done.said}")
        return done.stdout

    def _read(self, name: str) -> str:
        try:
            return self.login.read(f"{self.folder}/{name}").decode(errors="replace")
        except FileNotFoundError:
            return ""

    def _checked(self, facts: GatewayFacts) -> GatewayFacts:
        if facts.missing:
            raise AllocationFailed(
                f"the allocation {self.name} has a gateway, but not all workers: {'; '.join(facts.missing)}"
            )
        return facts

    def _ended(self, job: QueuedJob | None) -> AllocationFailed:
        how = "is not known to Slurm any more" if job is None else how_it_ended(job)
        number = self.job_id if job is None else job.id
        try:
            said = self.last_lines(SHOWN_LINES).strip()
        except LoomError:
            said = ""
        text = f"job {number} of the allocation {self.name} {how} before its gateway answered"
        return AllocationFailed(f"{text}; its last lines:\n{said}" if said else text)

    def _never_starts(self, job: QueuedJob) -> AllocationFailed:
        reason = explain(job.reason)
        return AllocationFailed(
            f"job {job.id} of the allocation {self.name} never starts: {reason.sentence} ({job.reason}). "
            f"{reason.advice}"
        )


def listed(slurm: Slurm) -> list[ListedAllocation]:
    """Return this user's allocations, by name, with what Slurm says of each."""
    entries = _entries(slurm.login)
    jobs = slurm.jobs(ids=[job_id for _, ids, _ in entries for job_id in ids]) if entries else []
    return [
        ListedAllocation(name, tuple(ids), tuple(grown), _current(job for job in jobs if job.id in ids))
        for name, ids, grown in sorted(entries)
    ]


def _current(jobs: Iterable[QueuedJob]) -> QueuedJob | None:
    """Return, of an allocation's jobs, the newest that runs, or else that lives, or else of all."""
    return max(jobs, key=lambda job: (not job.state.is_over, not job.state.waits, job.id), default=None)


def gateways_here() -> list[str]:
    """Return the names of this user's allocations whose gateway listens, as the shared home says.

    Those with a gateway alone come in place of all others, if there are any. Slurm is asked only if several are
    left: the node of one of them may have been lost before it could take the gateway's place out of the home.
    """
    login = LocalLogin()
    root = Path(root_of(login))
    found: dict[str, tuple[int, bool]] = {}
    for path in sorted(root.glob(f"*/{GATEWAY}")):
        with contextlib.suppress(OSError, ValueError, TypeError, WrongArguments):  # it was just removed
            spec = AllocationSpec.from_json((path.parent / SPEC).read_text())
            found[path.parent.name] = GatewayFacts.from_json(path.read_text()).job_id, spec.gateway_only
    chosen = {name: job for name, (job, alone) in found.items() if alone}
    chosen = chosen or {name: job for name, (job, _) in found.items()}
    if len(chosen) < 2:
        return list(chosen)
    with contextlib.suppress(LoomError):
        jobs = Slurm(login).jobs(ids=list(chosen.values()))
        living = {job.id for job in jobs if not job.state.is_over}
        return [name for name, job in chosen.items() if job in living]
    return list(chosen)


def root_of(login: Login) -> str:
    """Return the absolute path of the folder of all allocations on the cluster."""
    root = login.run(["sh", "-c", _ROOT]).stdout
    if not root.startswith("/"):
        raise WrongArguments(f"LOOM_SLURM_FOLDER on {login.name} is no absolute path: {root!r}")
    return root.rstrip("/")


def _entries(login: Login) -> list[tuple[str, list[int], list[int]]]:
    root = root_of(login)
    done = login.run(["sh", "-c", _LIST, "sh", root])
    if done.code:
        raise AllocationFailed(
            f"cannot look for allocations in {root} on {login.name}: {done.said}. LOOM_SLURM_FOLDER there names "
            "the folder of yours"
        )
    split = (line.split("\t") for line in done.stdout.splitlines())
    return [
        (name, _numbers(ids), _numbers(grown))
        for name, ids, grown in split
        if _numbers(ids) and NAME.fullmatch(name)
    ]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split() if word.isdecimal()]


def _python(login: Login, spec: AllocationSpec) -> str:
    """Return the interpreter that nodes run."""
    if spec.container is not None or spec.wheelhouse is not None:
        return ""
    if spec.venv is None:
        if not isinstance(login, LocalLogin):
            raise WrongArguments(
                f"nothing says which Python has Loom on the nodes behind {login.name}: give --venv FOLDER, a "
                "virtual environment on the shared home, --wheelhouse FOLDER or --container IMAGE"
            )
        return sys.executable
    found = login.run(["sh", "-c", 'cd -- "$1" && test -x bin/python && pwd', "sh", spec.venv])
    if found.code:
        raise WrongArguments(
            f"{spec.venv} on {login.name} is no virtual environment: there is no bin/python in it. Make one there: "
            f"python3 -m venv {spec.venv} && {spec.venv}/bin/pip install 'monarch-loom[gateway]'"
        )
    return f"{found.stdout.strip()}/bin/python"


def _with_wheels(login: Login, spec: AllocationSpec) -> AllocationSpec:
    """Return what is asked for with the absolute path of the folder of wheels, if there is one."""
    if spec.wheelhouse is None:
        return spec
    script = 'cd -- "$1" && ls monarch_loom-*.whl >/dev/null && pwd'
    found = login.run(["sh", "-c", script, "sh", spec.wheelhouse])
    if found.code:
        raise WrongArguments(
            f"{spec.wheelhouse} on {login.name} has no wheel of monarch-loom: `pip download -d {spec.wheelhouse} "
            "'monarch-loom[gateway]'` on a machine with internet and the nodes' Python makes a folder with all "
            "that is needed"
        )
    return replace(spec, wheelhouse=found.stdout.strip())


def _prepare(login: Login, root: str, folder: str) -> None:
    """Make an allocation's folder, closed to others, with a token in it if it has none."""
    _shell(login, _PREPARE, root, folder, input=f"{generate_token()}\n".encode())


def _shell(login: Login, script: str, *arguments: str, input: bytes = b"") -> None:
    done = login.run(["sh", "-c", script, "sh", *arguments], input=input)
    if done.code:
        raise AllocationFailed(
            f"cannot make the allocation's files in {arguments[0]} on {login.name}: {done.said}. Make room there, "
            "or choose another shared folder by LOOM_SLURM_FOLDER"
        )


def _check_free(slurm: Slurm, name: str) -> None:
    ids = next((ids + grown for found, ids, grown in _entries(slurm.login) if found == name), [])
    living = [job for job in slurm.jobs(ids=ids) if not job.state.is_over] if ids else []
    if living:
        raise _taken(name, living[0].id, slurm.login)


def _taken(name: str, job_id: int, login: Login) -> NameTaken:
    return NameTaken(
        f"the allocation {name} lives on {login.name} as job {job_id}: connect to slurm://{name}, end it by "
        f"`loom slurm down {name}`, or choose another --name"
    )


def _withdraw_if_taken(allocation: Allocation) -> None:
    """Cancel the new job if another one of the same name was submitted at the same time, and before it."""
    ids = _numbers(allocation._read(JOBS))
    others = [job_id for job_id in ids if job_id < allocation.job_id]
    living = [job for job in allocation.slurm.jobs(ids=others) if not job.state.is_over] if others else []
    if living:
        allocation.slurm.cancel(allocation.job_id)
        raise _taken(allocation.name, living[0].id, allocation.login)


def _submitted(slurm: Slurm, script: str, name: str, tell: Tell) -> int:
    """Submit a script; return the job's id. If the controller does not answer, wait for it."""
    known: set[int] | None = None
    told = False
    for pause in POLL:
        try:
            if known is None:
                known = {job.id for job in slurm.jobs(names=[name])}
            elif new := [job.id for job in slurm.jobs(names=[name]) if job.id not in known]:
                return max(new)  # an attempt whose answer was lost
            return slurm.submit(script)
        except Unavailable as error:
            if not told:
                told = True
                tell(f"{error}; waiting for it")
        time.sleep(pause)
    raise AssertionError("the waits never end")


def progress(name: str, job: QueuedJob | None) -> str:
    """Return what an allocation waits for, by its newest job, in a sentence for its user."""
    if job is None:
        return f"{name}: Slurm does not know its job"
    if job.state is QueueState.CONFIGURING:
        return f"{name}: job {job.id} has {job.nodes or 'nodes'}, which are being prepared"
    if not job.state.waits:
        return f"{name}: job {job.id} runs on {job.nodes or 'its nodes'}; the gateway starts"
    when = ""
    if job.start is not None and job.start > time.time():
        when = f"; expected start {datetime.fromtimestamp(job.start).isoformat(' ', 'minutes')}"
    reason = explain(job.reason or "None")
    return f"{name}: job {job.id} waits in the queue: {reason.sentence} ({job.reason or 'None'}){when}"


def how_it_ended(job: QueuedJob) -> str:
    """Return how a job that is over has ended, as the end of a sentence that begins with the job."""
    if job.state is QueueState.TIMEOUT:
        limit = "" if job.time_limit is None else f" of {job.time_limit:g} s"
        return f"reached its time limit{limit}"
    words = {
        QueueState.CANCELLED: "was cancelled",
        QueueState.COMPLETED: "ended",
        QueueState.FAILED: "failed",
        QueueState.NODE_FAIL: "lost a node",
        QueueState.PREEMPTED: "was preempted",
        QueueState.OUT_OF_MEMORY: "ran out of memory",
    }
    return words.get(job.state, f"ended in the state {job.state.value}")
