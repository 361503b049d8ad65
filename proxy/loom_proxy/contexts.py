"""The file of this user's contexts: gateways by name, and which of them is the current one.

Their tokens are in the system's keyring if the optional package ``keyring`` is installed. A keyring that exists and
refuses is an error, and no reason to write the token to a file: the user would not learn that a secret which
belongs in the keyring lies on the disk.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from loom.errors import (
    ContextFileError,
    Denied,
    InvalidAddress,
    KeyringUnavailable,
    Unavailable,
    UnknownContext,
    UnknownSession,
    WrongArguments,
)
from loom.process.state_file import locked, replace_file
from loom.rest_client import Gateway, Route, TokenSource
from loom_proxy.gateway_address import explained_by, kept_way_to, way_to
from loom_proxy.running_cluster import find_running, path_beside

V = TypeVar("V")

SERVICE = "loom"
"""The service of every token in the keyring; the user name of an entry names the context."""

_NO_KEYRINGS = ("keyring.backends.fail", "keyring.backends.null")
"""Modules of the backends that stand for "there is none"."""


def find_keyring() -> Any:
    """Return the backend of `keyring` that this user's tokens are kept in; None if there is none that is safe.

    Raises:
        KeyringUnavailable: the package is installed and cannot choose a backend, as its configuration names a
            missing one.
    """
    if importlib.util.find_spec("keyring") is None:
        return None
    chosen = _ask("choose a backend", _chosen)
    for backend in getattr(chosen, "backends", None) or (chosen,):  # a chain has several
        kind = type(backend)
        if kind.__module__ not in _NO_KEYRINGS and "plaintext" not in kind.__name__.lower():
            return backend
    return None


def store(entry: str, token: str) -> bool:
    """Keep a token under the name of an entry; return False if there is no keyring."""
    backend = find_keyring()
    if backend is None:
        return False
    _ask(f"store the token of {entry!r}", lambda: backend.set_password(SERVICE, entry, token))
    return True


def load(entry: str) -> str:
    """Return the token of an entry.

    Raises:
        KeyringUnavailable: the keyring is locked or away, or has no such entry.
    """
    backend = find_keyring()
    if backend is None:
        raise KeyringUnavailable(
            f"the token of {entry!r} is in a keyring, and there is none here: pip install 'monarch-loom[keyring]', "
            f"or log in where the keyring is; or give --token or LOOM_TOKEN"
        )
    token = _ask(f"return the token of {entry!r}", lambda: backend.get_password(SERVICE, entry))
    if token is None:
        raise KeyringUnavailable(
            f"{_name(backend)} has no token of {entry!r} any more: add the context again with `loom context add`"
        )
    return str(token)


def forget(entry: str) -> None:
    """Delete an entry, if there is a keyring that has it."""
    backend = find_keyring()
    if backend is not None and _ask(f"find {entry!r}", lambda: backend.get_password(SERVICE, entry)) is not None:
        _ask(f"delete {entry!r}", lambda: backend.delete_password(SERVICE, entry))


def _chosen() -> Any:
    import keyring

    return keyring.get_keyring()


def _name(backend: Any) -> str:
    return f"the keyring {getattr(backend, 'name', type(backend).__name__)!r}"


def _ask(what: str, call: Callable[[], V]) -> V:
    """Return what a call to the keyring returns; any error of a backend becomes `KeyringUnavailable`."""
    try:
        return call()
    except Exception as error:
        raise KeyringUnavailable(
            f"the keyring did not {what}: {error or type(error).__name__}. Unlock it and try again. Or keep tokens "
            f"in a file that only you can read: set PYTHON_KEYRING_BACKEND=keyring.backends.null.Keyring, and add "
            f"the context again"
        ) from error


logger = logging.getLogger(__name__)

MAX_NAME = 100
"""Characters of the name of a context."""

_VERSION = 1


def default_path() -> Path:
    """Return the path of this user's file, in ``XDG_CONFIG_HOME``.

    Raises:
        ContextFileError: this user has no home.
    """
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "loom" / "contexts.json"
    except RuntimeError as error:  # such as of a user id that a container was given
        raise ContextFileError(
            "this user has no home for the file of contexts: set HOME or XDG_CONFIG_HOME"
        ) from error


@dataclass(frozen=True)
class GatewayContext:
    """A gateway with a name, and how to connect to it."""

    name: str
    url: str
    ca: str | None = None
    """File of the authority that vouches for the gateway; see `loom.connect`."""
    insecure: bool = False
    token: str | None = field(default=None, repr=False)
    """The token, if it is in the file."""
    keyring: str | None = None
    """The end of the name of the keyring's entry with the token, if it is in the keyring."""

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.keyring is not None

    @property
    def entry(self) -> str:
        """The name of the keyring's entry. It has the URL: a token is found only for the URL it was given for."""
        return f"{self.name} {self.url} {self.keyring}"

    def read_token(self) -> str | None:
        """Return the token, from the file or the keyring; None if the context has none."""
        return self.token if self.keyring is None else load(self.entry)


