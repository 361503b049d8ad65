"""Values of a user's project, and of a script, that travel by value: there, from actor to actor, and back."""

from __future__ import annotations

import enum
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import loom
from loom import Actor, endpoint
from loom_proxy.local import LocalCluster
from tests.support.by_value.values import VALUES

BOUND = 60.0


class Looks(Actor):
    @endpoint
    def look(self, value: Any, look: Callable[[Any], Any]) -> tuple[Any, Any]:
        return value, look(value)


class Passes(Actor):
    def __init__(self, to: Any) -> None:
        self.to = to

    @endpoint
    async def look(self, value: Any, look: Callable[[Any], Any]) -> tuple[Any, Any]:
        result: tuple[Any, Any] = await self.to.look.call_one(value, look)
        return result


@pytest.fixture(scope="module")
def passes(procs: loom.ProcMeshProxy) -> Any:
    looks = procs.slice(hosts=0, gpus=0).spawn("looks", Looks)
    return procs.slice(hosts=0, gpus=1).spawn("passes", Passes, looks)


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_the_same_in_an_actor_and_comes_back(passes: Any, name: str) -> None:
    value, look = VALUES[name]

    back, seen = passes.look.call_one(value, look).get(timeout=BOUND)

    assert seen == look(value)
    assert type(back) is type(value)
    if isinstance(value, enum.Enum):
        assert back is value


SCRIPT = """
import enum, sys, threading
import loom
from loom import Actor, endpoint

LOCK = threading.Lock()

class Color(enum.Enum):
    RED = 1

class Point:
    limit = 1
    def __init__(self, x): self.x = x

class Lost(Exception):
    def __init__(self, *, point):
        super().__init__("lost")
        self.point = point

class Makes(Actor):
    @endpoint
    def make(self): return {"points": [Point(1)], Color.RED: Color.RED}
    @endpoint
    def lose(self): raise Lost(point=Point(2))

def lose(): raise Lost(point=Point(3))

with loom.connect(sys.argv[1], sys.argv[2]) as job:
    makes = job.hosts.slice(hosts=0).spawn_procs().spawn("makes", Makes)
    method = Point.__init__
    made = makes.make.call_one().get()
    assert isinstance(made["points"][0], Point), made
    assert made[Color.RED] is Color.RED
    assert isinstance(job.run(Point, 4), Point)
    assert Point.__init__ is method
    try:
        makes.lose.call_one().get()
    except loom.ActorError as error:
        assert isinstance(error.exception, Lost) and isinstance(error.exception.point, Point)
    try:
        job.run(lose)
    except Lost as error:
        assert error.point.x == 3 and isinstance(error.point, Point)
print("well")
"""


def test_objects_of_a_scripts_classes_come_back(cluster: LocalCluster, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))

    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), cluster.url, cluster.token],
        capture_output=True,
        text=True,
        timeout=BOUND,
    )

    assert done.stdout == "well\n", done.stderr
