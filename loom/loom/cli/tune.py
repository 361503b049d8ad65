"""``loom tune``: changes of a running RL run that make it faster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loom.cli.options import UserAccess, asking, check_lives, only_session, read_assignments
from loom.cli.output import file_name, print_json, say
from loom.errors import WrongArguments

if TYPE_CHECKING:
    from loom.rl.tuning.foreign_target import ForeignTarget
    from loom.rl.tuning.target import TunedRun


@asking
def tune(
    access: UserAccess,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="LOG...", help="Logs of a run of another framework, as loom analyze reads them."),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The framework that wrote them, if their names do not tell it."),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The name of its training under loom run, which takes the changes."),
    ] = None,
    session: Annotated[str | None, typer.Option(help="Name of a session; not needed if only one lives.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Apply what is proposed; keep what helps.")] = False,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are measured before and after a change.")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="Changes that are tried at most.")] = 4,
    change: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Try this change in place of a diagnosis.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Apply the changes that a ledger of another run kept.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the ledger is; default tuning_NAME here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger's new lines as JSON.")] = False,
) -> None:
    """Say which change would make a running RL run faster; with --apply, try it, and keep it or take it back.

    Each change is applied at a step boundary, and measured over as many steps as before it. The ledger has every
    change with steps an hour, loss and reward. A run of another framework is known by its logs, and takes changes
    if its trainers run under loom run. Exits with 0 whatever it finds.
    """
    from loom.rl.tuning.changes import NoChange
    from loom.rl.tuning.ledger import Ledger, read
    from loom.rl.tuning.tuner import Tuner

    if (change or replay) and not apply:
        raise WrongArguments("--change and --replay change the run: give --apply, too")
    if change and replay:
        raise WrongArguments("--change and --replay do not go together")
    given = read_assignments(change or (), "KEY=VALUE, such as async_level=2")
    replayed = read(replay)[1] if replay else []
    foreign = _foreign(access, logs, session, framework, replica, apply)
    run = foreign or _own(access, session)
    name = run.session
    ledger = Ledger(out or Path(f"tuning_{file_name(name)}"), name)
    ledger.write()  # before anything is changed
    known = len(ledger.entries)
    tuner = Tuner(run, ledger, steps=steps, say=lambda line: None if as_json else say(line))
    if replay:
        tuner.replay(replayed)
    elif given:
        for option, value in given.items():
            proposed = tuner.given(option, value)
            tuner.attempt(proposed, tuner.look()[0])
    elif apply:
        tuner.tune(rounds)
    else:
        before, found = (None, foreign.whole) if foreign else tuner.look()
        proposal = tuner.propose(found)
        if proposal is not None:
            tuner.note(proposal, before)
            told = proposal.why if isinstance(proposal, NoChange) else f"{proposal}. {proposal.why}"
            say(f"{proposal.rule}: {told}", err=as_json)
    new = ledger.entries[known:]
    if as_json:
        print_json({"session": name, "entries": [entry.as_dict() for entry in new]})
    elif new:
        say(f"written: {ledger.folder / 'ledger.md'}")
    else:
        say("nothing is found that a change would answer")


def _own(access: UserAccess, session: str | None) -> TunedRun:
    from loom.rl.tuning.target import TunedRun

    gateway = access.gateway()
    name = session or only_session(gateway)
    if session:
        check_lives(gateway, session)
    return TunedRun(access.weaver(), partial(gateway.logs, name, follow=False), name)


def _foreign(
    access: UserAccess,
    logs: list[Path] | None,
    session: str | None,
    framework: str | None,
    replica: str | None,
    apply: bool,
) -> ForeignTarget | None:
    from loom.rl.tuning.foreign_target import ForeignTarget

    if not logs:
        if framework or replica:
            raise WrongArguments("--framework and --replica are for a run of another framework: name its logs, too")
        return None
    if session:
        raise WrongArguments("logs and --session do not go together: a session has its own")
    if apply and replica is None:
        raise WrongArguments("--apply changes such a run through loom run: name its training with --replica")
    return ForeignTarget(logs, framework, access.weaver() if replica else None, replica)
