"""Goodput of real processes, one of which is killed, and then the weaver."""

from __future__ import annotations

import time
from typing import Any

import pytest

from loom.weaver.views import GoodputRecord
from tests.support.gateways import await_true
from tests.support.weaver_training import training
from tests.unit.loom.weaver.raw_threadlet import RawGateway, running_weaver

REPLICAS = ("train_0", "train_1")

ENOUGH = 60
"""Steps of the process that is killed: making them again takes longer than the test waits for."""

LONG = 8.0
"""Seconds beside which little is what has not been reported yet: at the beginning, at the death and at the end."""


def goodput(gateway: RawGateway) -> GoodputRecord:
    (record,) = gateway.ask("goodput")
    return GoodputRecord.from_body(record)


def await_record(gateway: RawGateway, wanted: Any) -> GoodputRecord:
    found: list[GoodputRecord] = []
    await_true(lambda: wanted(found.append(goodput(gateway)) or found[-1]))
    return found[-1]


@pytest.mark.slow
def test_a_killed_process_costs_what_it_takes_to_replace_it() -> None:
    with running_weaver() as weaver, training(weaver.address, *REPLICAS) as processes:
        gateway = weaver.gateway()
        await_true(lambda: len(gateway.ask("replicas")) == 2)
        await_record(gateway, lambda record: record.seconds["compute"] > 1.0)
        await_true(lambda: (gateway.ask("replica", id="train_0")["step"] or 0) >= ENOUGH)
        killed = time.time()
        processes[0].process.kill()
        record = await_record(gateway, lambda record: record.faults)
        assert record.replicas == 1
        assert record.faults[0].time == pytest.approx(killed, abs=1.0)
        assert record.faults[0].detection < 1.0

        with training(weaver.address, "train_0"):
            record = await_record(gateway, lambda record: record.faults[0].stepped is not None)
            (fault,) = record.faults
            assert fault.respawn is not None
            assert fault.recovery is not None
            assert record.seconds["detection"] == pytest.approx(fault.detection)
            assert record.seconds["respawn"] == pytest.approx(fault.respawn, abs=0.05)
            # It began again with the first step.
            record = await_record(gateway, lambda record: record.seconds["lost"] > 0.3)

            weaver.end()
            weaver.start()
            gateway = weaver.gateway()

            def told_again(again: GoodputRecord) -> bool:
                return all(again.seconds[reason] >= record.seconds[reason] for reason in ("compute", "lost"))

            again = await_record(gateway, told_again)
            (remembered,) = again.faults
            assert (remembered.time, remembered.registered) == (fault.time, fault.registered)
            assert remembered.recovery == pytest.approx(fault.recovery, abs=0.1)
            assert again.since == record.since
            assert again.seconds["detection"] == record.seconds["detection"]

            later = await_record(gateway, lambda record: record.until - record.since > LONG)
            spent = sum(later.seconds.values())
            assert spent == pytest.approx(2 * (later.until - later.since), rel=0.25)
