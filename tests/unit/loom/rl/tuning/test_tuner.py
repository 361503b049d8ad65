"""The tuner on simulated runs: what it proposes, keeps, takes back and notes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loom.errors import WrongArguments
from loom.rl.tuning import tuner as tuning
from loom.rl.tuning.changes import NoChange
from loom.rl.tuning.ledger import Decision, Ledger, read
from loom.rl.tuning.target import RunEnded
from loom.rl.tuning.tuner import Tuner
from loom.weaver.views import WeaverEvent
from tests.unit.loom.rl.diagnosis.pipeline import Times
from tests.unit.loom.rl.tuning.simulated import SimulatedRun

SLOW = {
    "queue": (Times(queue=3000), {"weights_via": "shared"}, "weights_via", "lane"),
    "generator": (Times(batch=4000), {}, "generators", 2),
    "trainer": (Times(train=4000), {}, "groups", 3),
    "checkpoint": (Times(batch=2000, train=1500, write=3000), {"async_level": 0}, "async_level", 1),
    "straggler": (Times(train=800, slow_rank=1, lead=3000), {}, "split", [1.0, 0.21]),
    "truncation": (Times(truncated=60), {}, "max_tokens", 128),
}
"""The times of a slow run, its options, and the change that answers it."""


def tuner_of(run: SimulatedRun, folder: Path) -> Tuner:
    return Tuner(run, Ledger(folder / "ledger", run.session), steps=12)


@pytest.mark.parametrize("slow", SLOW)
def test_a_finding_is_answered_by_a_change_that_is_kept(slow: str, tmp_path: Path) -> None:
    times, options, option, new = SLOW[slow]
    run = SimulatedRun(tmp_path, times, **options)

    first, *_ = tuner_of(run, tmp_path).tune(rounds=1)

    assert (first.rule, first.option, first.decision) == (slow, option, Decision.KEPT), first.why
    assert first.new == pytest.approx(new, abs=0.03)
    assert run.options[option] == first.new
    assert first.step == run.applied[0][0]
    if slow != "truncation":
        assert first.gain is not None
        assert first.expected is not None
        assert first.gain >= 0.1
        assert first.gain >= 0.5 * first.expected


def test_changes_follow_one_another_until_nothing_is_found(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(queue=5000, batch=4000), weights_via="shared")

    made = tuner_of(run, tmp_path).tune(rounds=6)

    assert [entry.rule for entry in made[:2]] == ["queue", "generator"]
    assert all(entry.decision is Decision.KEPT for entry in made[:2])
    assert made[-1].after is not None
    assert made[-1].after.steps_per_hour > 1.8 * made[0].before.steps_per_hour


@pytest.mark.guarantees("tuning", "Where none does, it says so")
def test_where_there_is_no_change_it_says_so(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(rpc=6000))

    (entry,) = tuner_of(run, tmp_path).tune(rounds=3)

    assert (entry.rule, entry.decision, entry.option) == ("loading", Decision.NONE, None)
    assert "weights='messages'" in entry.why
    assert run.applied == []


def test_a_disk_that_is_slower_than_all_else_is_not_cured_by_a_higher_level(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(write=6000), async_level=1)

    (entry,) = tuner_of(run, tmp_path).tune(rounds=3)

    assert (entry.rule, entry.decision) == ("checkpoint", Decision.NONE)
    assert "hides nothing" in entry.why


def test_nothing_is_changed_where_nothing_is_slow(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times())

    assert tuner_of(run, tmp_path).tune(rounds=3) == []
    assert run.applied == []


@pytest.mark.parametrize(("option", "new", "why"), [("max_tokens", 4, "reward falls"), ("async_level", 0, "+5%")])
def test_a_harmful_change_is_taken_back(option: str, new: int, why: str, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(batch=900, train=900))
    tuner = tuner_of(run, tmp_path)

    entry = tuner.attempt(tuner.given(option, new), tuner.look()[0])

    assert entry.decision is Decision.TAKEN_BACK
    assert why in entry.why
    assert run.options == run.first_options
    assert [(name, value) for _, name, value in run.applied] == [(option, new), (option, entry.old)]


def test_a_change_that_was_taken_back_is_not_proposed_again(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(batch=4000))
    run.added_processes = False
    tuner = tuner_of(run, tmp_path)
    tuning_within, tuning.COMES_WITHIN = tuning.COMES_WITHIN, 0.0
    try:
        first, second = tuner.tune(rounds=3)
    finally:
        tuning.COMES_WITHIN = tuning_within

    assert (first.decision, first.why) == (Decision.TAKEN_BACK, "1 of 2 processes take part after 0 s.")
    assert (second.decision, second.option) == (Decision.NONE, None)
    assert "tried and taken back" in second.why


def test_what_the_run_refuses_or_does_not_answer_is_noted(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(batch=4000))
    run.refuses["generators"] = "no host is left"
    tuner = tuner_of(run, tmp_path)

    refused = tuner.attempt(tuner.given("generators", 2), tuner.look()[0])
    run.silent = True
    silent = tuner.attempt(tuner.given("async_level", 2), tuner.look()[0])

    assert (refused.decision, refused.why) == (Decision.REFUSED, "no host is left")
    assert (silent.decision, silent.why) == (Decision.REFUSED, "no acknowledgement")


@pytest.mark.guarantees("tuning", "Ctrl-C, and the end of the run, leave nothing that was not measured")
def test_an_interrupt_takes_the_change_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimulatedRun(tmp_path, Times(batch=4000))
    tuner = tuner_of(run, tmp_path)
    change, before = tuner.given("async_level", 2), tuner.look()[0]
    run.interrupted = True

    with pytest.raises(KeyboardInterrupt):
        tuner.attempt(change, before)

    assert run.options["async_level"] == 1
    _, (entry,) = read(tmp_path / "ledger" / "ledger.json")
    assert (entry.decision, entry.why) == (Decision.TAKEN_BACK, "It was not measured: KeyboardInterrupt")


@pytest.mark.guarantees("tuning", "Ctrl-C, and the end of the run, leave nothing that was not measured")
def test_the_end_of_the_run_is_told_and_noted(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(batch=4000))
    run.last_step = 45
    tuner = tuner_of(run, tmp_path)

    with pytest.raises(RunEnded, match="finished"):
        tuner.tune(rounds=2)

    _, (entry,) = read(tmp_path / "ledger" / "ledger.json")
    assert entry.why == "The run ended before it was measured."


def test_without_apply_a_proposal_is_only_noted(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(batch=4000))
    tuner = tuner_of(run, tmp_path)
    before, found = tuner.look()

    proposed = tuner.propose(found)
    assert not isinstance(proposed, NoChange)
    assert proposed is not None
    entry = tuner.note(proposed, before)

    assert (entry.decision, entry.option, entry.new) == (Decision.PROPOSED, "generators", 2)
    assert run.applied == []


def test_what_others_change_is_in_the_ledger_with_the_steps_around_it(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times())
    tuner = tuner_of(run, tmp_path)
    changes = {"batch": {"old": 64, "new": 32}}
    run.others = [WeaverEvent(7, 1.0, "applied", "orchestrator", {"step": 30, "by": "ann", "changes": changes})]

    (entry,) = tuner.note_others()

    assert (entry.decision, entry.why, entry.old, entry.new) == (Decision.GIVEN, "Given by ann.", 64, 32)
    assert entry.before is not None
    assert entry.after is not None
    assert (entry.before.last, entry.after.first) == (29, 30)


@pytest.mark.guarantees("tuning", "A ledger is replayed on another run")
def test_a_ledger_is_replayed_on_another_run(tmp_path: Path) -> None:
    first = SimulatedRun(tmp_path / "a", Times(queue=5000, batch=4000), weights_via="shared")
    tuner_of(first, tmp_path).tune(rounds=3)
    told = json.loads((tmp_path / "ledger" / "ledger.json").read_text())
    other = SimulatedRun(tmp_path / "b", Times(queue=5000, batch=4000), weights_via="shared")
    other.now = 0

    _, entries = read(tmp_path / "ledger" / "ledger.json")
    made = Tuner(other, Ledger(tmp_path / "replayed", other.session), steps=12).replay(entries)

    assert len(told["entries"]) >= 2
    kept = [entry for entry in entries if entry.decision is Decision.KEPT]
    assert [entry.option for entry in made] == [entry.option for entry in kept]
    assert {name: other.options[name] for name in ("weights_via", "generators")} == {
        name: first.options[name] for name in ("weights_via", "generators")
    }
    assert made[0].step == kept[0].step


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times())
    with pytest.raises(WrongArguments, match="too few"):
        Tuner(run, Ledger(tmp_path, "simulated"), steps=1)
    with pytest.raises(WrongArguments, match="no option 'temperature'; it has async_level"):
        tuner_of(run, tmp_path).given("temperature", 1)


def test_a_file_that_is_no_ledger_or_anothers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match="No such file"):
        read(tmp_path / "ledger.json")
    (tmp_path / "ledger.json").write_text("[]")
    with pytest.raises(WrongArguments, match="is no ledger"):
        Ledger(tmp_path, "simulated")
    (tmp_path / "ledger.json").write_text(json.dumps({"session": "other", "entries": []}))
    with pytest.raises(WrongArguments, match="the ledger of 'other'"):
        Ledger(tmp_path, "simulated")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(WrongArguments, match=r"cannot write the ledger to .*taken.*: .*use --out"):
        Ledger(tmp_path / "taken", "simulated").write()


def test_the_table_has_a_line_for_each_change(tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, Times(batch=4000))
    tuner_of(run, tmp_path).tune(rounds=1)

    table = (tmp_path / "ledger" / "ledger.md").read_text()

    assert "| generator | generators: 1 → 2 | kept |" in table
    assert table.count("\n|") == 3
