"""The runs in trackers, read by the trackers' own packages, or from their files."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Points", "environment", "read_marks", "read_points"]

Points = list[tuple[int, float]]
"""Step and value of each point, in the order in which the tracker has them."""


def environment(folder: Path) -> dict[str, str]:
    """The variables with which trackers keep everything in a folder, and ask nobody else."""
    return {
        **os.environ,
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_TRACKING_URI": f"file://{folder}/mlruns",
        "TRACKIO_DIR": f"{folder}/trackio",
        "WANDB_MODE": "offline",
        "XDG_STATE_HOME": f"{folder}/state",
    }


def read_points(kind: str, folder: Path, run: str, metric: str) -> Points:
    """The points of a metric of the admin's replica ``run``."""
    return _READERS[kind](folder, run, metric)


def read_marks(kind: str, folder: Path, run: str) -> list[str]:
    """The texts of the marks of a replica's run."""
    return _MARKS[kind](folder, run)


def _tensorboard(folder: Path, run: str, metric: str) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (folder / "admin" / run).is_dir():
        return []
    found = EventAccumulator(str(folder / "admin" / run), {"scalars": 0, "tensors": 0}).Reload()
    if metric not in found.Tags()["scalars"]:
        return []
    return [(one.step, one.value) for one in found.Scalars(metric)]


def _tensorboard_marks(folder: Path, run: str) -> list[str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "admin" / run), {"scalars": 0, "tensors": 0}).Reload()
    if "loom/events" not in found.Tags()["tensors"]:
        return []
    return [one.tensor_proto.string_val[0].decode() for one in found.Tensors("loom/events")]


def _mlflow_run(folder: Path, run: str) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(f"file://{folder}/mlruns")
    experiment = client.get_experiment_by_name("loom")
    found = [] if experiment is None else client.search_runs([experiment.experiment_id])
    runs = [one for one in found if one.info.run_name == run]
    assert len(runs) < 2
    return client, runs[0] if runs else None


def _mlflow(folder: Path, run: str, metric: str) -> Points:
    client, found = _mlflow_run(folder, run)
    if found is None:
        return []
    return [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, metric)]


def _mlflow_marks(folder: Path, run: str) -> list[str]:
    _, found = _mlflow_run(folder, run)
    tags = sorted((tag, text) for tag, text in found.data.tags.items() if tag.startswith("loom.event."))
    return [text.partition(" UTC ")[2] for _, text in tags]


def _trackio(folder: Path, run: str, metric: str) -> Points:
    rows = _trackio_rows(folder, "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", run)
    logged = ((step, json.loads(metrics)) for step, metrics in rows)
    return [(step, metrics[metric]) for step, metrics in logged if metric in metrics]


def _trackio_marks(folder: Path, run: str) -> list[str]:
    rows = _trackio_rows(folder, "SELECT title, text FROM alerts WHERE run_name = ? ORDER BY id", run)
    return [f"{title} {text}" for title, text in rows]


def _trackio_rows(folder: Path, sql: str, run: str) -> list[tuple[Any, Any]]:
    if not (folder / "trackio" / "loom.db").exists():
        return []
    db = sqlite3.connect(folder / "trackio" / "loom.db")
    try:
        return db.execute(sql, (run,)).fetchall()
    finally:
        db.close()


def _wandb_rows(folder: Path) -> list[Mapping[str, Any]]:
    from loom.exporters.wandb import _histories

    logs = sorted((folder / "wandb").glob("*run-*/run-*.wandb"))
    return [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for log in logs
        for row in _histories(log)
    ]


def _wandb(folder: Path, run: str, metric: str) -> Points:
    rows = _wandb_rows(folder)
    steps = [row["_step"] for row in rows]
    assert len(set(steps)) == len(steps)
    return [(row["loom/step"], row[metric]) for row in rows if metric in row]


def _wandb_marks(folder: Path, run: str) -> list[str]:
    return [row["loom/mark"] for row in _wandb_rows(folder) if "loom/mark" in row]


_READERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "trackio": _trackio, "wandb": _wandb}
_MARKS = {
    "tensorboard": _tensorboard_marks,
    "mlflow": _mlflow_marks,
    "trackio": _trackio_marks,
    "wandb": _wandb_marks,
}
