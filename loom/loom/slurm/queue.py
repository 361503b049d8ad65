"""`Slurm`: jobs, partitions and accounting, by Slurm's own commands on a login node.

From 23.02 on, ``squeue --json`` and ``sacct --json`` are read, whose fields differ from version to version. Before,
``squeue --json`` printed the whole cluster's queue whatever it was asked for, so that the parsable formats are read
there, and wherever Slurm was built without JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from loom.errors import AllocationFailed, MissingDependency, SchedulerAway
from loom.slurm.login import NO_SUCH_COMMAND, CompletedCommand, Login

JSON_SINCE = (23, 2)
"""The first version whose JSON has only the jobs that were asked for."""

SUBMIT_TIMEOUT = 120.0
"""Seconds that ``sbatch`` may take: Slurm itself asks for long, with a controller that is busy."""

_ENVIRONMENT = (
    "env",
    "-u",
    "SQUEUE_STATES",
    "-u",
    "SQUEUE_USERS",
    "-u",
    "SQUEUE_PARTITION",
    "SLURM_TIME_FORMAT=%s",
)

_QUEUE_FIELDS = ("%i", "%T", "%u", "%P", "%a", "%D", "%S", "%e", "%V", "%l", "%N", "%r", "%j")
"""Of ``squeue --format``. The name comes last: it may contain what separates the fields."""

_PAST_FIELDS = (
    ("JobIDRaw", "State", "User", "Partition", "Account", "NNodes", "Start", "End", "Submit")
    + ("Timelimit", "NodeList", "Reason", "JobName")
)  # fmt: skip
"""Of ``sacct --format``, in the order of `_QUEUE_FIELDS`."""

_AWAY = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|Transport endpoint|"
    "Connection (?:refused|timed out|reset)|controller is not running|in standby mode|slurmdbd",
    re.IGNORECASE,
)
_NO_SUCH_JOB = re.compile("Invalid job id", re.IGNORECASE)
_NO_ACCOUNTING = re.compile("accounting storage is disabled", re.IGNORECASE)
_NEVER = ("", "N/A", "Unknown", "None", "NONE", "(null)")


class QueueState(str, Enum):
    """The state of a job, in Slurm's words."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    SIGNALING = "SIGNALING"
    RESIZING = "RESIZING"
    STAGE_OUT = "STAGE_OUT"
    COMPLETING = "COMPLETING"
    REQUEUED = "REQUEUED"
    REQUEUE_FED = "REQUEUE_FED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    REVOKED = "REVOKED"
    UNKNOWN = "UNKNOWN"
    """A state that only a newer Slurm knows."""

    @property
    def waits(self) -> bool:
        """True of a job that has no nodes yet."""
        return self in _WAITING

    @property
    def is_over(self) -> bool:
        """True of a job that has ended for good."""
        return self in _OVER

    @classmethod
    def read(cls, given: object) -> QueueState:
        """Return the state in a field of Slurm's: a word, or since 23.11 a list of a state and its flags."""
        words = [str(word).split(" ")[0].rstrip("+") for word in given] if isinstance(given, list) else []
        words = words or [str(given).split(" ")[0].rstrip("+")]  # as in "CANCELLED by 1000"
        known = [cls(word) for word in words if word in cls.__members__]
        for flag in (cls.COMPLETING, cls.CONFIGURING, cls.REQUEUE_HOLD, cls.SPECIAL_EXIT):
            if flag in known:
                return flag
        return known[0] if known else cls.UNKNOWN


