"""The file of tokens, and ``loom token``, which writes it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import loom
from loom.token_file import Token, TokenFile, default_path, digest
from loom_gateway.access import token_authority
from loom_gateway.access.control import AccessControl
from loom_gateway.access.credentials import credential_of
from loom_gateway.access.sessions import Principal
from loom_gateway.access.sign_ins import SignIns
from loom_gateway.access.token_authority import JUMP_PATIENCE, SignedToken, SteadyDay, TokenAuthority
from tests.support.processes import run

LOOM = "import sys; from loom.cli import main; main()"


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "folder" / "tokens.json")


def bearer(token: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {token}".encode())]


# -- the file -----------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_has_no_tokens(file: TokenFile) -> None:
    assert file.read() == []
    assert file.version() == ()


def test_a_file_in_a_home_that_is_no_folder_has_no_tokens() -> None:
    file = TokenFile(Path("/dev/null/.local/state/loom/tokens.json"))

    assert (file.read(), file.version()) == ([], ())


def test_a_token_is_kept_as_its_hash(file: TokenFile) -> None:
    token, text = file.create("ci", "view", 60)

    assert file.read() == [token]
    assert token.sha256 == digest(text)
    assert text not in file.path.read_text()
    assert token.expires == pytest.approx(token.created + 60)
    assert len(text) >= 43  # 256 bits in base64


def test_only_its_owner_may_read_the_file(file: TokenFile) -> None:
    file.create("ci", "view")

    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700


def test_a_revoked_token_stays_in_the_list(file: TokenFile) -> None:
    token, _ = file.create("ci", "view")

    file.revoke(token.id)
    again = file.revoke(token.id)

    assert file.read() == [again]
    assert again.state(time.time()) == "revoked"


def test_a_token_expires() -> None:
    token = Token("id", "name", "view", "hash", created=0.0, expires=10.0)

    assert [token.state(now) for now in (9.9, 10.0)] == ["valid", "expired"]


def test_a_token_belongs_to_a_user(file: TokenFile) -> None:
    token, text = file.create("laptop", "drive", user="ann")

    assert (token.name, token.user) == ("laptop", "ann")
    assert file.read() == [token]
    assert TokenAuthority("own", file).check(digest(text)).user == "ann"


@pytest.mark.guarantees("users", "A token belongs to a user; the user of an older token is its name")
def test_the_user_of_an_older_token_is_its_name(file: TokenFile) -> None:
    file.create("ci", "view")
    content = json.loads(file.path.read_text())
    del content["tokens"][0]["user"]
    file.path.write_text(json.dumps(content))

    assert [token.user for token in file.read()] == ["ci"]


CYRILLIC_A = "\N{CYRILLIC SMALL LETTER A}"


@pytest.mark.guarantees("users", "No token can be made that looks like another user's")
@pytest.mark.parametrize(
    "user",
    [
        "",
        " ",
        "*",
        "a\nb",
        "x" * 101,
        "oidc:ann",
        "OIDC:ann",
        "oidc\N{FULLWIDTH COLON}ann",
        " ann",
        "ann ",
        "ann\N{NO-BREAK SPACE}",
        "a\N{ZERO WIDTH JOINER}nn",
        "an\N{COMBINING TILDE}n",
        "\N{FULLWIDTH LATIN SMALL LETTER A}nn",
        f"{CYRILLIC_A}nn",
        "\udc61nn",
    ],
)
def test_a_user_that_makes_no_sense_gets_no_token(file: TokenFile, user: str) -> None:
    with pytest.raises(loom.WrongArguments):
        file.create("laptop", "drive", user=user)
    assert not file.path.exists()


@pytest.mark.parametrize("user", ["анна", "Ωμέγα", "花子", "josé", "o'neill", "ann@example.com", "x" * 100])
def test_a_user_may_have_a_name_of_any_language(file: TokenFile, user: str) -> None:
    file.create(user, "drive")
    assert [token.user for token in file.read()] == [user]


@pytest.mark.guarantees("users", "No token can be made that looks like another user's")
@pytest.mark.parametrize(
    ("user", "name"),
    [
        ("Ann", None),
        ("ANN", "laptop"),
        ("bob", "ann"),
        ("bob", "Ann"),
        ("phone", None),
        ("Admin", None),
        ("bob", "admin"),
        ("gateway", None),
        ("carol", "\N{LATIN SMALL LETTER LONG S}am"),
    ],
)
def test_a_token_that_looks_like_another_users_is_not_made(file: TokenFile, user: str, name: str | None) -> None:
    file.create("phone", "view", user="ann")
    file.create("sam", "view")
    before = file.read()

    with pytest.raises(loom.WrongArguments):
        file.create(name or user, "drive", user=user)

    assert file.read() == before


def test_a_user_has_many_tokens_also_of_one_name(file: TokenFile) -> None:
    made = [file.create("ann", "drive")[0] for _ in range(2)] + [file.create("phone", "view", user="ann")[0]]
    assert file.read() == made


def test_a_token_of_a_user_of_openid_in_the_file_is_refused(file: TokenFile) -> None:
    token, text = file.create("laptop", "drive")
    content = json.loads(file.path.read_text())
    content["tokens"][0]["user"] = "oidc:ann"
    file.path.write_text(json.dumps(content))
    authority = TokenAuthority("own", file)

    with pytest.raises(loom.AuthenticationError):
        authority.check(digest(text))
    with pytest.raises(loom.TokenRevoked):
        authority.confirm(token.id)


def test_a_token_that_was_made_elsewhere_keeps_its_id_with_another_scope(file: TokenFile) -> None:
    file.accept("job", "drive", digest("a token"))
    (before,) = file.read()

    file.accept("job", "admin", digest("a token"))
    (after,) = file.read()
    file.accept("job", "admin", digest("another"))
    (other,) = file.read()

    assert (after.id, after.scope, after.user) == (before.id, "admin", "job")
    assert (other.id != before.id, other.sha256) == (True, digest("another"))


def test_each_change_changes_the_version(file: TokenFile) -> None:
    versions = {file.version()}
    token, _ = file.create("ci", "view")
    versions.add(file.version())
    file.revoke(token.id)
    versions.add(file.version())

    assert len(versions) == 3


def test_nothing_is_left_beside_the_file(file: TokenFile) -> None:
    file.create("ci", "view")
    with pytest.raises(loom.UnknownToken):
        file.revoke("nobody")

    assert sorted(path.name for path in file.path.parent.iterdir()) == ["tokens.json", "tokens.json.lock"]


@pytest.mark.parametrize(
    ("name", "scope", "expires"),
    [("ci", "root", None), ("", "view", None), ("a\nb", "view", None), ("ci", "view", 0), ("ci", "view", -1.0)],
)
def test_a_token_that_makes_no_sense_is_not_made(
    file: TokenFile, name: str, scope: str, expires: float | None
) -> None:
    with pytest.raises(loom.WrongArguments):
        file.create(name, scope, expires)
    assert not file.path.exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"version": 2, "tokens": []}',
        '{"version": 1}',
        '{"version": 1, "tokens": [{"id": "a"}]}',
        '{"version": 1, "tokens": [{"id": "a", "name": "b", "scope": "root", "sha256": "", "created": 0,'
        ' "expires": 0, "revoked": 0}]}',
    ],
)
def test_a_file_with_something_else_is_named(file: TokenFile, content: str) -> None:
    file.path.parent.mkdir()
    file.path.write_text(content)
    file.path.chmod(0o600)

    with pytest.raises(loom.TokenFileError, match=r"tokens\.json"):
        file.read()
    with pytest.raises(loom.TokenFileError):
        file.create("ci", "view")
    assert file.path.read_text() == content


def test_a_file_that_others_may_write_to_lets_nobody_in(file: TokenFile) -> None:
    file.create("ci", "view")
    file.path.chmod(0o666)

    with pytest.raises(loom.TokenFileError, match="chmod 600"):
        file.read()


def test_a_file_in_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(loom.TokenFileError, match="file/tokens"):
        TokenFile(tmp_path / "file" / "tokens.json").create("ci", "view")


def test_several_programs_may_change_the_file_at_once(file: TokenFile) -> None:
    program = (
        "import sys; from pathlib import Path; from loom.token_file import TokenFile\n"
        "file = TokenFile(Path(sys.argv[1]))\n"
        "for number in range(10): file.create(f'{sys.argv[2]} {number}', 'view')"
    )
    programs = [
        subprocess.Popen([sys.executable, "-c", program, str(file.path), str(number)], stdin=subprocess.DEVNULL)
        for number in range(4)
    ]

    assert [each.wait(60) for each in programs] == [0] * 4
    assert len({token.name for token in file.read()}) == 40


# -- the gateway's eyes -------------------------------------------------------------------------------------


def test_the_gateway_notices_what_changes(file: TokenFile) -> None:
    authority = TokenAuthority("the gateway's own", file)
    token, text = file.create("ci", "operate")

    accepted = authority.check(digest(text))
    assert (accepted.id, accepted.name, accepted.scope) == (token.id, "ci", "operate")
    file.revoke(token.id)
    with pytest.raises(loom.TokenRevoked, match=r"'ci'.*was revoked"):
        authority.check(digest(text))
    with pytest.raises(loom.TokenRevoked, match="was revoked"):
        authority.confirm(accepted.id)


def test_a_file_that_breaks_keeps_in_who_is_in_and_lets_nobody_new_in(
    file: TokenFile, caplog: pytest.LogCaptureFixture
) -> None:
    authority = TokenAuthority("own", file)
    _, text = file.create("ci", "view")
    accepted = authority.check(digest(text))

    file.path.write_text("not JSON")
    authority.reload()
    authority.reload()

    authority.confirm(accepted.id)
    assert len([record for record in caplog.records if "not JSON" in record.message]) == 1
    with pytest.raises(loom.AuthenticationError):
        authority.check(digest("another"))


def test_a_file_that_is_removed_lets_nobody_in(file: TokenFile) -> None:
    authority = TokenAuthority("own", file)
    _, text = file.create("ci", "view")
    accepted = authority.check(digest(text))

    file.path.unlink()
    authority.reload()

    with pytest.raises(loom.TokenRevoked):
        authority.confirm(accepted.id)
    with pytest.raises(loom.AuthenticationError):
        authority.check(digest(text))


def test_the_gateways_own_token_may_do_everything_for_ever(file: TokenFile) -> None:
    authority = TokenAuthority("own", file)

    accepted = authority.check(digest("own"))

    assert (accepted.user, accepted.scope) == ("admin", "admin")
    assert Principal(accepted, "").is_admin
    authority.confirm(accepted.id)


@pytest.mark.parametrize(
    "headers",
    [[], [(b"authorization", b"Basic abc")], [(b"authorization", b"Bearer")], [(b"authorization", b"Bearer \xff")]],
)
def test_without_a_good_token_nobody_comes_in(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(loom.AuthenticationError):
        TokenAuthority("own").check(digest(credential_of(headers, "loom").text))


@pytest.mark.parametrize(
    ("has", "needs", "enough"),
    [("view", "view", True), ("view", "operate", False), ("operate", "view", True), ("operate", "drive", False)],
)
def test_a_scope_includes_those_before_it(file: TokenFile, has: str, needs: str, enough: bool) -> None:
    _, text = file.create("ci", has)
    access = AccessControl(TokenAuthority("own", file))
    principal = access.admit({"type": "http", "headers": bearer(text)})

    if enough:
        access.require(principal, needs, "this")
    else:
        with pytest.raises(loom.ScopeError, match=f"scope {needs}.*scope {has}"):
            access.require(principal, needs, "this")


# -- a time of day that jumps -------------------------------------------------------------------------------


class Clocks:
    """A stand-in for a machine's two clocks: the time of day, which may jump, and the one that goes on."""

    def __init__(self) -> None:
        self.jumped = 0.0
        self.passed = 0.0

    def wall(self) -> float:
        return time.time() + self.passed + self.jumped

    def clock(self) -> float:
        return 1000.0 + self.passed

    def authority(self, file: TokenFile) -> TokenAuthority:
        authority = TokenAuthority("own", file, wall=self.wall, clock=self.clock)
        authority.reload()
        return authority


