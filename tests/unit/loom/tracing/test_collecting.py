import pytest

from loom.tracing import collecting, event
from loom.tracing.collecting import Collection, Kernels
from loom.tracing.spans import recorder


def test_it_is_bounded_and_says_what_was_left_out():
    collection = Collection(most=10)
    for i in range(25):
        event("load", i=i)
    found = collection.end("p")
    assert [record["i"] for record in found["records"]] == list(range(10))
    assert found["left_out"] == 15
    assert not recorder.sinks


def test_it_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(collecting, "MAX_BYTES", 1000)
    collection = Collection()
    event("load", text="x" * 2000)
    event("load")
    found = collection.end("p")
    assert len(found["records"]) == found["left_out"] == 1


def test_a_field_that_json_does_not_have_is_left_out_with_its_record():
    circle = []
    circle.append(circle)
    collection = Collection()
    event("load", circle=circle)
    assert collection.end("p")["left_out"] == 1


def test_torchs_operators_of_every_thread_are_seen():
    torch = pytest.importorskip("torch")
    import threading

    kernels = Kernels()
    thread = threading.Thread(target=lambda: torch.ones(8, 8) @ torch.ones(8, 8))
    thread.start()
    thread.join()
    found = kernels.end(1000)
    assert kernels.problem is None
    assert "aten::mm" in {record["name"] for record in found}


def test_the_users_own_profile_is_left_alone():
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        kernels = Kernels()
        torch.ones(8, 8) @ torch.ones(8, 8)
        assert kernels.end(1000) == []
    assert "another profile" in kernels.problem
    assert any(event.key == "aten::mm" for event in own.key_averages())
