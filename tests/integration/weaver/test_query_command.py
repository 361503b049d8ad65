"""``loom query``: the history in a table, as CSV, as JSON and in a Parquet file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import await_true
from tests.support.processes import run_loom
from tests.support.weaver_training import training
from tests.support.weavers import await_weaver

LOSSES = "SELECT step, value FROM metrics WHERE replica = 'asked' AND metric = 'loss' ORDER BY step LIMIT 5"


@pytest.fixture(scope="module")
def asked(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The cluster, on whose weaver a training reports."""
    weaver = WeaverProxy(cluster.url, cluster.token)
    with training(await_weaver(weaver), "asked"):
        await_true(lambda: len(weaver.query(LOSSES).rows) == 5)
        yield cluster


def loom_query(cluster: LocalCluster, *arguments: str) -> str:
    done = run_loom("query", LOSSES, *arguments, "--url", cluster.url, "--token", cluster.token)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_query_is_printed_as_a_table_as_csv_and_as_json(asked: LocalCluster) -> None:
    table, as_csv, as_json = (loom_query(asked, *one) for one in ([], ["--csv"], ["--json"]))

    lines = list(csv.reader(io.StringIO(as_csv)))
    found = json.loads(as_json)
    assert table.startswith("5 rows")
    assert found["columns"] == lines[0] == ["step", "value"]
    assert [[int(step), float(value)] for step, value in lines[1:]] == found["rows"]
    assert [step for step, _ in found["rows"]] == [0, 1, 2, 3, 4]


def test_a_query_is_written_to_parquet(asked: LocalCluster, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")

    said = loom_query(asked, "--parquet", str(tmp_path / "losses.parquet"))

    table = parquet.read_table(tmp_path / "losses.parquet")
    assert "5 rows" in said
    assert table.column("step").to_pylist() == [0, 1, 2, 3, 4]
    assert all(type(one) is float for one in table.column("value").to_pylist())


def test_an_empty_parquet_file_has_the_columns_types(asked: LocalCluster, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    nobody = "SELECT *, count(*) OVER () AS n FROM metrics WHERE replica = 'nobody'"
    arguments = ("--parquet", str(tmp_path / "empty.parquet"), "--url", asked.url, "--token", asked.token)
    assert run_loom("query", nobody, *arguments).returncode == 0

    found = parquet.read_schema(tmp_path / "empty.parquet")

    types = {
        "replica": "string",
        "metric": "string",
        "time": "double",
        "step": "int64",
        "value": "double",
        "run": "string",
    }
    assert {name: str(found.field(name).type) for name in found.names} == {**types, "n": "null"}


def test_a_query_that_changes_something_is_refused(asked: LocalCluster) -> None:
    done = run_loom("query", "DELETE FROM events", "--url", asked.url, "--token", asked.token)

    assert done.returncode == 2
    assert "a query only reads" in done.stderr
