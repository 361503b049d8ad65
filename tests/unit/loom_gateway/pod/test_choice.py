"""Which pod has the weaver."""

from __future__ import annotations

import pytest

from loom_gateway.pod.supervisor import choose

PODS = ["a", "b", "c"]


def test_the_first_pod_has_the_weaver_once_all_are_known() -> None:
    assert choose(PODS, 3, {"a", "b", "c"}, set(), patient=True) == "a"
    assert choose(["a", "b"], 3, {"a", "b"}, set(), patient=True) is None
    assert choose(PODS, 3, {"b", "c"}, set(), patient=True) is None


def test_after_some_patience_the_first_that_answers_has_it() -> None:
    assert choose(["b", "c"], 3, {"b", "c"}, set(), patient=False) == "b"
    assert choose(PODS, 3, {"b", "c"}, set(), patient=False) == "b"
    assert choose(PODS, 3, set(), set(), patient=False) is None
    assert choose([], 3, set(), set(), patient=False) is None


@pytest.mark.parametrize("patient", [True, False])
def test_who_has_it_keeps_it_though_another_comes_first(patient: bool) -> None:
    assert choose(PODS, 3, {"a", "b", "c"}, {"b"}, patient=patient) == "b"
    assert choose(["a", "b"], 3, {"a", "b"}, {"b"}, patient=patient) == "b"


def test_of_two_that_have_it_the_first_goes_on() -> None:
    assert choose(PODS, 3, {"a", "b", "c"}, {"b", "c"}, patient=True) == "b"


def test_who_has_it_and_is_not_known_any_more_has_gone() -> None:
    assert choose(["a", "b"], 2, {"a", "b"}, {"z"}, patient=True) == "a"
