"""``loom up``: workers and a gateway on this machine, for as long as the terminal is held."""

from __future__ import annotations

from typing import Annotated

import typer


def up(
    hosts: Annotated[int, typer.Option(min=1, help="How many workers to start.")] = 1,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway; 0 picks a free one.")] = 8470,
    token: Annotated[
        str | None, typer.Option(envvar="LOOM_TOKEN", help="What clients must show. Generated if none is given.")
    ] = None,
) -> None:
    """Start workers and a gateway on this machine, say how to connect, and end them with Ctrl-C."""
    from loom_proxy.local import LocalCluster

    try:
        with LocalCluster(hosts, port=port, token=token) as cluster:
            typer.echo(
                f"Loom is up with {hosts} host{'' if hosts == 1 else 's'}. In another terminal:\n"
                f"\n"
                f"  export LOOM_URL={cluster.url}\n"
                f"  export LOOM_TOKEN={cluster.token}\n"
                f"  loom status\n"
                f"\n"
                f'and in Python: job = loom.connect("{cluster.url}", token="{cluster.token}")\n'
                f"Ctrl-C here ends it, with all sessions."
            )
            cluster.wait()
    except KeyboardInterrupt:
        typer.echo("ended")
