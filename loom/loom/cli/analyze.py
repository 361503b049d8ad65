"""``loom analyze``: where the time of an RL run goes, by its logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loom.cli.options import Access, asking
from loom.cli.output import counted, print_json, say, say_lines
from loom.errors import WrongArguments


@asking
def analyze(
    access: Access,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="LOG...",
            help="Logs, JSON lines, trackers' files, folders of them; also with gzip.",
        ),
    ] = None,
    session: Annotated[str | None, typer.Option(metavar="NAME", help="A session whose log to read.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the folder analysis_TIMESTAMP is made.")] = Path(
        "."
    ),
    async_level: Annotated[
        int | None, typer.Option(min=0, help="The run's async level, if no line says it.")
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The framework that wrote them, if their names do not tell it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the diagnosis.")] = False,
) -> None:
    """Say where the time of an RL run goes, and write statistics, evidence and a diagnosis into a folder.

    Logs of prime-rl, verl, slime and miles, SkyRL, torchtitan's RL, TRL and OpenRLHF are read, too.
    Exits with 0 whatever the diagnosis is.
    """
    from loom.rl.diagnosis import sources
    from loom.rl.diagnosis.analysis import analyze as analyze_logs
    from loom.rl.diagnosis.summary import headline

    if not logs and session is None:
        raise WrongArguments("nothing to analyse: name logs, or a session with --session NAME")
    given = []
    if session is not None:
        given.append(sources.session(session, access.gateway().logs(session, follow=False)))
    found = analyze_logs(logs or (), out, sources=given, async_level=async_level, framework=framework)
    if as_json:
        print_json(found.as_dict())
        return
    assert found.folder is not None
    if found.framework is not None:
        say(f"logs of {found.framework}")
    say(f"PRIMARY: {found.primary}")
    say_lines(headline(found))
    if found.broken.count:
        said = counted(found.broken.count, "broken line is", "broken lines are")
        say(f"{said} left out; the summary names the first.", err=True)
    say(f"written: {found.folder / 'SUMMARY.md'}")
