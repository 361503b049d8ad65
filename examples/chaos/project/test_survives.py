"""What the training has to survive, as tests: ``pytest examples/chaos/project``."""

from pathlib import Path

from loom.chaos import Plan, PlannedFault, Target, When

HERE = Path(__file__).parent


def test_a_replica_that_is_killed_trains_again(loom_chaos, training):
    report = loom_chaos(HERE / "kill_one.yaml", training)

    (fault,) = report.to_dict()["faults"]
    assert fault["steps_lost"] <= 10


def test_a_slow_replica_does_no_harm(loom_chaos, training):
    slow = PlannedFault("slow_rank", When(time=0), Target("fit_1"), duration=1.0, params={"seconds": 0.1})

    loom_chaos(Plan(faults=(slow,), expect=("loss is finite",), watch="fit", settle=0), training.weaver)
