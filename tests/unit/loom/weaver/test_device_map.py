"""The map of devices and replicas: its two directions agree whatever is done to it."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from loom.control.handshake import Device
from loom.errors import UnknownDevice
from loom.weaver.device_failures import DeviceReplicaMap
from loom.weaver.states import DeviceState

UUIDS = [f"GPU-{number}" for number in range(5)]
REPLICAS = [f"train_{number}" for number in range(4)]


def gpu(uuid: str, server: str = "node-1") -> Device:
    return Device(uuid, "gpu", server, "H200", 139 << 30)


class Map(RuleBasedStateMachine):
    """The map beside a plain set of pairs, which cannot disagree with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.map = DeviceReplicaMap()
        self.pairs: set[tuple[str, str]] = set()
        self.states: dict[str, DeviceState] = {}

    @rule(replica=st.sampled_from(REPLICAS), uuids=st.sets(st.sampled_from(UUIDS)))
    def register(self, replica: str, uuids: set[str]) -> None:
        self.map.register(replica, [gpu(uuid) for uuid in sorted(uuids)])
        self.pairs = {pair for pair in self.pairs if pair[0] != replica} | {(replica, uuid) for uuid in uuids}
        for uuid in uuids:
            self.states.setdefault(uuid, DeviceState.ACTIVE)

    @rule(replica=st.sampled_from(REPLICAS), uuid=st.sampled_from(UUIDS))
    def add(self, replica: str, uuid: str) -> None:
        self.map.add(replica, gpu(uuid))
        self.pairs.add((replica, uuid))
        self.states.setdefault(uuid, DeviceState.ACTIVE)

    @rule(replica=st.sampled_from(REPLICAS), uuid=st.sampled_from(UUIDS))
    def remove(self, replica: str, uuid: str) -> None:
        self.map.remove(replica, uuid)
        self.pairs.discard((replica, uuid))

    @rule(replica=st.sampled_from(REPLICAS))
    def drain(self, replica: str) -> None:
        assert set(self.map.drain(replica)) == {uuid for one, uuid in self.pairs if one == replica}
        self.pairs = {pair for pair in self.pairs if pair[0] != replica}

    @rule(uuid=st.sampled_from(UUIDS), how=st.sampled_from(["fail", "deactivate", "reactivate"]))
    def change(self, uuid: str, how: str) -> None:
        change = getattr(self.map, how)
        arguments = (uuid,) if how == "reactivate" else (uuid, "because")
        if uuid not in self.states:
            with pytest.raises(UnknownDevice):
                change(*arguments)
            return
        change(*arguments)
        if how == "reactivate":
            self.states[uuid] = DeviceState.ACTIVE
        elif how == "fail":
            self.states[uuid] = DeviceState.FAILED
        elif self.states[uuid] is not DeviceState.FAILED:
            self.states[uuid] = DeviceState.INACTIVE

    @rule(uuid=st.sampled_from(UUIDS))
    def forget(self, uuid: str) -> None:
        self.map.forget(uuid)
        self.pairs = {pair for pair in self.pairs if pair[1] != uuid}
        self.states.pop(uuid, None)

    @invariant()
    def both_directions_agree(self) -> None:
        from_devices = {(replica, uuid) for uuid in UUIDS for replica in self.map.replicas_of(uuid)}
        from_replicas = {(replica, uuid) for replica in REPLICAS for uuid in self.map.devices_of(replica)}
        assert from_devices == from_replicas == self.pairs

    @invariant()
    def the_states_are_as_they_were_set(self) -> None:
        assert {device.uuid: self.map.state(device.uuid) for device in self.map} == self.states
        assert all((self.map.reason(uuid) is None) == (state == "active") for uuid, state in self.states.items())


TestMap = Map.TestCase


def test_a_device_that_failed_is_still_failed_for_who_registers_it_next() -> None:
    devices = DeviceReplicaMap()
    devices.register("train_0", [gpu("GPU-0")])
    devices.fail("GPU-0", "ECC errors")
    devices.drain("train_0")

    devices.register("train_1", [gpu("GPU-0")])

    assert devices.state("GPU-0") is DeviceState.FAILED
    assert devices.reason("GPU-0") == "ECC errors"


def test_a_newer_description_of_a_device_replaces_the_older() -> None:
    devices = DeviceReplicaMap()
    devices.register("train_0", [gpu("GPU-0", "node-1")])

    devices.register("train_1", [gpu("GPU-0", "node-2")])

    assert devices.device("GPU-0").server == "node-2"
    assert devices.replicas_of("GPU-0") == ["train_0", "train_1"]


def test_an_unknown_device_is_named_with_those_that_are_known() -> None:
    devices = DeviceReplicaMap()
    devices.register("train_0", [gpu("GPU-0")])

    with pytest.raises(UnknownDevice) as caught:
        devices.fail("GPU-9", "gone")

    assert str(caught.value) == "no device 'GPU-9'; registered: GPU-0"


def test_what_changes_is_kept_for_who_watches() -> None:
    known = DeviceReplicaMap()
    known.register("train_0", [gpu("GPU-0")])
    assert not known.changed

    known.watched = True
    known.register("train_0", [gpu("GPU-0")])
    assert not known.changed
    for change in (
        lambda: known.register("train_1", [gpu("GPU-0")]),
        lambda: known.register("train_0", [gpu("GPU-0", "node-2")]),
        lambda: known.deactivate("GPU-0", "too hot"),
        lambda: known.fail("GPU-0", "gone"),
        lambda: known.reactivate("GPU-0"),
        lambda: known.drain("train_0"),
        lambda: known.forget("GPU-0"),
    ):
        change()
        assert list(known.changed) == ["GPU-0"]
        known.changed.clear()
    known.register("train_1", [gpu("GPU-1")])
    known.fail("GPU-1", "gone")
    known.changed.clear()
    known.deactivate("GPU-1", "it has failed, which is worse")
    assert not known.changed