_WAITING = frozenset(
    map(QueueState, ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"))
)
_OVER = frozenset(
    map(
        QueueState,
        ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE")
        + ("OUT_OF_MEMORY", "REVOKED"),
    )
)


@dataclass(frozen=True)
class QueuedJob:
    """A job, as Slurm tells of it. Times are seconds since the epoch; None: unknown, or no limit."""

    id: int
    name: str
    state: QueueState
    user: str = ""
    partition: str = ""
    account: str = ""
    node_count: int = 0
    nodes: str = ""
    """Its nodes in Slurm's form, such as ``n[1-3]``; "" before it has any."""
    reason: str = ""
    """Why it waits, in Slurm's word; "" if nothing is said."""
    submitted: float | None = None
    start: float | None = None
    """Its start; of a job that waits, when Slurm expects to start it."""
    end: float | None = None
    """Its end, or the latest one that its time limit allows."""
    time_limit: float | None = None
    """Seconds."""
    component: int = 0
    """Its number in a heterogeneous job or an array, which has one id."""
    is_array: bool = False


class Partition(NamedTuple):
    """A partition of the cluster."""

    name: str
    is_default: bool
    is_up: bool
    max_time: float | None
    """Seconds that a job may take at most; None: no limit."""
    node_count: int


class Slurm:
    """Slurm's commands on a login node.

    Every method raises `SchedulerAway` when the controller does not answer, `MissingDependency` without Slurm on
    the path, and `AllocationFailed` with Slurm's own words when it refuses.
    """

    def __init__(self, login: Login) -> None:
        self.login = login
        self._version: tuple[int, ...] = ()
        self._without_json: set[str] = set()  # commands whose JSON did not work

    def version(self) -> tuple[int, ...]:
        """Return the version, such as ``(22, 5, 8)``."""
        if not self._version:
            said = self._run(["squeue", "--version"]).stdout
            numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", said)
            if numbers is None:
                raise AllocationFailed(f"squeue --version on {self.login.name} names no version: {said.strip()!r}")
            self._version = tuple(int(number) for number in numbers.groups() if number)
        return self._version

    def submit(self, script: str, options: Sequence[str] = ()) -> int:
        """Submit a batch script, which ``sbatch`` reads from its standard input; return the job's id.

        With `SchedulerAway` or `LoginUnreachable` it is unknown whether there is a job now.
        """
        # What the program's own user shows to the gateway is none of the job's business, and Slurm keeps it.
        command = ["env", "-u", "LOOM_TOKEN", "sbatch", "--parsable", *options]
        done = self._run(command, "sbatch", input=script.encode(), timeout=SUBMIT_TIMEOUT)
        ids = re.findall(r"^(\d+)(?:;\S*)?$", done.stdout, re.MULTILINE)
        if not ids:
            raise AllocationFailed(f"sbatch on {self.login.name} named no job: {done.said}")
        return int(ids[-1])

    def jobs(
        self, *, ids: Iterable[int] = (), names: Iterable[str] = (), user: str | None = None
    ) -> list[QueuedJob]:
        """Return the jobs in the queue, also those that ended lately, of these ids or of these names.

        Args:
            user: only this user's; by default the one who asks.
        """
        wanted, named = set(ids), set(names)
        whose = ["--user", user] if user else ["--me"]
        chosen = ["--jobs", ",".join(map(str, sorted(wanted)))] if wanted else []
        chosen += ["--name", ",".join(sorted(named))] if named else []
        command = ["squeue", *whose, *chosen, "--states=all"]
        try:
            found = self._listed(command, _QUEUE_FIELDS, ["--noheader", "--format"])
        except _NoSuchJob:
            return []
        return [
            job
            for job in _with_components(found)
            if (not wanted or job.id in wanted) and (not named or job.name in named)
        ]

    def job(self, number: int) -> QueuedJob | None:
        """Return a job; None if Slurm has forgotten it."""
        found = self.jobs(ids=[number])
        return found[0] if found else self.accounting(number)

    def accounting(self, number: int) -> QueuedJob | None:
        """Return what accounting knows of a job; None where it knows nothing, or is disabled."""
        command = ["sacct", "--allocations", "--jobs", str(number)]
        try:
            found = self._listed(command, _PAST_FIELDS, ["--noheader", "--parsable2", "--format"])
        except _NoSuchJob:
            return None
        return next((job for job in reversed(found) if job.id == number), None)

    def cancel(self, number: int, waiting: bool = False) -> None:
        """Cancel a job; with ``waiting`` only those of an array that wait. One that has ended is no error."""
        with contextlib.suppress(_NoSuchJob):
            self._run(["scancel", *(["--state=PENDING"] if waiting else []), str(number)])

    def signal_script(self, number: int, signal: str) -> None:
        """Send a signal to a job's batch script, and to no other process. A job that has ended is no error."""
        with contextlib.suppress(_NoSuchJob):
            self._run(["scancel", "--batch", "--signal", signal, str(number)])

    def rename(self, number: int, name: str) -> None:
        """Give a job another name."""
        self._run(["scontrol", "update", f"JobId={number}", f"JobName={name}"])

    def partitions(self) -> list[Partition]:
        """Return the partitions that this user sees."""
        lines = self._run(["scontrol", "--oneliner", "show", "partition"]).stdout.splitlines()
        facts = [dict(word.partition("=")[::2] for word in line.split()) for line in lines if "=" in line]
        return [
            Partition(
                one.get("PartitionName", ""),
                one.get("Default") == "YES",
                one.get("State") == "UP",
                read_duration(one.get("MaxTime", "")),
                int(one.get("TotalNodes", "0")),
            )
            for one in facts
        ]

    def _listed(self, command: list[str], columns: Sequence[str], formatted: list[str]) -> list[QueuedJob]:
        """Return the jobs that a command lists, by its JSON if it has any, or else by its columns."""
        name = command[0]
        if self.version() >= JSON_SINCE and name not in self._without_json:
            done = self._run([*_ENVIRONMENT, *command, "--json"], name, refuses=False)
            try:
                if done.code == 0:
                    return read_jobs(done.stdout)
            except (ValueError, TypeError, KeyError, AttributeError):
                pass  # cut off, or of a form that Slurm has only since
            self._without_json.add(name)
        separator = "," if name == "sacct" else "|"
        done = self._run([*_ENVIRONMENT, *command, *formatted, separator.join(columns)], name)
        return read_table(done.stdout)

    def _run(
        self,
        command: Sequence[str],
        name: str = "",
        *,
        input: bytes = b"",
        timeout: float = 60.0,
        refuses: bool = True,
    ) -> CompletedCommand:
        """Run a command of Slurm's; raise if the controller is away, and with ``refuses`` if it fails."""
        done = self.login.run(command, input=input, timeout=timeout)
        name = name or command[0]
        if done.code == 0:
            return done
        said = f"{name} on {self.login.name}: {done.said}"
        if done.code == NO_SUCH_COMMAND:
            raise MissingDependency(
                f"there is no {name} on {self.login.name}, so that it is no login node of Slurm, or Slurm is not "
                "on its path: log in on one, or name it by --via ssh://USER@HOST"
            )
        if _NO_SUCH_JOB.search(done.stderr):
            raise _NoSuchJob(said)
        if name == "sacct" and _NO_ACCOUNTING.search(done.said):
            raise _NoSuchJob(said)
        if _AWAY.search(done.stderr):
            raise SchedulerAway(f"Slurm's controller does not answer: {said}")
        if refuses:
            raise AllocationFailed(_explained(said))
        return done


class _NoSuchJob(AllocationFailed):
    """Slurm does not know a job, or not any more."""


def read_jobs(text: str) -> list[QueuedJob]:
    """Return the jobs in the JSON of ``squeue`` or ``sacct``, of any version."""
    return [_read_job(job) for job in json.loads(text)["jobs"]]


def _read_job(job: Mapping[str, Any]) -> QueuedJob:
    # sacct has an object where squeue has a word.
    past = job.get("time") if isinstance(job.get("time"), dict) else None
    state = job["state"] if past is not None else job["job_state"]
    reason = state.get("reason", "") if isinstance(state, dict) else job.get("state_reason", "")
    limit = _number(past.get("limit") if past is not None else job.get("time_limit"))
    times = past if past is not None else job
    array = _number(job.get("array_job_id"))
    return QueuedJob(
        id=int(_number(job.get("het_job_id")) or array or job["job_id"]),
        component=int(_number(job.get("het_job_offset")) or _number(job.get("array_task_id")) or 0),
        is_array=bool(array),
        name=str(job.get("name", "")),
        state=QueueState.read(state["current"] if isinstance(state, dict) else state),
        user=str(job.get("user") or job.get("user_name") or ""),
        partition=str(job.get("partition") or ""),
        account=str(job.get("account") or ""),
        node_count=int(_number(job.get("node_count", job.get("allocation_nodes"))) or 0),
        nodes="" if job.get("nodes") in _NEVER else str(job.get("nodes") or ""),
        reason="" if reason in _NEVER else str(reason),
        submitted=_moment(times.get("submission", times.get("submit_time"))),
        start=_moment(times.get("start", times.get("start_time"))),
        end=_moment(times.get("end", times.get("end_time"))),
        time_limit=None if limit is None else limit * 60.0,
    )


def _number(given: object) -> float | None:
    """Return a number of Slurm's JSON: bare, or since 23.02 with whether it is set and infinite."""
    if isinstance(given, dict):
        return float(given["number"]) if given.get("set") and not given.get("infinite") else None
    return float(given) if isinstance(given, (int, float)) else None


def _moment(given: object) -> float | None:
    seconds = _number(given)
    return seconds or None  # 0 stands for no time


def read_table(text: str) -> list[QueuedJob]:
    """Return the jobs in lines of `_QUEUE_FIELDS`, or of `_PAST_FIELDS`."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|", len(_QUEUE_FIELDS) - 1)
        match = re.fullmatch(r"\s*(\d+)(?:\+(\d+)|(_)(\d+|\[.*\]))?\s*", fields[0])
        if len(fields) < len(_QUEUE_FIELDS) or match is None:
            continue  # a warning, or a site's own line
        _, state, user, partition, account, count, start, end, submitted, limit, nodes, reason, name = (
            field.strip() for field in fields
        )
        jobs.append(
            QueuedJob(
                id=int(match[1]),
                component=int(match[2] or (match[4] if match[4] and match[4].isdecimal() else 0)),
                is_array=match[3] is not None,
                name=name,
                state=QueueState.read(state),
                user=user,
                partition=partition,
                account="" if account in _NEVER else account,
                node_count=int(count) if count.isdecimal() else 0,
                nodes="" if nodes in _NEVER or nodes == "None assigned" else nodes,
                reason="" if reason in _NEVER else reason,
                submitted=_seconds(submitted),
                start=_seconds(start),
                end=_seconds(end),
                time_limit=read_duration(limit),
            )
        )
    return jobs


def _with_components(jobs: Sequence[QueuedJob]) -> list[QueuedJob]:
    """Return heterogeneous jobs and arrays as one each.

    It has the nodes of all components, and the worst reason for which one of these waits. It runs if one runs, and
    is over if all are.
    """
    found: dict[int, list[QueuedJob]] = {}
    for job in jobs:
        found.setdefault(job.id, []).append(job)
    whole = []
    for components in found.values():
        first, *others = sorted(components, key=lambda job: job.component)
        if others:
            reasons = sorted(
                (job.reason for job in components if job.reason), key=lambda one: not explain(one).lasts
            )
            states = [job.state for job in components if not job.state.is_over]
            first = replace(
                first,
                state=next((state for state in states if not state.waits), states[0] if states else first.state),
                node_count=sum(job.node_count for job in components),
                nodes=",".join(job.nodes for job in (first, *others) if job.nodes),
                reason=reasons[0] if reasons else "",
            )
        whole.append(first)
    return whole


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() and int(text) else None


def read_duration(text: str) -> float | None:
    """Return the seconds of a duration in Slurm's form, ``[DAYS-]HOURS:MINUTES:SECONDS``; None for no limit.

    Slurm also takes ``MINUTES``, ``MINUTES:SECONDS``, ``DAYS-HOURS`` and ``DAYS-HOURS:MINUTES``.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]  # minutes come first
    hours, minutes, seconds = (numbers + [0, 0])[:3]
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + seconds


