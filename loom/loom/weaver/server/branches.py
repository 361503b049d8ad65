"""`RunBranches`: branches of living runs, which the process with a run's lowest rank starts."""

from __future__ import annotations

import asyncio
import json
import shlex
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from loom.branches.values import check_changes
from loom.control import operations
from loom.control.commands import Acknowledged, Acknowledgement, CommandKind
from loom.control.run_start import CONTROLLERS
from loom.errors import BranchRefused
from loom.weaver.commands import GivenCommand
from loom.weaver.replicas import Replica
from loom.weaver.run_views import RunRecord
from loom.weaver.runs.run import Run
from loom.weaver.weaver import Weaver

SAVES_WITHIN = 120.0
"""Seconds that a run may take to save a checkpoint before it is stopped."""

MAX_TAKEN = 1000
"""Names of other branches that the process gets, which chooses another one."""


class RunBranches:
    """The starts of branches on a user's weaver.

    Args:
        shown: returns what a caller sees of a run.
        clock: returns the time, in seconds since the epoch.
        next_event: waits for the next event, for some seconds at most.
    """

    def __init__(
        self,
        weaver: Weaver,
        shown: Callable[[Run], RunRecord],
        clock: Callable[[], float],
        next_event: Callable[[float], Awaitable[None]],
    ) -> None:
        self._weaver = weaver
        self._runs = weaver.known.runs
        self._shown = shown
        self._clock = clock
        self._next_event = next_event

    def begin(self, asked: operations.BranchRun, by: str, now: float) -> Awaitable[RunRecord]:
        """Tell the run's process to start a branch; return what waits until the branch has registered.

        Raises:
            BranchRefused: no process of the run can start it.
            WrongArguments: the run has no such key, or no such value can be there.
        """
        run = self._runs.find(asked.run)
        lead = self._lead(run, asked)
        known = {**lead.handlers, **run.config, **lead.config}
        check_changes(asked.set, run.id, known)
        start = uuid.uuid4().hex[:12]
        changed = [mark for mark in self._runs.timeline(run) if mark.get("do") == "update_config"]
        kept = ("do", "applied", "step", "changes")
        params = {
            "run": run.id,
            "name": run.name,
            "id": start,
            "step": asked.step,
            "set": dict(asked.set),
            "replace": asked.replace,
            "timeline": [{name: mark.get(name) for name in kept} for mark in changed],
            "known": run.config,
            "taken": [one.name for one in self._runs if one.name.startswith(f"{run.name}-at-")][-MAX_TAKEN:],
        }
        given = self._weaver.dispatcher.give(CommandKind.BRANCH, params, [lead.id], by, now)
        return self._begun(asked, run, lead, given, start)

    def _lead(self, run: Run, asked: operations.BranchRun) -> Replica:
        """Return the replica whose process can start the branch."""
        leads = sorted(tuple(one) for one in run.leads.values())
        living = [run.there[id] for _, id in leads if id in run.living]
        if run.session is not None:
            living = [one for one in living if one.group.endswith(CONTROLLERS)]
        if run.session is not None and not living:
            why = f"it is of the session {run.session!r}, in which no job of loom.train goes on that could start it"
        elif not living:
            why = "none of its processes lives"
        elif not living[0].connected:
            why = f"{living[0].id!r} is not connected"
        else:
            return living[0]
        raise BranchRefused(f"run {run.id!r} cannot be branched from here, as {why}. {_advice(run, asked)}")

    async def _begun(
        self, asked: operations.BranchRun, run: Run, lead: Replica, given: GivenCommand, start: str
    ) -> RunRecord:
        loop = asyncio.get_running_loop()
        within = operations.BranchRun.takes({"replace": asked.replace})
        until = loop.time() + within
        replaces = asked.replace
        while True:
            made = given.acknowledgements.get(lead.id)
            if (begun := self._runs.of_start(start)) is not None:
                if made is None:
                    told = Acknowledgement(True, (begun.parent or {}).get("step"), evidence={"run": begun.id})
                    self._weaver.dispatcher.take(lead, Acknowledged(given.id, told), self._clock())
                return self._shown(begun)
            if made is not None and not made.ok:
                raise BranchRefused(f"run {run.id!r} cannot be branched: {made.reason}. {_advice(run, asked)}")
            if made is not None and replaces:
                replaces = False
                await self._end(run, given.by)
            if loop.time() > until:
                where = "" if made is None else f"; its output is in {made.evidence.get('log')} on {lead.host}"
                raise BranchRefused(f"the branch of {run.id!r} has not registered in {within:g} s{where}")
            await self._next_event(1.0)

    async def _end(self, run: Run, by: str) -> None:
        """Let a run save a checkpoint, if it can, and stop it."""
        give, until = self._weaver.dispatcher.give, asyncio.get_running_loop().time() + SAVES_WITHIN
        saved = give(CommandKind.SAVE, {}, list(run.living), by, self._clock())
        while not saved.done and asyncio.get_running_loop().time() < until:
            await self._next_event(1.0)
        if run.living:
            give(CommandKind.STOP, {}, list(run.living), by, self._clock())


def _advice(run: Run, asked: operations.BranchRun) -> str:
    """Return how to start a branch by hand."""
    facts: Any = run.start or {}
    words = ["loom", "branch", run.id]
    words += [] if asked.step is None else ["--step", str(asked.step)]
    for key, value in asked.set.items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    words += ["--replace"] if asked.replace else []
    if run.session is not None:
        line = f"{shlex.join(words)} -- PROGRAM"
        return f"Call: {line}, with the program that has opened the session, if it starts a job of loom.train"
    where = f" on {facts['host']}" if "host" in facts else ""
    return f"Call{where}: {shlex.join(words)}"
