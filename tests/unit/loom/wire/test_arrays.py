"""Arrays, tensors and byte strings: what arrives is what was sent, and its data was not copied into the pickle."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy
import pytest
import torch

from loom.errors import UnpicklableError
from loom.wire.arrays import IN_BAND, Carried, _rebuild_on_gpu, take_apart
from loom.wire.codec import Decoder, dumps, loads
from loom.wire.messages import Kind, Message
from loom.wire.mux import CHUNK_SIZE, ChunkInbox, ChunkOutbox, Pieces
from tests.support.processes import HIDDEN, run

LARGE = 3 * CHUNK_SIZE // 4
"""Numbers of an array of several chunks."""


def moved(obj: Any, in_pieces: bool = False) -> Any:
    """The parts of an object's payload after their way through chunks and frames."""
    outbox, inbox = ChunkOutbox(), ChunkInbox(in_pieces=[Kind.CALL] if in_pieces else ())
    outbox.put(Message(Kind.CALL, 1, (), dumps(obj)))
    while messages := outbox.next_frame():
        for message in messages:
            parts = [bytes(part) for part in message.parts]
            arrived = inbox.receive(message._replace(parts=list(map(memoryview, parts)), body=tuple(message.body)))
            if arrived is not None:
                return arrived.parts
    raise AssertionError("it did not arrive")


def passed_on(obj: Any) -> Any:
    """An object after its way through a driver, which does not put it together."""
    between = Decoder(passing_on=True).loads(moved(obj, in_pieces=True))
    return pickle.loads(cloudpickle.dumps(between))


def sent_back(obj: Any) -> Any:
    """An object after its way from an actor through a driver."""
    pickled = cloudpickle.dumps(take_apart(obj))
    between = Decoder(passing_on=True).loads([pickled])
    assert isinstance(between, Carried)
    return loads(moved(between))


WAYS = pytest.mark.parametrize(
    "way", [lambda obj: loads(moved(obj)), passed_on, sent_back], ids=["there", "passed on", "sent back"]
)

