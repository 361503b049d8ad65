"""Every script of `tests.parity` gives the same natively, through Loom and in Loom's driver."""

from __future__ import annotations

import pytest

from loom_proxy.local import LocalCluster
from tests.parity.harness import SIDES, compare
from tests.parity.outcomes import difference, outcome_of_value
from tests.parity.scripts import SCRIPTS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("side", SIDES)
def test_every_script_gives_the_same_natively_and_with_loom(own_cluster: LocalCluster, side: str) -> None:
    verdicts = list(compare(own_cluster, sides=[side]))
    assert len(verdicts) == len(SCRIPTS) >= 179
    disagreements = [f"{verdict.script} at {verdict.disagreement}" for verdict in verdicts if verdict.disagreement]
    assert not disagreements, "\n".join(disagreements)


@pytest.mark.slow
def test_a_script_in_the_driver_has_monarchs_own_meshes(cluster: LocalCluster) -> None:
    names = ["shapes.meshes_are_of_the_public_classes", "calls.stream_with_a_failure", "inside.names"]

    verdicts = list(compare(cluster, names))

    assert [(verdict.script, verdict.side) for verdict in verdicts] == [
        (name, side) for name in names for side in SIDES
    ]
    assert not [verdict.disagreement for verdict in verdicts if verdict.disagreement]


def differ(native: object, loom: object) -> bool:
    return difference(outcome_of_value(native), outcome_of_value(loom)) is not None


def test_outcomes_differ_in_value_type_and_order() -> None:
    assert not differ([1, {"a": (2,)}], [1, {"a": (2,)}])
    assert differ([1, 2], [2, 1])
    assert differ([1], (1,))
    assert differ(1, True)
    assert differ(1, 1.0)
    assert differ(None, ())
    assert differ({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_an_exception_may_be_more_special_through_loom_only() -> None:
    class Special(ValueError):
        pass

    assert not differ(ValueError("a"), Special("b"))
    assert differ(Special("a"), ValueError("a"))
    assert differ(ValueError("a"), KeyError("a"))
    assert differ(ValueError("a"), "a")
    assert differ(Special("a"), Special("b"))
