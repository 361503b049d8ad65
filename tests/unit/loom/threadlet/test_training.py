"""A real training loop with torch, whose learning rate is changed while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from loom.threadlet import Threadlet
from tests.unit.loom.threadlet.fake_weaver import FakeWeaver, Loop, eventually

torch = pytest.importorskip("torch")

Make = Callable[..., Threadlet]


def test_the_learning_rate_changes_at_a_step_boundary(weaver: FakeWeaver, threadlet: Make) -> None:
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(64, 4), torch.randn(64, 1)
    made = threadlet("train_0", config={"learning_rate": 0.1})
    rates: list[float] = []

    @made.handler("learning_rate")
    def set_learning_rate(value: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = value

    def train(number: int) -> None:
        with made.step(number, max_step=4) as step:
            rates.append(optimizer.param_groups[0]["lr"])
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step.metrics["loss"] = loss

    loop = Loop(train)
    connection, _ = weaver.welcome()
    loop.step()
    loop.step()
    ident = weaver.command(connection, "update_config", learning_rate="0.002")
    eventually(lambda: made._pending, "the command")
    loop.step()
    loop.step()
    loop.end()

    assert rates == [0.1, 0.1, 0.002, 0.002]
    rows: list[list[Any]] = []
    answers: list[list[Any]] = []
    while len(rows) < 4 or not answers:
        frame = connection.receive()
        assert frame is not None
        if frame[0] == "status":
            rows += frame[1]
        elif frame[0] == "ack":
            answers.append(frame[1:])
    losses = [row[5]["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)
    changes = {"learning_rate": {"old": 0.1, "new": 0.002}}
    assert answers == [[ident, 2, {"ok": True, "reason": None, "changes": changes, "refused": {}}]]


def test_an_update_after_a_step_has_the_number_that_the_block_gave_it(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet("train_0")

    @made.handler("learning_rate")
    def set_learning_rate(value: float) -> None: ...

    connection, _ = weaver.welcome()
    eventually(lambda: made.connected)
    with made.step(13) as step:
        ident = weaver.command(connection, "update_config", learning_rate=0.002)
        eventually(lambda: made._pending, "the command")
        step.number = 14

    assert connection.ack(ident)[0] == 14


def test_workers_that_load_data_do_not_disturb(weaver: FakeWeaver, threadlet: Make) -> None:
    made = threadlet("train_0")
    connection, _ = weaver.welcome()
    eventually(lambda: made.connected)

    class Numbers(torch.utils.data.Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, place: int) -> int:
            made.publish_status(step=1000 + place)
            return place

    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork", timeout=20)
    for number, batch in enumerate(loader):
        with made.step(number) as step:
            step.metrics["value"] = batch

    rows = connection.rows(8)
    assert [(row[2], row[5]) for row in rows] == [(number, {"value": float(number)}) for number in range(8)]
    assert made.connected