TENSORS = {
    "large": torch.arange(LARGE, dtype=torch.float32),
    "small": torch.arange(6).reshape(2, 3),
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "bool": torch.arange(LARGE) % 3 == 0,
    "bfloat16": torch.arange(LARGE).to(torch.bfloat16),
    "float8": torch.ones(IN_BAND).to(torch.float8_e4m3fn),
    "complex": torch.arange(LARGE).to(torch.complex64),
    "transposed": torch.arange(LARGE).reshape(3, -1).t(),
    "channels last": torch.arange(LARGE).reshape(2, 3, -1, 4).to(memory_format=torch.channels_last),
    "a row": torch.arange(LARGE).reshape(3, -1)[1],
    "a column": torch.arange(LARGE).reshape(-1, 3)[:, 1],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
    "flipped size one": torch.arange(LARGE).reshape(1, -1, 1),
    "conjugate": torch.complex(torch.ones(9), torch.ones(9)).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
@WAYS
def test_a_tensor_arrives_as_it_was(way: Any, name: str) -> None:
    tensor = TENSORS[name]
    if way is sent_back and take_apart(tensor) is None:
        pytest.skip("left to torch's own pickling, which Monarch does")

    read = way(tensor)

    assert type(read) is torch.Tensor
    assert (read.dtype, read.shape, read.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(read.to_dense(), tensor.to_dense())
    if name in ("transposed", "channels last"):
        assert read.stride() == tensor.stride()
    if not tensor.is_sparse:
        read.zero_()


@WAYS
def test_a_parameter_stays_one(way: Any) -> None:
    read = way(torch.nn.Parameter(torch.ones(LARGE)))

    assert type(read) is torch.nn.Parameter
    assert read.requires_grad
    assert read.is_leaf
    assert torch.equal(read.detach(), torch.ones(LARGE))


@WAYS
def test_whether_a_tensor_requires_a_gradient_is_kept(way: Any) -> None:
    assert way(torch.ones(LARGE, requires_grad=True)).requires_grad
    assert not way(torch.nn.Parameter(torch.ones(LARGE), requires_grad=False)).requires_grad


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_tensor_of_a_gpu_that_is_not_here_is_in_main_memory(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """On GPUs themselves: tests/system/gpu."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    data = bytearray(torch.arange(6.0).numpy().tobytes())

    read = _rebuild_on_gpu(1, (data, torch.float32, (3, 2), (1, 3)), True, True)

    assert (type(read), read.device.type, read.requires_grad) == (torch.nn.Parameter, "cpu", True)
    assert read.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_tensor_is_not_copied_into_the_pickle() -> None:
    tensor = torch.ones(LARGE)

    pickled, part = dumps({"weights": tensor})

    assert len(pickled) < 1000
    tensor[0] = 5
    assert torch.frombuffer(part, dtype=torch.float32)[0] == 5


def test_a_tensor_is_put_together_over_the_memory_that_it_arrived_in() -> None:
    pickled, part = moved(torch.ones(LARGE))

    read = loads([pickled, part])

    read[0] = 5
    assert torch.frombuffer(part, dtype=torch.float32)[0] == 5


def test_only_what_belongs_to_a_view_travels() -> None:
    _, part = dumps(torch.zeros(100, LARGE)[3])

    assert len(part) == 4 * LARGE


def test_a_tensor_that_is_there_twice_arrives_once() -> None:
    tensor = torch.ones(LARGE)

    first, second = loads(moved([tensor, tensor]))

    assert first is second


def test_tensors_are_found_wherever_they_are() -> None:
    module = torch.nn.Linear(600, 600)

    parts = dumps(module)

    assert len(parts[0]) < 10_000
    assert torch.equal(loads(moved(module)).weight, module.weight)


def test_what_a_parameter_carries_besides_is_kept() -> None:
    parameter = torch.nn.Parameter(torch.ones(LARGE))
    parameter.owner = "me"  # type: ignore[attr-defined]

    assert take_apart(parameter) is None
    assert loads(moved(parameter)).owner == "me"


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(LARGE),
        numpy.arange(LARGE).reshape(3, -1).T,
        numpy.arange(LARGE)[::2],
        numpy.arange(LARGE, dtype=">i4"),
        numpy.zeros(LARGE, dtype=[("x", "f4"), ("y", "i2")]),
        numpy.arange(LARGE).astype("M8[s]"),
    ],
    ids=["plain", "fortran", "strided", "big endian", "records", "dates"],
)
@WAYS
def test_an_array_arrives_as_it_was(way: Any, array: numpy.ndarray[Any, Any]) -> None:
    read = way(array)

    assert read.dtype == array.dtype
    numpy.testing.assert_array_equal(read, array)
    assert read.flags.writeable
    read[0] = read[1]


@WAYS
def test_a_read_only_array_stays_read_only(way: Any) -> None:
    array = numpy.arange(LARGE)
    array.flags.writeable = False

    read = way(array)

    numpy.testing.assert_array_equal(read, array)
    assert not read.flags.writeable


@pytest.mark.parametrize("data", [bytes(2 * CHUNK_SIZE), bytearray(2 * CHUNK_SIZE)], ids=["bytes", "bytearray"])
@WAYS
def test_a_byte_string_arrives_as_it_was(way: Any, data: bytes | bytearray) -> None:
    read = way(data)

    assert (type(read), read) == (type(data), data)


def test_a_received_byte_string_is_not_copied() -> None:
    pickled, part = moved(bytes(2 * CHUNK_SIZE))

    assert loads([pickled, part]) is part


def test_an_array_of_objects_is_left_to_the_pickle() -> None:
    array = numpy.array([1, "two"] * IN_BAND, dtype=object)

    assert take_apart(array) is None
    numpy.testing.assert_array_equal(loads(dumps(array)), array)


def test_what_is_passed_on_is_pickled_in_pieces() -> None:
    (carried,) = Decoder(passing_on=True).loads(moved([numpy.arange(LARGE)], in_pieces=True))

    (part,) = carried.parts
    assert isinstance(part, Pieces)
    assert max(map(len, part)) <= CHUNK_SIZE


def test_arrays_are_left_to_who_unpickles_them_if_a_payload_is_passed_on() -> None:
    values = {"step": 3, "weights": torch.ones(LARGE), "ids": numpy.arange(LARGE), "raw": bytes(LARGE)}

    read = Decoder(passing_on=True).loads(moved(values, in_pieces=True))

    assert {name: type(value) for name, value in read.items()} == {
        "step": int,
        "weights": Carried,
        "ids": Carried,
        "raw": Carried,
    }
    assert torch.equal(pickle.loads(cloudpickle.dumps(read))["weights"], values["weights"])


class Frame:
    """Looks at its array while it is unpickled, as pandas does."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.values = state["values"]
        assert self.values.sum() > 0


@pytest.mark.parametrize("values", [numpy.ones(LARGE), torch.ones(LARGE), torch.eye(3).to_sparse()])
def test_an_object_has_its_arrays_whole_when_it_is_unpickled_to_be_passed_on(values: Any) -> None:
    read = passed_on([Frame(values)])[0]

    assert type(read.values) is type(values)
    assert (read.values.to_dense() == values.to_dense()).all() if hasattr(values, "to_dense") else True


def test_what_is_there_twice_is_passed_on_as_one_object() -> None:
    shared = [numpy.ones(LARGE)]

    first, second, third = passed_on((shared, shared, shared[0]))

    assert first is second
    assert first[0] is third


def test_a_list_that_holds_itself_travels() -> None:
    ring: list[Any] = [numpy.ones(LARGE)]
    ring.append(ring)

    read = loads(moved(ring))

    numpy.testing.assert_array_equal(read[0], ring[0])


def test_a_payload_that_lacks_a_part_is_refused() -> None:
    pickled, _ = dumps(torch.ones(LARGE))

    with pytest.raises(UnpicklableError, match="cannot be unpickled on this side"):
        loads([pickled])


def test_a_laptop_without_torch_is_told_that_it_is_missing(tmp_path: Any) -> None:
    payload = tmp_path / "payload"
    payload.write_bytes(pickle.dumps([bytes(part) for part in dumps(torch.ones(3))]))
    program = HIDDEN.format(module="torch") + (
        "import pickle; from loom.wire.codec import Decoder\n"
        f"parts = pickle.loads(open({str(payload)!r}, 'rb').read())\n"
        "try: Decoder().loads(parts, 'the result')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )

    finished = run("-c", program)

    assert finished.stdout.startswith("UnpicklableError the result cannot be unpickled on this side"), finished
    assert "torch" in finished.stdout
    assert "install it here too" in finished.stdout