class Reason(NamedTuple):
    """Why a job waits, for its user."""

    sentence: str
    advice: str = ""
    lasts: bool = False
    """True if the job never starts unless something is changed."""


_REASONS = {
    "None": Reason("Slurm has not looked at it yet"),
    "Resources": Reason("it is next, as soon as its nodes are free"),
    "Priority": Reason("jobs of higher priority come first"),
    "BeginTime": Reason("its begin time has not come; after a requeue Slurm waits for about two minutes"),
    "Prolog": Reason("the prolog of its nodes runs"),
    "Cleaning": Reason("what it left from before its requeue is cleaned up"),
    "Dependency": Reason("it waits for another job's end"),
    "DependencyNeverSatisfied": Reason("the job that it waits for did not end as asked", "Cancel it", lasts=True),
    "JobHeldUser": Reason("its user holds it", "Release it: scontrol release JOB", lasts=True),
    "JobHeldAdmin": Reason("an administrator holds it", "Ask your administrator", lasts=True),
    "JobHoldMaxRequeue": Reason("it was requeued too often", "Release it: scontrol release JOB", lasts=True),
    "Licenses": Reason("a license that it asks for is not free"),
    "Reservation": Reason("its reservation has not begun"),
    "ReservationDeleted": Reason("its reservation was deleted", "Ask for another", lasts=True),
    "InvalidAccount": Reason("its account is not valid", "Name another by --account", lasts=True),
    "InvalidQOS": Reason("its QOS is not valid", "Name another by --qos", lasts=True),
    "QOSNotAllowed": Reason("its QOS is not allowed in its partition or account", "Name another", lasts=True),
    "AccountNotAllowed": Reason("its account is not allowed in its partition", "Name another", lasts=True),
    "BadConstraints": Reason("no node has what it asks for", "Ask for less, or for another partition", lasts=True),
    "PartitionDown": Reason("its partition does not start jobs now", "Ask for another by --partition"),
    "PartitionInactive": Reason("its partition takes no jobs", "Ask for another by --partition", lasts=True),
    "PartitionNodeLimit": Reason(
        "it asks for more nodes, or fewer, than its partition has or allows",
        "Change --nodes or --partition",
        lasts=True,
    ),
    "PartitionTimeLimit": Reason(
        "its time limit is longer than its partition allows",
        "Ask for a shorter --time, or another partition",
        lasts=True,
    ),
    "PartitionConfig": Reason("its partition does not allow it", "Ask for another by --partition", lasts=True),
    "ReqNodeNotAvail": Reason(
        "nodes that it needs are down, drained or reserved", "See them: sinfo --list-reasons"
    ),
    "NodeDown": Reason("a node that it needs is down", "See it: sinfo --list-reasons"),
    "FrontEndDown": Reason("no front end is up"),
    "AssociationJobLimit": Reason("as many jobs run as your account allows"),
    "AssociationResourceLimit": Reason("as much is in use as your account allows"),
    "AssociationTimeLimit": Reason("your account's time is used up", "Ask your administrator", lasts=True),
    "QOSJobLimit": Reason("as many jobs run as the QOS allows"),
    "QOSResourceLimit": Reason("as much is in use as the QOS allows"),
    "QOSTimeLimit": Reason("its time limit is longer than its QOS allows", "Ask for a shorter --time", lasts=True),
    "QOSUsageThreshold": Reason("the QOS is used too much already"),
    "JobArrayTaskLimit": Reason("as many tasks of its array run as were allowed"),
    "NonZeroExitCode": Reason("it ended with an error"),
    "TimeLimit": Reason("its time limit was over"),
    "launch failed requeued held": Reason(
        "its node could not start it, and Slurm holds it", "Release it: scontrol release JOB", lasts=True
    ),
}

