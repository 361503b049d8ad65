"""A loop with Accelerate: optimizer steps count, and how many batches make one can change between them."""

from __future__ import annotations

import json

import pytest

from tests.support.paths import ROOT
from tests.support.processes import run

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_the_batches_of_a_step_change_where_a_whole_number_is_accumulated_and_a_save_is_refused() -> None:
    ended = run("-m", "tests.system.stacks.accelerate_loop", cwd=ROOT)

    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["steps"] == [None, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8]
    assert (told["made"]["c0"]["ok"], told["made"]["c0"]["step"]) == (True, 4)
    assert "an Accelerate loop saves by itself" in told["made"]["c1"]["reason"]
    assert told["metrics"] == ["loss"]
