"""The numbers of all users have one answer, and each user a bounded share of it."""

from __future__ import annotations

import time

import msgpack
import pytest

from loom.token_file import ADMIN
from loom.weaver.keys import EVERYONE
from loom.weaver.server import guests_and_admins
from tests.unit.loom.weaver.running import running


@pytest.mark.guarantees("after a session", "No user's names take `/metrics` from the others")
async def test_one_users_names_leave_the_numbers_of_others_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests_and_admins, "ALL_NUMBERS", 40_000)
    async with running() as weaver:
        weaver.server.users.of("bob")
        theirs = await weaver.threadlet()
        many = {f"{number:0199d}": 1.0 for number in range(1000)}
        theirs.send("status", [[1, time.time(), 1, None, None, many, None]])
        await theirs.receive("stored")

        numbers = msgpack.unpackb(await weaver.client.ask("numbers", user=EVERYONE))

        assert numbers["bob"]["left_out"] == {}
        assert (
            len(numbers[ADMIN]["of_replicas"]["train_0"]["metrics"]) + numbers[ADMIN]["left_out"]["metrics"] == 1000
        )
        assert len(msgpack.packb(numbers)) < 60_000
