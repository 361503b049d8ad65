"""Plans: what they may say, and that a mistake is told with its line and column before anything is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.chaos.durations import parse_rate, parse_time
from loom.chaos.plans import (
    FORMS,
    ExpectationKind,
    Plan,
    PlannedFault,
    When,
    parse_expectation,
    parse_plan,
    read_plan,
)
from loom.chaos.targets import Target
from loom.control.fault_kinds import FAULTS, check_fault
from loom.errors import BadPlan, WrongArguments

WHOLE = """\
name: everything
seed: 7
watch: train_*
until: finished
within: 5 min
faults:
  - fault: sigkill
    when: {step: 50}
    target: {replica: train_1}
    expect: [recovers within 5 s, detected within 1 s]
  - fault: slow_rank
    when: {event: recovered, after: 2 s}
    target: {mesh: trainers, rank: 0}
    for: 500 ms
    with: {seconds: 0.1}
  - fault: exception
    when: {rate: 2 per minute, times: 3}
    target: {random: 1}
  - {fault: dead_weaver, when: {time: 1 min}}
expect:
  - loss falls
  - accuracy at least 97 %
  - no step lost twice
"""


def test_a_plan_says_all_that_it_may() -> None:
    plan = parse_plan(WHOLE, "p.yaml")

    assert (plan.name, plan.seed, plan.watch, plan.until, plan.within) == (
        "everything", 7, "train_*", "finished", 300.0
    )  # fmt: skip
    kill, slow, raises, weaver = plan.faults
    assert (kill.fault, kill.when, kill.target) == ("sigkill", When(step=50), Target(replica="train_1"))
    assert [(one.kind, one.value) for one in kill.expect] == [
        (ExpectationKind.RECOVERS, 5.0),
        (ExpectationKind.DETECTED, 1.0),
    ]
    assert (slow.duration, slow.params) == (0.5, {"seconds": 0.1})
    assert slow.when == When(event="recovered", after=2.0)
    assert slow.target == Target(mesh="trainers", rank=0)
    assert raises.when == When(rate=2 / 60, times=3)
    assert (weaver.when.time, weaver.mark.line) == (60.0, 19)
    assert [(one.kind, one.metric, one.value) for one in plan.expect] == [
        (ExpectationKind.FALLS, "loss", 0.0), (ExpectationKind.AT_LEAST, "accuracy", 0.97),
        (ExpectationKind.LOST_ONCE, "", 0.0)
    ]  # fmt: skip


def test_one_that_is_alone_needs_no_list() -> None:
    plan = parse_plan(
        "faults: {fault: sigkill, when: {step: 1}, expect: detected within 1 s}\nexpect: loss falls\n"
    )

    (fault,) = plan.faults
    assert (fault.mark.line, fault.mark.column) == (1, 9)
    assert [one.kind for one in (*fault.expect, *plan.expect)] == [ExpectationKind.DETECTED, ExpectationKind.FALLS]


BAD = {
    "an unknown fault": ("faults:\n  - fault: sigkil\n    when: {step: 5}", "p.yaml:2:12", "did you mean sigkill"),
    "a negative time": (
        "faults:\n  - fault: sigkill\n    when: {time: -5 s}\n", "p.yaml:3:18", "a time is not negative"
    ),
    "a negative step": ("faults:\n  - {fault: sigkill, when: {step: -1}}\n", "p.yaml:2:35", "equal to 0, not -1"),
    "no YAML": ("faults:\n  - fault: [sigkill\n    when: 3\n", "p.yaml:3:9", "this is no YAML"),
    "nothing": ("", "p.yaml:1:1", "the plan is empty"),
    "no faults": ("seed: 1\n", "p.yaml:1:1", "a plan needs `faults:`"),
    "an unknown name": ("seed: 1\nfault:\n  - sigkill\n", "p.yaml:2:1", "a plan has no 'fault'"),
    "a name twice": ("seed: 1\nseed: 2\nfaults: []\n", "p.yaml:2:1", "seed is there twice"),
    "a list of none": ("faults: []\n", "p.yaml:1:9", "at least one fault"),
    "never": ("faults:\n  - {fault: sigkill, when: {}}\n", "p.yaml:2:28", "at a step, a time, an event or a rate"),
    "twice": (
        "faults:\n  - {fault: sigkill, when: {step: 1, time: 2}}\n", "p.yaml:2:28", r"not \['step', 'time'\]"
    ),
    "no when": ("faults:\n  - fault: sigkill\n", "p.yaml:2:5", "a fault needs `when:`"),
    "a time for what takes none": (
        "faults:\n  - fault: sigkill\n    when: {step: 1}\n    for: 3 s\n", "p.yaml:4:10", "sigkill is over at once"
    ),
    "a time that is too long": (
        "faults:\n  - fault: sigstop\n    when: {step: 1}\n    for: 2 h\n", "p.yaml:4:10", "at most 3600 seconds"
    ),
    "an unknown parameter": (
        "faults:\n  - fault: slow_rank\n    when: {step: 1}\n    with: {pace: 1}\n",
        "p.yaml:4:11",
        "no parameter 'pace'",
    ),
    "a parameter that is missing": (
        "faults:\n  - fault: full_disk\n    when: {step: 1}\n", "p.yaml:2:5", "full_disk needs a folder"
    ),
    "an unknown expectation": (
        "faults:\n  - {fault: sigkill, when: {step: 1}}\nexpect:\n  - all is well\n",
        "p.yaml:4:5",
        "'all is well' is nothing that can be expected",
    ),
    "an expectation of one fault that is about all": (
        "faults:\n  - fault: sigkill\n    when: {step: 1}\n    expect: loss falls\n", "p.yaml:4:13", "the whole run"
    ),
    "a wrong seed": ("seed: x\nfaults: []\n", "p.yaml:1:7", "a valid integer, not 'x'"),
    "a rate of none": (
        "faults:\n  - {fault: sigkill, when: {rate: often}}\n", "p.yaml:2:35", "'often' is no rate"
    ),
    "a target of another kind": (
        "faults:\n  - fault: sigkill\n    when: {step: 1}\n    target: {node: 1}\n",
        "p.yaml:4:14",
        "no 'node'; it has replica",
    ),
    "none at random": (
        "faults:\n  - fault: sigkill\n    when: {step: 1}\n    target: {random: 0}\n", "p.yaml:4:13", "at least 1"
    ),
    "a list that contains itself": ("faults: &all [*all]\n", "p.yaml:1:1", "this is no YAML"),
    "no names and values": ("faults:\n  - 5\n", "p.yaml:2:5", "a dictionary or an instance of PlannedFault, not 5"),
    "a date": ("seed: 2024-99-99\nfaults: []\n", "p.yaml:1:7", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plan_is_refused_with_its_place(name: str) -> None:
    text, place, said = BAD[name]

    with pytest.raises(BadPlan, match=f"^{place}: .*{said}"):
        parse_plan(text, "p.yaml")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match=r"none\.yaml:1:1: the plan cannot be read"):
        read_plan(tmp_path / "none.yaml")


def test_a_plan_may_be_python(tmp_path: Path) -> None:
    path = tmp_path / "plan.py"
    path.write_text(
        "from loom.chaos.plans import Plan, PlannedFault, Target, When\n"
        "plan = Plan([PlannedFault('sigkill', When(step=n), Target(replica='train_*', random=1))\n"
        "             for n in (10, 20)], seed=3, expect=['loss falls'])\n"
    )

    plan = read_plan(path)

    assert [one.when.step for one in plan.faults] == [10, 20]
    assert plan.expect[0].kind is ExpectationKind.FALLS
    assert plan.text == path.read_text()


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("from loom.chaos.plans import *\n\nplan = Plan([PlannedFault('sigkil', When(step=1))])\n", r"3:\d+",
         "there is no fault 'sigkil'; did you mean sigkill"),
        ("plan = (\n", r"\d:\d+", "this is no Python"),
        ("plans = 1\n", "1:1", "no `plan`"),
        ("\nraise ValueError('no')\n", r"2:\d+", "ValueError: no"),
    ],
)  # fmt: skip
def test_a_bad_plan_in_python_is_refused_with_its_place(tmp_path: Path, text: str, place: str, said: str) -> None:
    (tmp_path / "plan.py").write_text(text)

    with pytest.raises(BadPlan, match=rf"plan\.py:{place}: .*{said}"):
        read_plan(tmp_path / "plan.py")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500 ms", 0.5), ("5s", 5.0), (5, 5.0), ("2 min", 120.0), ("1.5 minutes", 90.0), ("1 h", 3600.0), ("0", 0.0)],
)
def test_times(text: object, seconds: float) -> None:
    assert parse_time(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "5 years", "", None, True, [], "1e400 s", float("nan"), float("inf")])
def test_what_is_no_time(text: object) -> None:
    with pytest.raises(WrongArguments, match="time"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "rate"), [("2 per minute", 2 / 60), ("1 per 30 s", 1 / 30), ("10/h", 10 / 3600), (0.5, 0.5)]
)
def test_rates(text: object, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


def test_every_form_of_an_expectation_is_read() -> None:
    assert {parse_expectation(form).kind for form in FORMS} == set(ExpectationKind)


def test_every_fault_can_be_planned() -> None:
    for name, kind in FAULTS.items():
        params = {"folder": "/checkpoints"} if "folder" in kind.params else {}
        assert PlannedFault(name, When(step=1), params=params).kind is kind


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"percent": 101}, "from 1 to 100, not 101"),
        ({"percent": 1.5}, "a whole number"),
        ({"percent": float("inf")}, "a whole number from 1 to 100, not inf"),
        ({"percent": True}, "a whole number"),
        ({"peers": [1]}, "a list of texts"),
    ],
)
def test_parameters_are_checked(params: dict[str, object], said: str) -> None:
    with pytest.raises(WrongArguments, match=said):
        check_fault("loss", params)


def test_parameters_take_the_forms_that_json_and_people_give() -> None:
    assert check_fault("loss", {"percent": 5.0, "peers": "10.0.0.5"})[1] == {"percent": 5, "peers": ["10.0.0.5"]}
    assert check_fault("delay", {"milliseconds": 5})[1]["milliseconds"] == 5.0
    assert check_fault("loss", {"peers": ("10.0.0.5",)})[1]["peers"] == ["10.0.0.5"]


def test_a_parameter_of_few_words_names_them() -> None:
    with pytest.raises(WrongArguments, match="bound is one of rlimit, cgroup, not 'both'"):
        check_fault("out_of_memory", {"bound": "both"})


def test_a_plan_needs_a_fault() -> None:
    with pytest.raises(ValueError, match="at least one fault"):
        Plan(())
