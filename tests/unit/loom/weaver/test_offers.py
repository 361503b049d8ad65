"""Commands that nothing in a replica carries out: it says so beforehand, and the weaver refuses them at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loom.control.commands import Acknowledgement, CommandKind
from loom.control.handshake import EVERYTHING_OFFERED, Offers, ThreadletHello
from loom.errors import ProtocolMismatch
from tests.unit.loom.weaver.bench import Bench, Threadlet
from tests.unit.loom.weaver.raw_threadlet import hello_of

WHY = "nothing here saves"
SAVELESS = [{"save": WHY}, False]


def rank(bench: Bench, number: int = 0, world: int = 1, offers: list[Any] | None = None) -> Threadlet:
    fields: dict[str, Any] = {} if offers is None else {"offers": offers}
    place = {"cohort": ["c1", number, world]} if world > 1 else {}
    return Threadlet(
        bench, f"train_{number}", group="train", devices=[], handlers={"lr": "float"}, **place, **fields
    )


def give(bench: Bench, kind: CommandKind, **params: Any) -> dict[str, Acknowledgement]:
    """Give a command to the group; return the answers that are there at once."""
    given = bench.weaver.dispatcher.give(kind, params, "train", "ann", bench.now)
    bench.commit()
    return given.acknowledgements


def test_a_command_that_is_not_offered_is_refused_without_asking_the_replica(bench: Bench) -> None:
    one = rank(bench, offers=SAVELESS)

    refused = give(bench, CommandKind.SAVE)

    assert refused["train_0"].reason == WHY
    assert one.commands() == []
    assert bench.event("command")["refused"] == {"train_0": WHY}


def test_what_one_rank_does_not_offer_is_refused_for_all_of_its_job(bench: Bench) -> None:
    there = [rank(bench, 0, 2, [{}, False]), rank(bench, 1, 2, SAVELESS)]

    assert {id: made.reason for id, made in give(bench, CommandKind.SAVE).items()} == {
        "train_0": WHY,
        "train_1": WHY,
    }
    assert [one.commands() for one in there] == [[], []]


def test_what_only_some_of_a_group_offer_goes_to_these(bench: Bench) -> None:
    there = [rank(bench, 0, offers=[{}, False]), rank(bench, 1, offers=SAVELESS)]

    assert set(give(bench, CommandKind.SAVE)) == {"train_1"}
    assert [len(one.commands()) for one in there] == [1, 0]


def test_offers_change_while_the_replica_runs(bench: Bench) -> None:
    one = rank(bench)
    one.say("offers", *SAVELESS)
    before = give(bench, CommandKind.SAVE)
    shown = bench.weaver.known.replicas["train_0"].info("ann", [])["not_offered"]
    one.say("offers", {}, False)
    after = give(bench, CommandKind.SAVE)

    assert set(before) == {"train_0"}
    assert shown == {"save": WHY}
    assert after == {}
    assert bench.weaver.known.replicas["train_0"].described()["not_offered"] == {}


@pytest.mark.parametrize(
    ("world", "params", "refused"),
    [(1, {"no": 1}, True), (1, {"no": 1, "lr": 1}, False), (2, {"no": 1, "lr": 1}, True), (2, {"lr": 1}, False)],
)
def test_keys_without_a_handler_are_refused_at_once(
    bench: Bench, world: int, params: dict[str, Any], refused: bool
) -> None:
    for number in range(world):
        rank(bench, number, world, SAVELESS)

    answers = give(bench, CommandKind.UPDATE_CONFIG, **params)

    assert len(answers) == (world if refused else 0)
    for made in answers.values():
        assert made.refused == {"no": "no: no handler for it in this replica; it has handlers for: lr"}


def test_a_replica_that_has_not_said_what_it_offers_is_asked(bench: Bench) -> None:
    one = rank(bench)

    assert give(bench, CommandKind.UPDATE_CONFIG, other=1) == {}
    assert len(one.commands()) == 1


def test_a_replica_that_is_away_may_come_back_with_other_offers(bench: Bench) -> None:
    one = rank(bench, offers=SAVELESS)
    one.lose()

    assert give(bench, CommandKind.SAVE) == {}
    again = Threadlet(bench, "train_0", group="train", devices=[], instance=one.instance)
    assert len(again.commands()) == 1


def test_a_restarted_weaver_shows_what_is_not_offered(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "weaver.db")
    rank(bench, offers=SAVELESS)
    bench.restart()

    assert bench.weaver.known.replicas["train_0"].info("ann", [])["not_offered"] == {"save": WHY}


@pytest.mark.parametrize(
    "offers",
    ["save", [], [{}, 1], [{"save": 1}, True], [{1: "no"}, True], [{str(one): "" for one in range(65)}, True]],
)
def test_offers_that_make_no_sense_are_refused(offers: object) -> None:
    with pytest.raises(ProtocolMismatch):
        ThreadletHello.from_body(["hello", hello_of("any", "train_0", "i", offers=offers)])


def test_offers_go_there_and_back_with_reasons_of_bounded_length() -> None:
    made = Offers({"save": "x" * 501}, False)

    assert Offers.from_body(made.to_body()) == Offers({"save": "x" * 500}, False)
    assert Offers.from_body(EVERYTHING_OFFERED.to_body()) == EVERYTHING_OFFERED