@dataclass
class Contexts:
    """All contexts by name, and the name of the current one."""

    by_name: dict[str, GatewayContext] = field(default_factory=dict)
    current: str | None = None

    def named(self, name: str) -> GatewayContext:
        """Return the context of a name.

        Raises:
            UnknownContext: there is none.
        """
        if name not in self.by_name:
            raise UnknownContext(f"no context named {name!r}; {self.listed}")
        return self.by_name[name]

    @property
    def listed(self) -> str:
        """The names, for errors."""
        names = ", ".join(sorted(self.by_name))
        return f"there are: {names}" if names else "there are none: `loom context add NAME URL` adds one"


class ContextFile:
    """The contexts in a file, which only this user can read. A file that does not exist has none.

    Several programs may change the file at once: each holds a lock meanwhile, and replaces the file as a whole.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path

    def read(self) -> Contexts:
        """Return the contexts.

        Raises:
            ContextFileError: others may read the file or write to it, or it is damaged. It is left as it is.
        """
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    raise self._unusable(f"others may use the tokens in it: chmod 600 {self.path}")
                content = json.load(file)
        except FileNotFoundError:
            return Contexts()
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        except ValueError as error:
            raise self._damaged(f"it is not JSON ({error})") from error
        try:
            if content["version"] != _VERSION:
                raise self._unusable(f"it is of version {content['version']!r}; this Loom knows {_VERSION}")
            found = {name: _context(name, entry) for name, entry in content["contexts"].items()}
            if content["current"] is not None and content["current"] not in found:
                raise ValueError(f"its current context {content['current']!r} is not among them")
            return Contexts(found, content["current"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"it is not a file of contexts ({error!r})") from error

    def add(self, context: GatewayContext, token: str | None) -> bool:
        """Add a context, or replace the one of its name; the first one becomes the current one.

        The token goes to the keyring, or into the file if there is none. Return whether it is in the keyring.
        """
        _check_name(context.name)
        kept = replace(context, token=None, keyring=secrets.token_hex(4))
        in_keyring = token is not None and store(kept.entry, token)
        if not in_keyring:
            kept = replace(kept, token=token, keyring=None)
        try:
            with self._changing() as contexts:
                old = contexts.by_name.get(context.name)
                contexts.by_name[context.name] = kept
                contexts.current = contexts.current or context.name
        except BaseException:
            _forget(kept)
            raise
        if old is not None:
            _forget(old)
        return in_keyring

    def use(self, name: str) -> GatewayContext:
        """Make a context the current one and return it."""
        with self._changing() as contexts:
            found = contexts.named(name)
            contexts.current = name
        return found

    def remove(self, name: str) -> None:
        """Remove a context and its token. If it is the current one, there is no current one any more."""
        with self._changing() as contexts:
            removed = contexts.named(name)
            del contexts.by_name[name]
            if contexts.current == name:
                contexts.current = None
        _forget(removed)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Contexts]:
        """Lock the file and yield its contexts, which are written back unless the body raises."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(self.path))
                self.path.parent.chmod(0o700)
            except OSError as error:
                raise self._unusable(error.strerror or str(error)) from error
            contexts = self.read()
            yield contexts
            try:
                replace_file(self.path, _text(contexts))
            except OSError as error:
                raise self._unusable(error.strerror or str(error)) from error

    def _damaged(self, why: str) -> ContextFileError:
        return self._unusable(f"{why}. Correct it, or move it away and add the contexts again; nothing was changed")

    def _unusable(self, why: str) -> ContextFileError:
        return ContextFileError(f"cannot use the file of contexts {self.path}: {why}")


def _text(contexts: Contexts) -> str:
    entries = {}
    for name, context in contexts.by_name.items():
        entries[name] = {
            key: value for key, value in asdict(context).items() if key != "name" and value is not None
        }
    return json.dumps({"version": _VERSION, "current": contexts.current, "contexts": entries}, indent=1) + "\n"


def _context(name: str, entry: dict[str, object]) -> GatewayContext:
    context = GatewayContext(name, **entry)  # type: ignore[arg-type]
    texts = (context.ca, context.token, context.keyring)
    if not isinstance(context.url, str) or not isinstance(context.insecure, bool):
        raise ValueError(f"the context {name!r:.40} has a strange url or insecure")
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError(f"the context {name!r:.40} has a strange ca, token or keyring")
    return context


def _check_name(name: str) -> None:
    if not name.isprintable() or not 0 < len(name) <= MAX_NAME or any(letter.isspace() for letter in name):
        raise WrongArguments(f"{name!r} is no name for a context: give 1 to {MAX_NAME} characters without blanks")


def _forget(context: GatewayContext) -> None:
    """Delete the token of a context that is not in the file any more. A keyring that refuses is only reported."""
    if context.keyring is None:
        return
    try:
        forget(context.entry)
    except KeyringUnavailable as error:
        logger.warning("a token is left in the keyring, service %s, %r: %s", SERVICE, context.entry, error)


_ABOUT_THE_GATEWAY = (Unavailable, Denied, InvalidAddress, UnknownSession)
"""Errors that name the gateway that was chosen: it may be another than the user thinks."""


