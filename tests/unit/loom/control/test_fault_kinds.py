"""The kinds of faults: their parameters and how long they last are checked, and an error names what fits."""

from __future__ import annotations

from typing import Any

import pytest

import loom
from loom.control.fault_kinds import FAULTS, MAX_DURATION, check_fault


@pytest.mark.parametrize(
    ("name", "params", "duration", "match"),
    [
        ("sigkil", {}, None, "did you mean sigkill"),
        (7, {}, None, "there is no fault 7; there are sigkill, "),
        ("sigkill", [], None, "the parameters of sigkill are names and values"),
        ("sigkill", {"seconds": 1}, None, "sigkill has no parameter 'seconds'; it has none"),
        ("slow_rank", {"second": 1}, None, "it has seconds"),
        ("slow_rank", {"seconds": "long"}, None, "slow_rank: seconds is a number from 0 to 600, not 'long'"),
        ("slow_rank", {"seconds": 601}, None, "seconds is a number from 0 to 600, not 601"),
        ("nan_loss", {"steps": 1.5}, None, "steps is a whole number from 1 to"),
        ("out_of_memory", {"bound": "none"}, None, "bound is one of rlimit, cgroup"),
        ("exception", {"text": 5}, None, "text is a text, not 5"),
        ("partition", {"peers": [5]}, None, "peers is a list of texts"),
        ("full_disk", {}, None, "full_disk needs a folder"),
        ("sigkill", {}, 5, "sigkill is over at once"),
        ("sigstop", {}, 0, "lasts more than 0 and at most"),
        ("sigstop", {}, MAX_DURATION + 1, "lasts more than 0 and at most"),
        ("sigstop", {}, "long", "not 'long'"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(name: Any, params: Any, duration: Any, match: str) -> None:
    with pytest.raises(loom.WrongArguments, match=match):
        check_fault(name, params, duration)


def test_a_fault_has_all_its_parameters_in_their_types() -> None:
    kind, params, duration = check_fault("partition", {"peers": "10.0.0.5"}, 2)
    assert (kind, params, duration) == (FAULTS["partition"], {"peers": ["10.0.0.5"]}, 2.0)
    assert check_fault("partition", {"peers": ("10.0.0.5", "10.0.0.6")})[1] == {"peers": ["10.0.0.5", "10.0.0.6"]}
    assert check_fault("slow_rank", {"seconds": 2})[1:] == ({"seconds": 2.0}, 10.0)
    assert check_fault("nan_loss", {"steps": 3.0})[1] == {"steps": 3}
    assert check_fault("sigkill", {})[1:] == ({}, None)
