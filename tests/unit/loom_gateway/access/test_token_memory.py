"""What was revoked stays so: when the token file is gone, damaged, or replaced by an old copy."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import loom
from loom.token_file import Token, TokenFile, digest
from loom_gateway.access.token_authority import TokenAuthority, TokenMemory

BOUND = 20.0


class Gateways:
    """The gateways that come after each other on one state folder."""

    def __init__(self, folder: Path) -> None:
        self.file = TokenFile(folder / "tokens.json")
        self._state = str(folder / "state.json")
        self._known: list[TokenMemory] = []
        self.good, self.good_text = self.file.create("good", "drive")
        self.bad, self.bad_text = self.file.create("bad", "drive")
        self.old_copy = self.file.path.read_bytes()
        self.first = self.next()
        self.first.reload()
        self.file.revoke(self.bad.id)

    def next(self) -> TokenAuthority:
        for known in self._known:
            known.written.result(BOUND)
        self._known.append(TokenMemory(self._state))
        return TokenAuthority("own", self.file, known=self._known[-1])


@pytest.fixture
def gateways(tmp_path: Path) -> Gateways:
    return Gateways(tmp_path)


def check(authority: TokenAuthority, text: str) -> Token:
    return authority.check(digest(text), text)


def damage(file: TokenFile) -> None:
    file.path.write_text("{")


def remove(file: TokenFile) -> None:
    file.path.unlink()


def test_a_gateway_that_runs_goes_by_what_the_file_said(
    gateways: Gateways, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(loom.TokenRevoked):
        check(gateways.first, gateways.bad_text)
    damage(gateways.file)
    for _ in range(3):
        assert check(gateways.first, gateways.good_text).id == gateways.good.id
        with pytest.raises(loom.TokenRevoked):
            check(gateways.first, gateways.bad_text)
        gateways.first.confirm(gateways.good.id)
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


@pytest.mark.guarantees(
    "nothing lost",
    "A revoked token stays refused when the token file is gone, damaged or an old copy, also by the next gateway",
)
@pytest.mark.parametrize("lose", [damage, remove])
def test_the_next_gateway_refuses_minted_tokens_and_says_why(gateways: Gateways, lose: object) -> None:
    with pytest.raises(loom.TokenRevoked):
        check(gateways.first, gateways.bad_text)
    content = gateways.file.path.read_bytes()
    assert callable(lose)
    lose(gateways.file)
    authority = gateways.next()
    for text in (gateways.good_text, gateways.bad_text):
        for _ in range(2):
            with pytest.raises(loom.AuthenticationError, match=r"cannot look: .*tokens\.json") as refused:
                check(authority, text)
            assert not isinstance(refused.value, loom.TokenRevoked)
    assert check(authority, "own").scope == "admin"
    authority.confirm(gateways.good.id)  # that of a session, which is not ended
    with pytest.raises(loom.TokenRevoked):
        authority.confirm(gateways.bad.id)

    gateways.file.path.write_bytes(content)
    gateways.file.path.chmod(0o600)
    assert check(authority, gateways.good_text).id == gateways.good.id
    with pytest.raises(loom.TokenRevoked):
        check(authority, gateways.bad_text)


@pytest.mark.parametrize("again", [False, True])
def test_an_old_copy_of_the_file_makes_no_revoked_token_good(gateways: Gateways, again: bool) -> None:
    with pytest.raises(loom.TokenRevoked):
        check(gateways.first, gateways.bad_text)
    gateways.file.path.write_bytes(gateways.old_copy)
    authority = gateways.next() if again else gateways.first
    with pytest.raises(loom.TokenRevoked):
        check(authority, gateways.bad_text)
    assert check(authority, gateways.good_text).id == gateways.good.id


def test_without_a_token_file_there_is_nothing_to_miss(tmp_path: Path) -> None:
    authority = TokenAuthority("own", TokenFile(tmp_path / "tokens.json"), known=TokenMemory())
    with pytest.raises(loom.AuthenticationError, match="does not accept"):
        check(authority, "unknown")
    with pytest.raises(loom.TokenRevoked):
        authority.confirm("a session's owner")
