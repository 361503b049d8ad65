"""``loom tune``: changes of a running RL run that make it faster."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loom.cli.options import UserAccess, asking, check_lives, only_session, read_assignments
from loom.cli.output import file_name, print_json, say
from loom.errors import WrongArguments


@asking
def tune(
    access: UserAccess,
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
        Path | None, typer.Option(metavar="DIR", help="Where the ledger is; default tuning_SESSION here.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the ledger's new lines as JSON.")] = False,
) -> None:
    """Say which change would make a running RL run faster; with --apply, try it, and keep it or take it back.

    Each change is applied at a step boundary, and measured over as many steps as before it. The ledger has every
    change with steps an hour, loss and reward. Exits with 0 whatever it finds.
    """
    from loom.rl.tuning.changes import NoChange
    from loom.rl.tuning.ledger import Ledger, read
    from loom.rl.tuning.target import TunedRun
    from loom.rl.tuning.tuner import Tuner

    if (change or replay) and not apply:
        raise WrongArguments("--change and --replay change the run: give --apply, too")
    if change and replay:
        raise WrongArguments("--change and --replay do not go together")
    gateway = access.gateway()
    name = session or only_session(gateway)
    given = read_assignments(change or (), "KEY=VALUE, such as async_level=2")
    replayed = read(replay)[1] if replay else []
    if session:
        check_lives(gateway, session)
    run = TunedRun(access.weaver(), partial(gateway.logs, name, follow=False), name)
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
        before, found = tuner.look()
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