_LIMITED = re.compile(
    "(?P<whose>Assoc|QOS|Association|Job)(?P<scope>Grp|Max|Min)(?P<what>[A-Za-z]*?)(?P<each>PerJob|PerUser|PerAccount|"
    "PerNode|PU|PA|PJ)?(?P<limit>Limit|RunMinutes|Minutes)?(?:PerJob|PerUser|PerAccount)?"
)
_WHOSE = {"Assoc": "your account", "Association": "your account", "QOS": "its QOS", "Job": "the cluster"}


def explain(reason: str) -> Reason:
    """Return a reason of Slurm's in words; one that is not known keeps Slurm's word."""
    word = re.split(r"[,(]", reason, maxsplit=1)[0].strip()  # as in "ReqNodeNotAvail, UnavailableNodes:n1"
    if word in _REASONS:
        known = _REASONS[word]
        rest = reason[len(word) :].strip(" ,()")
        return known._replace(sentence=f"{known.sentence} ({rest})") if rest else known
    if (limit := _LIMITED.fullmatch(word)) is not None:
        # A limit of one job stays exceeded however long it waits; one of all jobs together passes.
        lasts = limit["scope"] == "Min" or "PerJob" in word or word.endswith("PJ")
        advice = "Ask for less" if lasts else ""
        whose = _WHOSE[limit["whose"]]
        what = "one job" if lasts else "all jobs together"
        return Reason(f"the limit {word} of {whose} for {what} is reached", advice, lasts)
    return Reason(f"Slurm says {reason}" if reason else "Slurm says no reason")


_REFUSALS = (
    (
        r"accounting/QOS policy",
        "See `sacctmgr show qos` and `sacctmgr show associations user=$USER` for the limits",
    ),
    (r"[Ii]nvalid partition", "See `sinfo` for the partitions, and name one by --partition"),
    (r"[Ii]nvalid account", "See `sacctmgr show associations user=$USER` for yours, and name one by --account"),
    (r"[Ii]nvalid qos", "See `sacctmgr show qos`, and name one by --qos"),
    (r"time limit", "See `sinfo --format='%P %l'` for what partitions allow, and give a shorter --time"),
    (r"[Nn]ode count|node configuration", "See `sinfo --long` for what nodes have, and ask for less"),
    (r"[Ii]nvalid generic resource|gres", "See `sinfo --format='%P %G'` for the GPUs that nodes have"),
)


def _explained(said: str) -> str:
    """Return Slurm's refusal with what to do."""
    advice = next((advice for pattern, advice in _REFUSALS if re.search(pattern, said)), "")
    return f"{said}. {advice}" if advice else said
