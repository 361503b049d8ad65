"""Trackers' own packages, offline, in scripts under ``loom run``: what they are given is a metric in Loom too."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loom_proxy.local import LocalCluster
from loom_proxy.weaver.client import WeaverProxy
from tests.support.gateways import await_true

pytestmark = pytest.mark.slow

LOOP = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(5):
    loss = model(torch.ones(2)).sum()
    loss.backward()
    LOG
    optimizer.step()
END
"""

SCRIPTS = {
    "wandb": (
        "import wandb\nrun = wandb.init(project='p', mode='offline')",
        "wandb.log({'loss': loss, 'n': n, 'text': 'x', 'picture': wandb.Histogram([1, 2])})",
        "last = run.summary['n']; run.finish(); print(last)",
    ),
    "tensorboard": (
        "from torch.utils.tensorboard import SummaryWriter\nwriter = SummaryWriter('logs')",
        "writer.add_scalar('loss', loss, n); writer.add_scalars('', {'n': n}, n)",
        "writer.close(); print(4)",
    ),
    "mlflow": (
        "import mlflow\nmlflow.set_tracking_uri('file:mlruns')\nrun = mlflow.start_run()",
        "mlflow.log_metric('loss', loss.item(), step=n); mlflow.log_metrics({'n': n}, step=n)",
        "mlflow.end_run(); print(int(mlflow.get_run(run.info.run_id).data.metrics['n']))",
    ),
    "trackio": (
        "import trackio\ntrackio.init(project='p', name='r')",
        "trackio.log({'loss': loss.item(), 'n': n})",
        "trackio.finish(); print(4)",
    ),
}
"""Of each tracker: what begins, what logs in a step, and what ends and prints the tracker's last value."""


@pytest.mark.parametrize("tracker", SCRIPTS)
def test_what_a_script_gives_to_a_tracker_is_a_metric(cluster: LocalCluster, tmp_path: Path, tracker: str) -> None:
    if importlib.util.find_spec(tracker) is None and "LOOM_TEST_ALL" not in os.environ:
        pytest.skip(f"{tracker} is not installed: pip install -e '.[stacks]'")
    begin, log, end = SCRIPTS[tracker]
    text = f"{begin}\n{LOOP.replace('LOG', log.replace('; ', chr(10) + '    ')).replace('END', end)}"
    (tmp_path / "script.py").write_text(text)
    places = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}
    environment = {**os.environ, "LOOM_URL": cluster.url, "LOOM_TOKEN": cluster.token, **places}
    environment |= {"MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1"}
    loom = str(Path(sys.executable).with_name("loom"))
    weaver = WeaverProxy(cluster.url, cluster.token)

    done = subprocess.run(
        [loom, "run", "--name", f"by-{tracker}", "--", sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4"
    name = f"by-{tracker}_0"
    await_true(lambda: getattr(weaver.replicas().get(name), "step", None) == 5)
    metrics = weaver.replicas()[name].metrics
    assert metrics["/n" if tracker == "tensorboard" else "n"] == 4
    assert "loss" in metrics
    assert not {"text", "picture"} & set(metrics)