@pytest.mark.guarantees("disk and clock", "A time of day that jumps ends no session")
@pytest.mark.parametrize("jump", [3601.0, 86400.0, 40 * 365 * 86400.0])
def test_a_clock_that_jumps_ahead_ends_no_session(
    file: TokenFile, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    token, text = file.create("ann", "drive", expires_in=3600.0)
    clocks = Clocks()
    authority = clocks.authority(file)

    clocks.jumped = jump
    for _ in range(3):
        with pytest.raises(loom.TokenRevoked, match="has expired"):
            authority.check(digest(text))
        with pytest.raises(loom.TokenRevoked, match="has expired"):
            authority.confirm(token.id)
        authority.confirm_any([token.id])
    file.create("bob", "view")  # the file is read again meanwhile
    authority.reload()
    authority.confirm_any([token.id])
    clocks.jumped = 0.0

    assert authority.check(digest(text)).user == "ann"
    assert len([record for record in caplog.records if "has jumped" in record.message]) == 1


def test_a_gateway_that_starts_while_the_clock_is_ahead_ends_no_session_at_once(file: TokenFile) -> None:
    token, text = file.create("ann", "drive", expires_in=3600.0)
    clocks = Clocks()
    clocks.jumped = 86400.0
    authority = clocks.authority(file)

    authority.confirm_any([token.id])
    clocks.passed = JUMP_PATIENCE + 1

    with pytest.raises(loom.TokenRevoked, match="has expired"):
        authority.confirm_any([token.id])
    clocks.jumped = 0.0
    authority.check(digest(text))


@pytest.mark.parametrize("jump", [0.0, -600.0, 600.0])
def test_a_token_whose_end_was_moved_to_now_ends_its_session(file: TokenFile, jump: float) -> None:
    token, _ = file.create("ann", "drive", expires_in=3600.0)
    clocks = Clocks()
    authority = clocks.authority(file)
    clocks.jumped = jump

    with file._changing() as tokens:
        tokens[:] = [replace(one, expires=one.expires - 3600.0) for one in tokens]
    clocks.passed = 601.0
    authority.reload()

    with pytest.raises(loom.TokenRevoked, match="has expired"):
        authority.confirm_any([token.id])


@pytest.mark.parametrize("jump", [0.0, -600.0, 600.0])
def test_a_token_whose_time_is_over_ends_its_session(file: TokenFile, jump: float) -> None:
    token, _ = file.create("ann", "drive", expires_in=3600.0)
    clocks = Clocks()
    authority = clocks.authority(file)

    clocks.jumped, clocks.passed = jump, 3601.0 + 600.0

    with pytest.raises(loom.TokenRevoked, match="has expired"):
        authority.confirm_any([token.id])


def test_a_token_that_was_revoked_ends_its_session_whatever_the_clock_says(file: TokenFile) -> None:
    token, _ = file.create("ann", "drive", expires_in=3600.0)
    clocks = Clocks()
    authority = clocks.authority(file)
    clocks.jumped = 86400.0
    file.revoke(token.id)
    authority.reload()

    with pytest.raises(loom.TokenRevoked, match="was revoked"):
        authority.confirm_any([token.id])


# -- the command --------------------------------------------------------------------------------------------


def command(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LOOM_TOKENS": str(path), "COLUMNS": "200"}
    return run("-c", LOOM, "token", *arguments, env=environment)


def test_a_token_is_printed_when_it_is_made_and_never_again(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    made = command("create", "--scope", "view", "--name", "ci", "--expires", "7d", path=path)
    listed = command("list", path=path)

    text = made.stdout.strip()
    (token,) = TokenFile(path).read()
    assert token.sha256 == digest(text)
    assert token.expires == pytest.approx(token.created + 7 * 86400)
    assert token.id in listed.stdout
    assert "valid" in listed.stdout
    assert text not in listed.stdout
    assert token.sha256 not in command("list", "--json", path=path).stdout


def test_a_tokens_name_defaults_to_its_user(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"

    command("create", "--user", "ann", "--scope", "drive", path=path)
    command("create", "--user", "ann", "--name", "laptop", "--scope", "view", path=path)
    command("create", "--name", "ci", "--scope", "admin", path=path)
    nobody = command("create", "--scope", "view", path=path)

    made = [(token.user, token.name, token.scope) for token in TokenFile(path).read()]
    assert made == [("ann", "ann", "drive"), ("ann", "laptop", "view"), ("ci", "ci", "admin")]
    assert "laptop" in command("list", path=path).stdout
    assert (nobody.returncode, "--user" in nobody.stderr) == (2, True)


def test_a_token_is_revoked_by_its_id(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    made = json.loads(command("create", "--scope", "drive", "--name", "me", "--json", path=path).stdout)

    assert command("revoke", made["id"], path=path).returncode == 0

    listed = json.loads(command("list", "--json", path=path).stdout)
    assert [token["state"] for token in listed["tokens"]] == ["revoked"]


def test_the_tokens_of_one_user_are_listed_and_revoked(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    for user, name in [("ann", "laptop"), ("ann", "phone"), ("bob", "bob")]:
        TokenFile(path).create(name, "drive", user=user)

    listed = json.loads(command("list", "--user", "ann", "--json", path=path).stdout)["tokens"]
    ended = command("revoke", "--user", "ann", path=path)
    nobody = command("revoke", "--user", "carol", path=path)
    neither, both = command("revoke", path=path), command("revoke", "x", "--user", "ann", path=path)

    assert [one["name"] for one in listed] == ["laptop", "phone"]
    assert ended.returncode == 0, ended.stderr
    assert [token.state(time.time()) for token in TokenFile(path).read()] == ["revoked", "revoked", "valid"]
    assert (nobody.returncode, neither.returncode, both.returncode) == (1, 2, 2)
    assert "no token of a user 'carol'" in nobody.stderr


def test_an_unknown_id_is_named(tmp_path: Path) -> None:
    ended = command("revoke", "nobody", path=tmp_path / "tokens.json")

    assert ended.returncode == 1
    assert "'nobody'" in ended.stderr


@pytest.mark.parametrize(
    "expires", ["7", *(pytest.param(wrong, marks=pytest.mark.slow) for wrong in ("d", "7 days", "-1d")), "0s"]
)
def test_a_time_that_is_none_is_wrong_usage(tmp_path: Path, expires: str) -> None:
    ended = command(
        "create", "--scope", "view", "--name", "ci", f"--expires={expires}", path=tmp_path / "tokens.json"
    )

    assert ended.returncode == 2


def test_the_users_own_file_is_used_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOM_TOKENS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "/state")

    assert default_path() == Path("/state/loom/tokens.json")


@pytest.mark.parametrize("jump", [3601.0, 40 * 365 * 86400.0])
def test_what_survives_jumps_of_the_clock_goes_by_the_day_as_it_was(
    file: TokenFile, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, _ = file.create("ann", "drive", expires_in=3600.0)
    signed = SignedToken(
        "oidc:bob", "bob", "drive", "", time.time(), time.time() + 3600.0, user="oidc:bob", key="k"
    )
    passed, jumped, plain, steady = 0.0, 0.0, time.time, token_authority.steady_clock
    monkeypatch.setattr(time, "time", lambda: plain() + passed + jumped)
    monkeypatch.setattr(token_authority, "steady_clock", lambda: steady() + passed)
    authority = TokenAuthority("own", file)
    authority.reload()
    access = AccessControl(authority)
    access.sign_ins = SignIns(clock=lambda: time.time())
    sign_in, _ = access.sign_ins.begin(token, "", in_cookie=False)
    with_token, with_page = Principal(token, "peer"), Principal(token, "peer", sign_in=sign_in)
    day = SteadyDay()

    jumped = jump
    for principal in (with_token, with_page):
        with pytest.raises(loom.TokenRevoked, match="expired"):
            access.confirm(principal)
        access.confirm(principal, day.now())
    assert signed.state(day.now()) == "valid"
    jumped, passed = -jump, 3601.0
    for principal in (with_token, with_page):
        with pytest.raises(loom.TokenRevoked, match="expired"):
            access.confirm(principal, day.now())
    file.revoke(token.id)
    authority.reload()
    with pytest.raises(loom.TokenRevoked, match="was revoked"):
        access.confirm(with_token, day.now() - 3601.0)
