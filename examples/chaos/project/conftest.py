"""A cluster on this machine, and two replicas of a training that are started again when they die."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

import loom

HERE = Path(__file__).parent
STARTED_WITHIN = 60.0  # seconds


@pytest.fixture(scope="session")
def job():
    with loom.local(hosts=1) as job:
        yield job


@pytest.fixture(scope="session")
def training(job, tmp_path_factory):
    """Train while the tests run; `loom.train` does with processes of a mesh what `restarted` does here."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with restarted(job, folder, "fit_0"), restarted(job, folder, "fit_1"):
        for _ in job.weaver.watch(timeout=STARTED_WITHIN):
            if sum(one.step is not None for one in job.weaver.replicas().values()) == 2:
                break
        else:
            pytest.fail(f"the training has not begun within {STARTED_WITHIN:g} s")
        yield job


@contextmanager
def restarted(job, folder, replica):
    environment = {**os.environ, "LOOM_WEAVER": job.weaver.address(), "LOOM_REPLICA": replica, "LOOM_GROUP": "fit"}
    command = [sys.executable, str(HERE / "training.py"), str(folder)]
    over = threading.Event()
    processes = []

    def keep():
        while not over.is_set():
            processes.append(subprocess.Popen(command, env=environment))
            processes[-1].wait()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        while thread.is_alive():  # a process may start at this moment
            for process in processes:
                process.kill()
            thread.join(0.1)