class Origin(Enum):
    """The origin of the gateway's address."""

    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    CONTEXT = "context"
    RUNNING = "running"
    """It is that of a cluster that ``loom up`` runs on this machine."""


@dataclass(frozen=True)
class GatewayChoice:
    """A gateway that was chosen, and how to connect to it."""

    url: str
    token: TokenSource = field(repr=False)
    ca: str | None
    insecure: bool
    origin: Origin
    context: str | None = None
    """The name of the context that it comes from."""

    def __str__(self) -> str:
        """Return the address with where it comes from, such as ``ws://a:1 (from the context prod)``."""
        if self.origin is Origin.ARGUMENT:
            return self.url
        if self.origin is Origin.ENVIRONMENT:
            return f"{self.url} (from LOOM_URL)"
        if self.origin is Origin.RUNNING:
            return f"{self.url} (of the `loom up` on this machine)"
        return f"{self.url} (from the context {self.context}{'' if self.token else ', which has no token'})"

    def weaver_address(self, timeout: float) -> str:
        """Return the value of ``LOOM_WEAVER`` for processes that report to the weaver behind the gateway."""
        way = way_to(self.url)
        try:
            with explained_by(way):
                token = self.token or (None if way is None else way.token)
                return str(Gateway(way or self.url, token, timeout, self.ca, self.insecure).ask("address"))
        finally:
            if way is not None:
                way.close()

    def kept(self) -> tuple[str | Route, TokenSource]:
        """Return the URL, or a way that is kept until this process ends; and the token to show."""
        way = kept_way_to(self.url)
        return (self.url, self.token) if way is None else (way, self.token or way.token)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add the gateway and where it comes from to errors about it, unless the caller has named it."""
        try:
            yield
        except _ABOUT_THE_GATEWAY as error:
            if self.origin is not Origin.ARGUMENT:
                error.args = (f"{error} [gateway: {self}]", *error.args[1:])
            raise


def choose_gateway(
    url: str | None = None, token: TokenSource = None, ca: str | None = None, insecure: bool = False
) -> GatewayChoice:
    """Return what `find_gateway` finds.

    Raises:
        InvalidAddress: it finds none.
    """
    found = find_gateway(url, token, ca, insecure)
    if found is None:
        raise InvalidAddress(
            "no gateway to connect to: pass url=… or --url, or set LOOM_URL (`loom up` prints it), or choose a "
            f"context with `loom context use NAME`; {ContextFile().read().listed}"
        )
    return found


def named_gateway(
    named: str, token: TokenSource = None, ca: str | None = None, insecure: bool = False
) -> GatewayChoice:
    """Return the gateway of an address, or of a context.

    The token is that of the argument, else ``LOOM_TOKEN``, else that of the context, or of the `loom up` on this
    machine, with the address.

    Raises:
        UnknownContext: there is no context of the name.
        ContextFileError, KeyringUnavailable: the context or its token cannot be read.
    """
    file = ContextFile()
    contexts = file.read()
    given = token or os.environ.get("LOOM_TOKEN")
    if "://" not in named:
        context: GatewayContext | None = contexts.named(named)
    else:
        context = next((one for one in contexts.by_name.values() if one.url.rstrip("/") == named.rstrip("/")), None)
    if context is not None:
        ca = ca or os.environ.get("LOOM_CA") or context.ca
        token = given or context.read_token()
        return GatewayChoice(context.url, token, ca, insecure or context.insecure, Origin.CONTEXT, context.name)
    running = find_running(path_beside(file.path))
    if given is None and running is not None and running[0].rstrip("/") == named.rstrip("/"):
        return GatewayChoice(*running, ca, insecure, Origin.RUNNING)
    return GatewayChoice(named, given, ca, insecure, Origin.ARGUMENT)


def find_gateway(
    url: str | None = None, token: TokenSource = None, ca: str | None = None, insecure: bool = False
) -> GatewayChoice | None:
    """Return the gateway of the argument, ``LOOM_URL``, the current context or a running `loom up`, or None.

    The token is that of the argument, else ``LOOM_TOKEN``. The token of a context is taken only together with its
    URL, and only if there is no other; a running `loom up` has its own.

    Raises:
        ContextFileError: the contexts are needed, and their file cannot be used.
        KeyringUnavailable: the context's token is needed, and the keyring does not return it.
    """
    token = token or os.environ.get("LOOM_TOKEN")
    if url:
        return GatewayChoice(url, token, ca, insecure, Origin.ARGUMENT)
    if url := os.environ.get("LOOM_URL"):
        return GatewayChoice(url, token, ca, insecure, Origin.ENVIRONMENT)
    file = ContextFile()
    contexts = file.read()
    if contexts.current is None:
        if (running := find_running(path_beside(file.path))) is None:
            return None
        return GatewayChoice(*running, ca, insecure, Origin.RUNNING)
    context = contexts.named(contexts.current)
    ca = ca or os.environ.get("LOOM_CA") or context.ca
    insecure = insecure or context.insecure
    return GatewayChoice(context.url, token or context.read_token(), ca, insecure, Origin.CONTEXT, context.name)
