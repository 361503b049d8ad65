"""``loom query`` and ``loom export``: the history of replicas for other programs."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loom.cli.options import Json, UserAccess, asking
from loom.cli.output import counted, print_json, print_table, say, say_lines
from loom.errors import WrongArguments
from loom.exporters.tracker import TrackerKind, check_installed
from loom.extras import require
from loom.process.listen import announce
from loom.token_file import state_folder

if TYPE_CHECKING:
    from loom.weaver.views import QueryResult


@asking
def query(
    access: UserAccess,
    sql: Annotated[str, typer.Argument(metavar="SELECT", help="The statement, in SQLite's words.")],
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Parquet file; needs the extra parquet.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    as_json: Json = False,
) -> None:
    """Query the history of your replicas with SQL that only reads.

    The tables are replicas, metrics, runs, steps, events, config_changes and commands.
    """
    if (parquet is not None) + as_csv + as_json > 1:
        raise WrongArguments("choose one of --parquet, --csv and --json")
    if parquet is not None:
        require({"pyarrow": "pyarrow"}, "--parquet", extra="parquet")
    found = access.weaver().query(sql)
    if parquet is not None:
        _write_parquet(found, parquet)
        say(f"{parquet}: {counted(len(found.rows), 'row')}")
    elif as_csv:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([found.columns, *found.rows])
        say_lines(text.getvalue(), nl=False)
    elif as_json:
        print_json(found.to_body())
    else:
        print_table(counted(len(found.rows), "row"), list(found.columns), found.rows)


@asking
def export(
    access: UserAccess,
    to: Annotated[TrackerKind, typer.Option(help="The tracker; its package is an extra of its name.")],
    project: Annotated[str, typer.Option(help="The project, or experiment, of the runs.")] = "loom",
    folder: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where a tracker keeps files here: TensorBoard's log folder.")
    ] = Path("loom-export"),
    replica: Annotated[str, typer.Option(metavar="NAME", help="A replica, a group, or a glob over both.")] = "*",
    state: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to note what is exported. Default: the user's own.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Export what is there, and end.")] = False,
) -> None:
    """Write the metrics, configurations, events and commands of your replicas into a tracker. Runs until Ctrl-C.

    Each point comes once, however often the export, the gateway or the weaver is started again.
    """
    check_installed(to)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    gateway, ended = access.gateway(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    if once:
        ended.set()
    if state is None:
        about = f"{gateway.url}\n{access.user}\n{project}\n{folder.absolute()}\n{replica}"
        state = state_folder() / f"export-{to.value}-{hashlib.sha256(about.encode()).hexdigest()[:16]}"

    from loom.exporters.exporter import GatewaySource, export_to
    from loom.exporters.tracker import Destination

    announce("exporting", tracker=to.value, project=project)
    export_to(to, Destination(project, folder), GatewaySource(gateway, access.user), state, ended, replica)


def _write_parquet(found: QueryResult, path: Path) -> None:
    """Write a result; a column of several types, which Parquet does not know, becomes one of texts."""
    import pyarrow
    import pyarrow.parquet

    known = {"INTEGER": pyarrow.int64(), "REAL": pyarrow.float64(), "TEXT": pyarrow.string()}

    def column(values: list[Any], type: str) -> Any:
        for kind in (known.get(type), None):
            with contextlib.suppress(pyarrow.ArrowException):
                return pyarrow.array(values, kind)
        return pyarrow.array([None if one is None else str(one) for one in values])

    names = [name if name not in found.columns[:at] else f"{name}_{at}" for at, name in enumerate(found.columns)]
    types = found.types or [""] * len(names)
    columns = [column([row[at] for row in found.rows], types[at]) for at in range(len(names))]
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns, names=names), path)
    except OSError as error:
        raise WrongArguments(f"cannot write {path}: {error.strerror or error}") from error
