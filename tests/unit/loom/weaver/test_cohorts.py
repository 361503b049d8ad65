"""The weaver's part in cohorts: whom a command goes to, when, and what is refused at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import Command, CommandKind
from loom.control.handshake import CohortPlace, Device, ThreadletHello
from loom.errors import ProtocolMismatch
from loom.weaver.cohort_commands import MOST_ATTEMPTS
from loom.weaver.cohorts import MOVED_WITHIN, RECONNECT_WITHIN
from loom.weaver.commands import GivenCommand, Target
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import hello_of

GPU = Device("GPU-0", "gpu", "host", "Model", 1)
LR = {"learning_rate": 0.01}


def ranks(bench: Bench, world: int = 4, there: int | None = None, cohort: str = "c1") -> list[Threadlet]:
    """The ranks of a job, of which only so many are there."""
    return [
        Threadlet(bench, f"train_{rank}", group="train", devices=[], cohort=[cohort, rank, world])
        for rank in range(world if there is None else there)
    ]


def started_again(bench: Bench, rank: int, cohort: str) -> Threadlet:
    return Threadlet(bench, f"train_{rank}", group="train", devices=[], cohort=[cohort, rank, 4], restarted=4)


def give(bench: Bench, target: Target | None, kind: CommandKind = CommandKind.UPDATE_CONFIG) -> GivenCommand:
    params = LR if kind is CommandKind.UPDATE_CONFIG else {}
    given = bench.weaver.dispatcher.give(kind, params, target, "ann", bench.now)
    bench.commit()
    return given


def frames(threadlet: Threadlet) -> list[list[Any]]:
    return [frame for frame in threadlet.told if frame[0] == "command"]


@pytest.mark.parametrize("target", ["train", "train_*", "*", None, ["train_3", "train_0", "train_2", "train_1"]])
def test_a_command_to_all_ranks_goes_to_them_as_a_cohort(bench: Bench, target: Target | None) -> None:
    there = ranks(bench)

    given = give(bench, target)

    assert [frames(one) for one in there] == [[["command", given.id, "update_config", LR, False, "c1"]]] * 4
    assert Command.from_body(frames(there[0])[0]).cohort == "c1"


@pytest.mark.parametrize("target", ["train_0", ["train_0", "train_3"], "train_[12]"])
def test_a_command_to_some_ranks_is_refused_with_the_cure(bench: Bench, target: Target) -> None:
    there = ranks(bench)

    given = give(bench, target)

    assert given.done
    reasons = {made.reason for made in given.acknowledgements.values()}
    assert reasons == {"the ranks train_0 … train_3 average gradients: name the group 'train'"}
    assert not any(frames(one) for one in there)


def test_ranks_without_a_group_are_named_one_by_one(bench: Bench) -> None:
    for rank in range(2):
        Threadlet(bench, f"digits_{rank}", group=f"digits_{rank}", cohort=["c1", rank, 2])

    given = give(bench, "digits_1")

    reason = given.acknowledgements["digits_1"].reason
    assert reason == "the ranks digits_0 and digits_1 average gradients: name all of them: digits_0, digits_1"


def test_a_command_is_refused_while_ranks_are_missing(bench: Bench) -> None:
    there = ranks(bench)
    there[2].lose()
    bench.wait(RECONNECT_WITHIN, *there[:2], there[3])

    given = give(bench, "train")

    assert given.done
    assert {made.reason for made in given.acknowledgements.values()} == {
        "train_2 is not connected (since 2.0 s), and all 4 ranks change at one step"
    }
    assert not any(frames(one) for one in there)


def test_a_command_waits_for_a_rank_that_reconnects_just_now(bench: Bench) -> None:
    there = ranks(bench)
    there[2].lose()
    bench.wait(RECONNECT_WITHIN - 0.5, *there[:2], there[3])
    given = give(bench, "train")
    before = [frames(one) for one in there]

    there[2] = back(bench, there[2], 2)

    assert before == [[]] * 4
    assert not given.done
    assert [[frame[1] for frame in frames(one)] for one in there] == [[given.id]] * 4


def test_a_command_waits_no_longer_than_a_reconnection_takes(bench: Bench) -> None:
    there = ranks(bench)
    there[2].lose()
    first, second = give(bench, "train"), give(bench, "train")
    bench.wait(RECONNECT_WITHIN, *there[:2], there[3])

    assert first.done
    assert second.done
    assert "train_2 is not connected (since 2.0 s)" in str(second.acknowledgements["train_0"].reason)
    assert bench.weaver.dispatcher.cohort_commands.settled
    there[2] = back(bench, there[2], 2)
    assert not any(frames(one) for one in there)


@pytest.mark.parametrize("early", [False, True], ids=["after the refusal", "before the refusal"])
def test_what_the_ranks_have_refused_is_refused_for_one_that_is_cut_off(bench: Bench, early: bool) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    if early:
        there[1].lose()
    there[0].ack(given.id, ok=False, reason="rank 1 did not answer", verdict="nobody")
    open_before = not given.done
    if not early:
        there[1].lose()

    assert open_before is not early
    assert given.done
    assert given.acknowledgements["train_1"].reason == "rank 1 did not answer"
    assert frames(back(bench, there[1], 1, world=2)) == []


def test_what_only_one_rank_refuses_is_open_for_one_that_is_cut_off(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    there[1].lose()
    there[0].ack(given.id, ok=False, reason="the store failed")

    assert not given.done


def back(bench: Bench, lost: Threadlet, rank: int, world: int = 4) -> Threadlet:
    fields = {"group": "train", "devices": [], "instance": lost.instance}
    return Threadlet(bench, f"train_{rank}", cohort=["c1", rank, world], **fields)


def test_ranks_that_never_came_are_named_by_their_numbers(bench: Bench) -> None:
    there = ranks(bench, there=2)
    bench.wait(RECONNECT_WITHIN, *there)

    assert "rank 2, rank 3 are not connected" in str(give(bench, "train").acknowledgements["train_0"].reason)


def test_one_rank_alone_is_told_how_to_take_commands_by_itself(bench: Bench) -> None:
    bench.wait(RECONNECT_WITHIN, *ranks(bench, there=1))

    assert "cohort=False" in str(give(bench, "train").acknowledgements["train_0"].reason)


def test_a_cohort_gets_one_command_at_a_time(bench: Bench) -> None:
    there = ranks(bench)
    first, second = give(bench, "train"), give(bench, "train", CommandKind.PAUSE)

    for one in there[:3]:
        one.ack(first.id)
    before = [len(frames(one)) for one in there]
    there[3].ack(first.id, ok=False, reason="no")

    assert before == [1] * 4
    assert [frames(one)[-1][1] for one in there] == [second.id] * 4


def test_a_command_in_the_queue_is_refused_if_a_rank_has_gone_meanwhile(bench: Bench) -> None:
    there = ranks(bench)
    first = give(bench, "train")
    others = [give(bench, "train") for _ in range(3)]
    there[3].lose()
    for one in there[:3]:
        one.ack(first.id)
    bench.wait(20, *there[:3])  # the rank has failed, so the first command is done

    assert all(one.done for one in [first, *others])
    assert "train_3 is not connected" in str(others[0].acknowledgements["train_0"].reason)
    assert [len(frames(one)) for one in there[:3]] == [1] * 3


def test_a_rank_that_reconnects_gets_the_command_again_and_no_later_one(bench: Bench) -> None:
    there = ranks(bench)
    first = give(bench, "train")
    give(bench, "train")
    there[1].lose()

    again = Threadlet(bench, "train_1", group="train", cohort=["c1", 1, 4], instance=there[1].instance)

    assert [(frame[1], frame[5]) for frame in frames(again)] == [(first.id, "c1")]


def test_a_restarted_weaver_knows_the_cohort_and_its_commands(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    there = ranks(bench)
    first = give(bench, "train")
    bench.restart()
    second = give(bench, "train")

    back_again = [back(bench, one, rank) for rank, one in enumerate(there)]
    before = [[(frame[1], frame[5]) for frame in frames(one)] for one in back_again]
    for one in back_again:
        one.ack(first.id)

    assert before == [[(first.id, "c1")]] * 4
    assert [one.last_command() for one in back_again] == [second.id] * 4


def test_a_rank_says_later_that_it_is_in_a_cohort_or_no_longer(bench: Bench) -> None:
    there = [Threadlet(bench, f"train_{rank}", group="train") for rank in range(2)]
    for rank, one in enumerate(there):
        one.say("cohort", "c1", rank, 2)

    together = give(bench, "train")
    for one in there:
        one.ack(together.id)
        one.say("cohort", "", 0, 0)
    alone = give(bench, "train_1")

    assert frames(there[1]) == [
        ["command", together.id, "update_config", LR, False, "c1"],
        ["command", alone.id, "update_config", LR],
    ]


def test_commands_about_devices_are_for_single_ranks(bench: Bench) -> None:
    there = ranks(bench, world=2)
    bench.weaver.known.register_devices(bench.weaver.known.replicas["train_0"], [GPU])

    bench.weaver.dispatcher.give(CommandKind.DEACTIVATE_DEVICE, {"device": "GPU-0"}, None, "ann", bench.now)
    bench.commit()

    assert [[frame[4:] for frame in frames(one)] for one in there] == [[[]], []]


def test_a_policy_pauses_all_ranks_and_not_one(bench: Bench) -> None:
    there = ranks(bench, world=2)
    bench.weaver.known.register_devices(bench.weaver.known.replicas["train_0"], [GPU])
    bench.weaver.set_policy("train", "pause", "ann", bench.now)

    bench.weaver.dispatcher.fail_device("GPU-0", "Xid 79", "ann", bench.now)
    bench.commit()

    paused = [[frame for frame in frames(one) if frame[2] == "pause"] for one in there]
    assert [one[0][5] for one in paused] == ["c1", "c1"]


def test_ranks_started_again_get_what_commands_had_set(bench: Bench) -> None:
    before = ranks(bench)
    given = give(bench, "train")
    for one in before:
        one.ack(given.id, changes={"learning_rate": {"old": 0.1, "new": 0.01}})
        one.say("bye", "exit code 1", "failed")
    bench.now += 5
    after = [started_again(bench, rank, "c2") for rank in range(4)]
    first = [frames(one) for one in after]
    for one in after:
        one.ack(one.last_command(), changes={"learning_rate": {"old": 0.1, "new": 0.01}})
        one.say("bye", "exit code 1", "failed")
    bench.now += 5
    once_more = [started_again(bench, rank, "c3") for rank in range(4)]

    assert [[frame[2:] for frame in told] for told in first] == [[["update_config", LR, False, "c2"]]] * 4
    assert [[frame[2:] for frame in frames(one)] for one in once_more] == [[["update_config", LR, False, "c3"]]] * 4


def test_a_new_run_of_the_name_gets_nothing(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    for one in there:
        one.ack(given.id, changes={"learning_rate": {"old": 0.1, "new": 0.01}})
        one.say("bye", "over", "finished")

    again = ranks(bench, world=2, cohort="c2")

    assert [frames(one) for one in again] == [[], []]


def test_a_single_process_started_again_gets_its_values(bench: Bench) -> None:
    there = Threadlet(bench, "alone", group="alone")
    given = give(bench, "alone")
    there.ack(given.id, changes={"learning_rate": {"old": 0.1, "new": 0.01}})
    there.say("bye", "exit code 1", "failed")

    again = Threadlet(bench, "alone", group="alone", restarted=1)

    assert [frame[2:] for frame in frames(again)] == [["update_config", LR]]


def test_values_come_again_in_the_order_in_which_they_were_set(bench: Bench) -> None:
    there = Threadlet(bench, "alone", group="alone")
    for key in ("learning_rate", "learning_rate_factor", "learning_rate"):
        given = give(bench, "alone")
        there.ack(given.id, changes={key: {"old": None, "new": 0.5}})
    there.say("bye", "exit code 1", "failed")

    again = Threadlet(bench, "alone", group="alone", restarted=1)

    (told,) = frames(again)
    assert list(told[3]) == ["learning_rate_factor", "learning_rate"]


def killed_after_a_change(bench: Bench) -> None:
    """Four ranks that have changed, and have ended."""
    before = ranks(bench)
    given = give(bench, "train")
    for one in before:
        one.ack(given.id, changes={"learning_rate": {"old": 0.1, "new": 0.01}})
        one.say("bye", "exit code 1", "failed")
    bench.now += 5


def test_values_that_wait_for_the_last_rank_outlive_the_weaver(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    killed_after_a_change(bench)
    there = [started_again(bench, rank, "c2") for rank in range(3)]
    bench.restart()
    for rank, one in enumerate(there):
        fields = {"group": "train", "devices": [], "restarted": 4, "instance": one.instance}
        there[rank] = Threadlet(bench, f"train_{rank}", cohort=["c2", rank, 4], **fields)
    early = [frames(one) for one in there]

    there.append(started_again(bench, 3, "c2"))

    assert early == [[], [], []]
    assert [[frame[2:] for frame in frames(one)] for one in there] == [[["update_config", LR, False, "c2"]]] * 4
    bench.restart()
    assert "kept" not in bench.weaver.known.replicas["train_0"].to_dict()


def test_values_that_waited_when_the_ranks_died_again_are_not_lost(bench: Bench) -> None:
    killed_after_a_change(bench)
    for rank in range(3):
        started_again(bench, rank, "c2").say("bye", "exit code 1", "failed")
    bench.now += 5

    after = [started_again(bench, rank, "c3") for rank in range(4)]

    assert [[frame[2:] for frame in frames(one)] for one in after] == [[["update_config", LR, False, "c3"]]] * 4


def test_a_rank_that_joins_others_which_lived_on_gets_their_values_and_not_its_own(bench: Bench) -> None:
    lived, died = ranks(bench, world=2)
    given = give(bench, "train")
    for one in (lived, died):
        one.ack(given.id, changes={"learning_rate": {"old": 0.1, "new": 0.01}})
    bench.now += 5
    died.say("bye", "exit code 1", "failed")
    bench.now += 5
    again = Threadlet(bench, "train_1", group="train", devices=[], restarted=2)
    for rank, one in enumerate((lived, again)):
        one.say("cohort", "c2", rank, 2)

    assert frames(again) == []
    assert len(frames(lived)) == 1


@pytest.mark.parametrize("last", [0, 3], ids=["before the others", "last"])
def test_a_rank_of_another_host_gets_the_values_of_ranks_that_were_started_again(bench: Bench, last: int) -> None:
    killed_after_a_change(bench)
    after = [started_again(bench, rank, "c2") for rank in range(1, 4 if last else 3)]
    after.append(Threadlet(bench, "train_0", group="train", devices=[], cohort=["c2", 0, 4]))
    after += [] if last else [started_again(bench, 3, "c2")]

    assert [one.commands() for one in after] == [[("update_config", LR)]] * 4


def test_the_others_are_told_that_a_rank_has_applied_a_command(bench: Bench) -> None:
    there = [
        Threadlet(bench, f"train_{rank}", group="train", devices=[], cohort=["c1", rank, 3], hears=rank != 2)
        for rank in range(3)
    ]
    given = give(bench, "train")
    there[1].lose()
    there[0].ack(given.id, ok=False, reason="the store failed")
    there[0] = Threadlet(
        bench, "train_0", group="train", cohort=["c1", 0, 3], instance=there[0].instance, hears=True
    )
    refused = [heard(one) for one in there]
    there[2].ack(given.id)

    fields = {"group": "train", "cohort": ["c1", 1, 3], "instance": there[1].instance}
    again = Threadlet(bench, "train_1", **fields, hears=True)

    assert refused == [[], [], []]
    assert heard(there[0]) == []  # it has answered
    assert heard(again) == [given.id]


def test_an_older_threadlet_is_not_told_of_the_others(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    there[0].ack(given.id)

    assert heard(there[1]) == []


def heard(threadlet: Threadlet) -> list[str]:
    return [frame[1] for frame in threadlet.told if frame[0] == "applied_by_others"]


@pytest.mark.parametrize("again", [False, True])
def test_ranks_whose_pause_another_one_did_not_survive_go_on(bench: Bench, again: bool) -> None:
    there = ranks(bench, world=3)
    pause = give(bench, "train", CommandKind.PAUSE)
    for one in there:
        one.ack(pause.id)
    there[0].say("bye", "exit code 1", "failed")
    if again:
        there[0] = Threadlet(bench, "train_0", group="train", devices=[])

    changed, resumed = give(bench, "train"), give(bench, "train", CommandKind.RESUME)

    assert changed.done
    assert {made.reason for made in changed.acknowledgements.values()} == {
        f"{'rank 0' if again else 'train_0'} is not connected, and all 3 ranks change at one step"
    }
    assert [frames(one)[-1][1:3] for one in there[1:]] == [[resumed.id, "resume"]] * 2
    assert "c1" not in frames(there[1])[-1]


def test_a_rank_that_is_only_cut_off_in_a_pause_is_waited_for(bench: Bench) -> None:
    there = ranks(bench, world=2)
    pause = give(bench, "train", CommandKind.PAUSE)
    for one in there:
        one.ack(pause.id)
    there[0].lose()

    resumed = give(bench, "train", CommandKind.RESUME)
    bench.wait(RECONNECT_WITHIN, there[1])

    assert "train_0 is not connected" in str(resumed.acknowledgements["train_1"].reason)


def test_a_rank_that_has_no_place_yet_does_not_change_without_the_others(bench: Bench) -> None:
    there = ranks(bench, world=2, there=1)
    early = Threadlet(bench, "train_1", group="train", devices=[])

    given = give(bench, "train")
    waited = not given.done
    bench.wait(RECONNECT_WITHIN, *there, early)

    assert waited
    assert given.done
    assert len({made.reason for made in given.acknowledgements.values()}) == 1
    assert frames(early) == frames(there[0]) == []


def test_the_replica_shows_its_place(bench: Bench) -> None:
    ranks(bench, world=2)

    info = bench.weaver.known.replicas["train_1"].info("ann", [])

    assert info["cohort"] == {"id": "c1", "rank": 1, "world": 2}


@pytest.mark.parametrize("place", [["c1", -1, 2], ["c1", 0], ["c1", 0, 10**9], [1, 0, 2], "c1", ["x" * 300, 0, 2]])
def test_a_place_that_makes_no_sense_is_refused(place: object) -> None:
    with pytest.raises(ProtocolMismatch):
        ThreadletHello.from_body(["hello", hello_of("any", "train_0", "i", cohort=place)])


def test_a_place_goes_there_and_back() -> None:
    place = CohortPlace("c1", 3, 4)

    assert CohortPlace.from_body(place.to_body()) == place


def moved(there: list[Threadlet], id: str) -> None:
    for one in there:
        one.ack(id, ok=False, reason="the ranks of the job have changed", verdict="moved")


def place(there: list[Threadlet], cohort: str) -> None:
    """Let them be the ranks of a job."""
    for rank, one in enumerate(there):
        one.say("cohort", cohort, rank, len(there))


def again(there: list[Threadlet], given: GivenCommand, cohort: str) -> bool:
    """Whether they have got a command once more, as ranks of a cohort."""
    wanted = [f"{given.id}\x1f1", given.kind.value, given.command.params, False, cohort]
    return all(wanted in [frame[1:] for frame in frames(one)] for one in there)


def test_a_command_goes_to_the_ranks_that_form_the_job_now(bench: Bench) -> None:
    there = ranks(bench, world=3)
    given = give(bench, "train")
    moved(there[:2], given.id)
    place(there[:2], "c2")
    there[2].say("bye", "exit code 1", "failed")
    bench.wait(0.25, *there[:2])
    got = again(there[:2], given, "c2")
    for one in there[:2]:
        one.ack(one.last_command())

    assert got
    assert given.done
    assert [given.acknowledgements[f"train_{rank}"].ok for rank in range(3)] == [True, True, False]
    assert given.acknowledgements["train_0"].step == 5


def test_a_command_goes_to_a_rank_that_has_joined_too(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    moved(there, given.id)
    there.append(Threadlet(bench, "train_2", group="train", devices=[]))
    place(there, "c2")
    for one in there:
        one.ack(one.last_command())

    assert given.done
    assert [made.ok for made in given.acknowledgements.values()] == [True] * 3
    assert given.replicas == ["train_0", "train_1", "train_2"]


def test_a_rank_that_is_left_alone_takes_the_command_by_itself(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    there[1].say("bye", "exit code 1", "failed")
    moved(there[:1], given.id)
    there[0].say("cohort", "", 0, 0)
    got = frames(there[0])[-1]
    there[0].ack(got[1])

    assert got == ["command", f"{given.id}\x1f1", "update_config", LR]
    assert given.acknowledgements["train_0"].ok


def test_ranks_that_have_not_changed_in_the_end_get_the_command_again(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    moved(there, given.id)
    early = [len(frames(one)) for one in there]
    bench.wait(1.5, *there)

    assert early == [1, 1]
    assert again(there, given, "c1")


def test_a_command_moves_only_so_often_and_is_refused_then(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    for number in range(MOST_ATTEMPTS + 1):
        moved(there, there[0].last_command())
        place(there, f"c{number + 2}")

    assert given.done
    assert {made.reason for made in given.acknowledgements.values()} == {"the ranks of the job have changed"}
    assert [len(frames(one)) for one in there] == [MOST_ATTEMPTS + 1] * 2


def test_a_command_whose_ranks_do_not_come_together_again_is_refused(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    moved(there, given.id)
    there[0].say("cohort", "c2", 0, 2)
    bench.wait(MOVED_WITHIN, *there)

    assert given.done
    assert {made.reason for made in given.acknowledgements.values()} == {"the ranks of the job have changed"}
    assert bench.weaver.dispatcher.cohort_commands.settled


def test_a_command_that_names_its_ranks_does_not_go_to_others(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, ["train_0", "train_1"])
    moved(there, given.id)
    there.append(Threadlet(bench, "train_2", group="train", devices=[]))
    place(there, "c2")
    bench.wait(MOVED_WITHIN, *there)

    assert given.done
    assert frames(there[2]) == []


def test_commands_that_wait_behind_one_that_moves_follow_it_in_order(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = [give(bench, "train"), give(bench, "train", CommandKind.PAUSE)]
    place(there, "c2")
    moved(there, given[0].id)
    got = []
    for one in given:
        got.append([[(frame[2], frame[5]) for frame in frames(rank)] for rank in there])
        for rank in there:
            rank.ack(one.sent_id(f"train_{there.index(rank)}"))

    changes = [("update_config", "c1"), ("update_config", "c2")]
    assert got == [[changes] * 2, [[*changes, ("pause", "c2")]] * 2]
    assert all(made.ok for one in given for made in one.acknowledgements.values())


def test_a_late_word_on_an_attempt_before_changes_nothing(bench: Bench) -> None:
    there = ranks(bench, world=2)
    given = give(bench, "train")
    moved(there, given.id)
    place(there, "c2")
    there[0].ack(given.id, ok=False, reason="late")

    assert not given.acknowledgements


def test_a_restarted_weaver_knows_to_which_ranks_a_command_has_gone(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    there = ranks(bench, world=2)
    given = give(bench, "train")
    moved(there, given.id)
    place(there, "c2")
    bench.restart()
    back_again = [
        Threadlet(bench, f"train_{rank}", group="train", cohort=["c2", rank, 2], instance=one.instance)
        for rank, one in enumerate(there)
    ]

    assert again(back_again, given, "c2")


def groups_started_again(bench: Bench) -> None:
    """Two replica groups of torchft, of one rank each, that have changed, and have ended."""
    before = ranks(bench, world=2)
    given = give(bench, "train")
    for one in before:
        one.ack(given.id, changes={"learning_rate": {"old": 0.1, "new": 0.01}})
        one.say("bye", "exit code 1", "failed")
    bench.now += 5


def test_replica_groups_started_again_get_what_commands_had_set(bench: Bench) -> None:
    groups_started_again(bench)
    after = [Threadlet(bench, f"train_{rank}", group="train", devices=[], restarted=1) for rank in range(2)]
    alone = [frames(one)[-1] for one in after]
    place(after, "c2")
    for one, frame in zip(after, alone, strict=True):
        one.ack(frame[1], ok=False, reason="it was sent before", verdict="moved")

    assert [len(frame) for frame in alone] == [4, 4]  # without a cohort
    assert [[frame[2:] for frame in frames(one)[1:]] for one in after] == [[["update_config", LR, False, "c2"]]] * 2


def test_a_replica_group_that_comes_later_does_not_bring_older_values(bench: Bench) -> None:
    groups_started_again(bench)
    first = Threadlet(bench, "train_0", group="train", devices=[], restarted=1)
    first.ack(first.last_command(), changes={"learning_rate": {"old": 0.1, "new": 0.01}})
    bench.now += 5
    later = Threadlet(bench, "train_1", group="train", devices=[], restarted=1)
    alone = later.last_command()
    place([first, later], "c2")
    later.ack(alone, ok=False, reason="it was sent before", verdict="moved")

    assert len(frames(first)) == 1
    assert len(frames(later)) == 1


def halves(bench: Bench) -> list[Threadlet]:
    """Two ranks, of which one has changed to another quorum, and the other one has not yet."""
    there = ranks(bench, world=2)
    there[0].say("cohort", "c2", 0, 2)
    return there


def test_a_command_given_while_ranks_are_in_two_quorums_goes_to_the_new_one(bench: Bench) -> None:
    there = halves(bench)
    given = give(bench, "train")
    early = [frames(one) for one in there]
    bench.wait(RECONNECT_WITHIN + 1, *there)
    there[1].say("cohort", "c2", 1, 2)
    for one in there:
        one.ack(one.last_command())

    assert early == [[], []]
    assert [[frame[5] for frame in frames(one)] for one in there] == [["c2"]] * 2
    assert given.done
    assert [made.ok for made in given.acknowledgements.values()] == [True, True]
    assert bench.weaver.dispatcher.cohort_commands.settled


@pytest.mark.parametrize("late", [1, 2], ids=["that stays", "that joins"])
def test_a_command_given_while_a_third_rank_joins_goes_to_all(bench: Bench, late: int) -> None:
    there = [*ranks(bench, world=2), Threadlet(bench, "train_2", group="train", devices=[])]
    for rank in {0, 1, 2} - {late}:
        there[rank].say("cohort", "c2", rank, 3)
    given = give(bench, "train")
    there[late].say("cohort", "c2", late, 3)
    ids = {one.last_command() for one in there}
    for one in there:
        one.ack(one.last_command())

    assert len(ids) == 1
    assert {id: made.ok for id, made in given.acknowledgements.items()} == dict.fromkeys(given.replicas, True)


def test_a_command_goes_to_a_new_quorum_whose_first_rank_was_there_before_the_former_ones_refused(
    bench: Bench,
) -> None:
    there = ranks(bench, world=2)
    there.append(Threadlet(bench, "train_2", group="train", devices=[], cohort=["c2", 2, 3]))
    given = give(bench, "train")
    sent = [len(frames(one)) for one in there]
    moved(there[:1], given.id)
    place(there, "c2")
    between = [len(frames(one)) for one in there]
    moved(there[1:2], given.id)
    for one in there:
        one.ack(one.last_command())

    assert sent == between == [1, 1, 0]
    assert [frames(one)[-1][1] for one in there] == [f"{given.id}\x1f1"] * 3
    assert all(made.ok for made in given.acknowledgements.values())


def test_a_rank_that_joins_those_that_have_applied_a_command_does_not_wait_for_it(bench: Bench) -> None:
    there = ranks(bench, world=2)
    there.append(Threadlet(bench, "train_2", group="train", devices=[], cohort=["c2", 2, 3]))
    given = give(bench, "train")
    for one in there[:2]:
        one.ack(given.id)
    place(there, "c2")
    bench.wait(RECONNECT_WITHIN, *there)

    assert [made.ok for made in given.acknowledgements.values()] == [True, True, False]
    assert "before this one was theirs" in str(given.acknowledgements["train_2"].reason)


def test_a_rank_that_a_new_quorum_leaves_out_refuses_alone(bench: Bench) -> None:
    there = ranks(bench, world=3)
    there[0].say("cohort", "c2", 0, 2)
    given = give(bench, "train")
    there[1].say("cohort", "c2", 1, 2)
    for one in there[:2]:
        one.ack(one.last_command())
    before = given.done
    bench.wait(MOVED_WITHIN, *there)

    assert not before
    assert [made.ok for made in given.acknowledgements.values()] == [True, True, False]
    assert frames(there[2]) == []


def test_ranks_in_two_quorums_are_named_if_they_do_not_come_together(bench: Bench) -> None:
    there = halves(bench)
    bench.wait(MOVED_WITHIN - 1, *there)
    given = give(bench, "train")
    bench.wait(MOVED_WITHIN, *there)

    assert given.done
    assert {made.ok for made in given.acknowledgements.values()} == {False}
    assert not any(frames(one) for one in there)


def test_the_refusal_of_ranks_that_still_change_says_so(bench: Bench) -> None:
    there = halves(bench)
    given = give(bench, "train")
    for number in range(3):
        bench.wait(MOVED_WITHIN / 3, *there)
        there[0].say("cohort", f"c{number + 3}", 0, 2)

    assert given.done
    assert str(given.acknowledgements["train_1"].reason) == (
        "train_1 and train_0 are in two groups of ranks, as their job changes them: give it again"
    )


def test_a_command_in_the_first_second_of_a_job_waits_for_the_ranks_that_come(bench: Bench) -> None:
    there = ranks(bench, there=2)
    given = give(bench, "train")
    bench.wait(1, *there)
    there += [
        Threadlet(bench, f"train_{rank}", group="train", devices=[], cohort=["c1", rank, 4]) for rank in (2, 3)
    ]
    for one in there:
        one.ack(one.last_command())

    assert [[frame[1:] for frame in frames(one)] for one in there] == [
        [[given.id, "update_config", LR, False, "c1"]]
    ] * 4
    assert all(made.ok for made in given.acknowledgements.values())


def test_a_process_that_is_no_rank_takes_what_the_ranks_have_waited_for(bench: Bench) -> None:
    there = [*ranks(bench, world=2, there=1), Threadlet(bench, "train_e", group="train", devices=[])]
    given = give(bench, "train")
    there.insert(1, Threadlet(bench, "train_1", group="train", devices=[], cohort=["c1", 1, 2]))

    assert [frames(one)[0][5:] for one in there] == [["c1"], ["c1"], []]
    assert {one.last_command() for one in there} == {given.id}


def test_a_command_moves_for_one_job_and_not_for_another(bench: Bench) -> None:
    there = ranks(bench, world=2)
    other = Threadlet(bench, "eval_0", group="eval", devices=[])
    given = give(bench, "*")
    moved(there, given.id)
    place(there, "c2")
    for one in [*there, other]:
        one.ack(one.last_command())

    assert other.last_command() == given.id
    assert given.done
    assert all(made.ok for made in given.acknowledgements.values())


def test_attempts_that_an_earlier_weaver_has_stored_are_those_of_all_ranks(bench: Bench) -> None:
    ranks(bench, world=2)
    given = give(bench, "train")

    stored = GivenCommand.from_dict({**given.to_dict(), "attempts": 2})

    assert stored.attempts == {"train_0": 2, "train_1": 2}
