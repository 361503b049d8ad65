"""Rollouts in files: whole or not there, each in exactly one part, and never too old."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.rl.rollouts import Rollout, RolloutStore, fresh, parts_of, split


def rollouts(step: int, count: int, weights_step: int = 0) -> list[Rollout]:
    return [
        Rollout(f"{step}.{one}.0", [1, 2], [3] * (1 + one % 3), [-0.5] * (1 + one % 3), 0.5, -1.0, weights_step)
        for one in range(count)
    ]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    wrote = rollouts(4, 7)

    path = store.write(split(wrote, 4, ranks=2))

    assert sorted(one.name for one in path.iterdir()) == ["rank_0.pt", "rank_1.pt"]
    assert path == tmp_path / "rollouts" / "step_4"
    assert {one.id for one in store.read_all(4)} == {one.id for one in wrote}
    assert store.read(4, 1).rollouts == wrote[1::2]
    assert store.read(4, 0).count == 7
    assert store.read(4, 0).tokens == sum(len(one.tokens) for one in wrote)


def test_parts_are_as_large_as_their_shares() -> None:
    wrote = rollouts(0, 40)

    parts = split(wrote, 0, 3, [1.0, 0.25, 0.75])

    assert [len(part.rollouts) for part in parts] == [20, 5, 15]
    assert {one.id for part in parts for one in part.rollouts} == {one.id for one in wrote}
    assert len({part.tokens for part in parts}) == 1
    assert [len(part.rollouts) for part in split(wrote, 0, 2, [1.0, 0.0])] == [40, 0]
    assert [len(part.rollouts) for part in split(wrote, 0, 4, [1.0, 0.5])] == [10, 10, 10, 10]


def test_a_step_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RolloutStore(tmp_path)
    parts = split(rollouts(0, 4), 0, ranks=2)

    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            store.write(parts)

    assert not store.has(0)
    assert store.steps() == []
    store.write(parts)
    assert store.has(0)


def test_the_rollouts_of_a_step_are_written_once(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(split(rollouts(0, 2), 0, ranks=1))

    with pytest.raises(FileExistsError, match="written once"):
        store.write(split(rollouts(0, 2), 0, ranks=1))


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_part_is_trained_on_by_exactly_one_process(shards: int, ranks: int) -> None:
    found = [part for shard in range(shards) for part in parts_of(shard, shards, ranks)]

    assert sorted(found) == list(range(ranks))


def test_rollouts_of_a_policy_that_is_too_old_are_left_out() -> None:
    old, good = rollouts(5, 2, weights_step=2), rollouts(5, 3, weights_step=3)

    assert fresh(old + good, step=5, bound=2) == good


def test_old_steps_are_removed(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    for step in range(4):
        store.write(split(rollouts(step, 1), step, ranks=1))

    store.remove_before(2)

    assert store.steps() == [2, 3]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["step_2", "step_3"]


def test_to_wait_for_rollouts_that_were_removed_is_an_error(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.check_not_passed(0)
    store.write(split(rollouts(3, 1), 3, ranks=1))

    store.check_not_passed(4)
    with pytest.raises(LookupError, match="step 2 were removed; the oldest are of step 3"):
        store.check_not_passed(2)
