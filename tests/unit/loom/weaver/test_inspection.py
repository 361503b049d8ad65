"""Profiles of replicas: by py-spy or by the threadlet itself, one at a time, and why there is none."""

from __future__ import annotations

import asyncio
import math
import os

import pytest

import loom
from loom.control.profiles import MAX_FOLDED, FoldedStacks
from loom.weaver.server import user_weaver
from loom.weaver.views import ProfileInfo
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.running import running


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no py-spy on the weaver's host."""

    async def nothing(pid: int, seconds: float) -> None:
        return None

    monkeypatch.setattr(user_weaver, "py_spy_profile", nothing)


async def test_a_profile_comes_from_the_threadlet_itself(no_py_spy: None) -> None:
    async with running() as weaver:
        link = await weaver.threadlet()
        asking = asyncio.ensure_future(weaver.client.do("profile", "anna", replica="train_0", seconds=1))
        _, id, seconds = await link.receive("profile")
        with pytest.raises(loom.ProfileFailed, match="a profile of replica 'train_0' is being taken"):
            await weaver.client.do("profile", "anna", replica="train_0")
        link.send("profile", "another", "of;nobody 3\n", 3, 0, "")
        link.send("profile", id, "main;train 3\n", 3, 1, "")

        assert seconds == 1
        assert await asking == {
            "replica": "train_0",
            "seconds": 1.0,
            "samples": 3,
            "left_out": 1,
            "sampler": "threadlet",
            "folded": "main;train 3\n",
        }


async def test_a_profile_that_does_not_come_is_explained(no_py_spy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_weaver, "STACK_WITHIN", -0.9)
    async with running() as weaver:
        link = await weaver.threadlet()
        for seconds in (0.5, 31, math.nan):
            with pytest.raises(loom.WrongArguments, match="a profile takes from 1 to 30 seconds"):
                await weaver.client.do("profile", "anna", replica="train_0", seconds=seconds)
        with pytest.raises(loom.ProfileFailed, match="its threadlet did not answer"):
            await weaver.client.do("profile", "anna", replica="train_0", seconds=1)

        asking = asyncio.ensure_future(weaver.client.do("profile", "anna", replica="train_0"))
        _, id, _ = await link.receive("profile")  # that of before
        _, id, _ = await link.receive("profile")
        link.send("profile", id, "", 0, 0, "another profile of its process is being taken")
        with pytest.raises(loom.ProfileFailed, match="replica 'train_0': another profile"):
            await asking

        asking = asyncio.ensure_future(weaver.client.do("profile", "anna", replica="train_0", seconds=30))
        await link.receive("profile")
        link.send("bye", "done", "finished")
        with pytest.raises(loom.ProfileFailed, match="went away during the profile"):
            await asking
        with pytest.raises(loom.ProfileFailed, match="is finished and not connected"):
            await weaver.client.do("profile", "anna", replica="train_0")


async def test_a_profile_of_py_spy_is_taken_unless_the_process_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = [True]

    async def record(pid: int, seconds: float) -> FoldedStacks:
        stacks = FoldedStacks()
        stacks.add(f"main;of {pid} for {seconds:g}")
        alive[0] = not gone
        return stacks

    monkeypatch.setattr(user_weaver, "py_spy_profile", record)
    monkeypatch.setattr(user_weaver, "is_alive", lambda process: alive[0])
    async with running() as weaver:
        await weaver.threadlet()
        gone = False
        found = await weaver.client.do("profile", "anna", replica="train_0", seconds=2)
        assert (found["folded"], found["sampler"]) == (f"main;of {os.getpid()} for 2 1\n", "py-spy")

        gone = True
        with pytest.raises(loom.ProfileFailed, match="ended during the profile"):
            await weaver.client.do("profile", "anna", replica="train_0")


async def test_only_so_many_profiles_are_taken_at_once(no_py_spy: None) -> None:
    async with running() as weaver:
        links = [await weaver.threadlet(f"train_{number}") for number in range(3)]
        asking = [
            asyncio.ensure_future(weaver.client.do("profile", "anna", replica=f"train_{number}"))
            for number in range(2)
        ]
        ids = [(await link.receive("profile"))[1] for link in links[:2]]
        with pytest.raises(loom.LimitReached, match="2 profiles are being taken already"):
            await weaver.client.do("profile", "anna", replica="train_2")

        for link, id, one in zip(links, ids, asking, strict=False):
            link.send("profile", id, "a 1\n", 1, 0, "")
            await one

        weaver.admin._profilers = asyncio.Semaphore(0)  # as if others took as many as there may be
        with pytest.raises(loom.LimitReached, match="of all users"):
            await weaver.client.do("profile", "anna", replica="train_2")


def test_a_profile_is_cut_at_the_end_of_a_line_and_told_once(bench: Bench) -> None:
    threadlet = Threadlet(bench, "train_0")
    told: list[ProfileInfo | loom.LoomError] = []
    id = bench.weaver.profiles.want(bench.weaver.known.replicas["train_0"], 1.0, told.append)
    bench.commit()
    assert bench.profiles == [id]

    threadlet.say("profile", id, f"a;b 2\n{'c' * MAX_FOLDED} 1\n", 3, 0, "")
    bench.weaver.profiles.take(id, "d 1\n", 1, 0, "py-spy")
    bench.weaver.profiles.fail(id, loom.ProfileFailed("too late"))
    threadlet.say("profile", id, "e 1\n", 1, 0, "")

    (profile,) = told
    assert isinstance(profile, ProfileInfo)
    assert (profile.folded, profile.sampler) == ("a;b 2\n", "threadlet")
    assert not bench.weaver.profiles.ask_threadlet(id, lambda: None)


def test_another_process_that_becomes_the_replica_ends_a_profile(bench: Bench) -> None:
    Threadlet(bench, "train_0")
    replica = bench.weaver.known.replicas["train_0"]
    told: list[ProfileInfo | loom.LoomError] = []
    id = bench.weaver.profiles.want(replica, 1.0, told.append)
    bench.weaver.profiles.ask_threadlet(id, lambda: None)

    Threadlet(bench, "train_0", instance=replica.instance)

    (error,) = told
    assert "went away during the profile" in str(error)
