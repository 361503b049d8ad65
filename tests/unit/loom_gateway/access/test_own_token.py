"""The file with the gateway's own token."""

from __future__ import annotations

from pathlib import Path

import pytest

from loom.errors import AuthenticationError, TokenFileError, TokenRevoked
from loom.mutual_auth.over_http import key_id
from loom.token_file import TokenFile, digest
from loom_gateway.access import token_authority
from loom_gateway.access.token_authority import OwnTokenFile, TokenAuthority


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("the first\n".replace(" ", "-"))
    path.chmod(0o600)
    return path


def replace(path: Path, text: str) -> None:
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.chmod(0o600)
    fresh.replace(path)


def test_a_replaced_token_is_accepted_and_the_old_one_refused(path: Path) -> None:
    authority = TokenAuthority(OwnTokenFile(path))
    first = authority.check(digest("the-first"))

    replace(path, "the-second")

    assert authority.check(digest("the-second")).user == "admin"
    with pytest.raises(AuthenticationError):
        authority.check(digest("the-first"))
    with pytest.raises(TokenRevoked, match="the gateway's own token was replaced: connect with the new one"):
        authority.confirm_shown(first)
    authority.confirm(first.id)  # its sessions go on


def test_while_the_file_has_no_token_the_last_one_stays(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = TokenAuthority(OwnTokenFile(path))

    replace(path, "")
    authority.refresh()
    authority.refresh()
    assert authority.check(digest("the-first"))
    path.unlink()
    assert authority.check(digest("the-first"))

    assert len([one for one in caplog.messages if "its content is no token" in one]) == 1
    replace(path, "the-second")
    assert authority.check(digest("the-second"))


@pytest.mark.parametrize(
    ("mode", "said"), [(0o622, "others may write to it"), (0o640, "drivers of other user ids could read it")]
)
def test_a_file_of_others_is_refused(path: Path, mode: int, said: str) -> None:
    path.chmod(mode)
    with pytest.raises(TokenFileError, match=said):
        OwnTokenFile(path, secret=True).read()


@pytest.mark.parametrize("text", ["", "two\nlines", "x" * 5000, "\x07"])
def test_what_is_no_token_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(TokenFileError, match="its content is no token"):
        OwnTokenFile(path).read()


def test_a_proof_costs_the_same_however_many_tokens_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs a token to ask for one."""
    file = TokenFile(tmp_path / "tokens.json")
    texts = [file.create(f"token {number}", "view")[1] for number in range(30)]
    authority = TokenAuthority("own", file)
    authority.reload()
    hashed: list[str] = []
    monkeypatch.setattr(token_authority, "key_id", lambda shown: [key_id(shown), hashed.append(shown)][0])

    for text in (*texts, "own"):
        assert authority.prove(key_id(digest(text)), "00" * 16)["proof"]
    with pytest.raises(AuthenticationError):
        authority.prove("0" * 32, "00" * 16)

    assert len(hashed) <= 32  # one each, of the gateway's own
