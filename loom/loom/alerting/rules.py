"""Rules: their checks, defaults and reach, and what of a webhook is a secret."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, urlsplit

from loom.control.arguments import check_name
from loom.control.operations import SetAlert
from loom.errors import WrongArguments
from loom.weaver.alert_views import AlertKind, AlertRule
from loom.weaver.runs.run import Run

MAX_EMAIL = 10
"""Receivers of one rule."""

MOST_SECONDS = 30 * 86_400.0
"""The longest window, or time without a step."""

MAIL = "e-mail"
"""The receiver of a delivery by the e-mail command, as it is shown."""

VERSION = 1
"""The version of the stored rows. Rows of a later one are left alone."""

_K = AlertKind

_DEFAULTS: Mapping[AlertKind, Mapping[str, Any]] = {
    _K.NOT_A_NUMBER: {"metric": "*"},
    _K.DIVERGED: {"metric": "*loss*", "factor": 3.0, "window": 60.0},
    _K.NO_PROGRESS: {},
    _K.DISK: {"above": 0.9},
    _K.GOODPUT: {"below": 0.5, "window": 600.0},
}
_OPTIONS = {kind: tuple(options) for kind, options in _DEFAULTS.items()} | {_K.NO_PROGRESS: ("seconds", "steps")}
_ALL_OPTIONS = ("metric", "factor", "window", "seconds", "steps", "below", "above")

NO_STEP_FOR = 600.0
"""Seconds without a step, if a rule about progress names neither seconds nor steps."""

_MAIL = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63}){0,8}")
_SLACK = ("hooks.slack.com", "hooks.slack-gov.com")


@dataclass(frozen=True)
class WatchedRule:
    """A rule, with the secret part of it."""

    view: AlertRule
    target: str | None = None
    """The whole address of the webhook."""

    @classmethod
    def made(
        cls, asked: SetAlert, id: str, by: str, user: str, now: float, before: WatchedRule | None
    ) -> WatchedRule:
        """Return the rule that is asked for; raise `WrongArguments` if it makes no sense.

        Args:
            before: the rule that it replaces, whose webhook stays if none is given.
        """
        kind = _kind(asked.rule)
        options = _options(kind, asked)
        for what, name in (("run", asked.run), ("group", asked.group), ("metric", options["metric"])):
            if name is not None:
                check_name(f"a {what}", name)
        target = asked.webhook or (before.target if before and asked.webhook is None else None) or None
        where = None if target is None else check_webhook(target)
        for address in asked.email:
            if len(asked.email) > MAX_EMAIL or not _MAIL.fullmatch(address):
                raise WrongArguments(f"email: at most {MAX_EMAIL} plain addresses such as ann@example.com")
        if asked.form not in (None, "json", "slack"):
            raise WrongArguments(f"form is json or slack, not {asked.form!r:.80}")
        view = AlertRule(
            id=id,
            rule=kind,
            run=asked.run,
            group=asked.group,
            **options,
            rearm=_between("rearm", 60.0 if asked.rearm is None else asked.rearm, 0.0, MOST_SECONDS),
            webhook=None if where is None else shown(where),
            form=asked.form or ("slack" if where is not None and where.hostname in _SLACK else "json"),
            email=tuple(asked.email),
            quiet=asked.quiet,
            by=by,
            set=now,
            user=user,
        )
        return cls(view, target)

    def to_row(self) -> dict[str, Any]:
        return {"version": VERSION, **self.view.to_body(), "rule": self.view.rule.value, "target": self.target}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> WatchedRule:
        return cls(AlertRule.from_body(row), row["target"])

    def means(self, run: Run) -> bool:
        """Return whether the rule is about a run."""
        if self._run is not None and not (self._run(run.id) or self._run(run.name)):
            return False
        return self._group is None or any(map(self._group, run.groups))

    @property
    def is_about_all(self) -> bool:
        return self.view.run is None and self.view.group is None

    def measures(self, metric: str) -> bool:
        return self._metric is not None and bool(self._metric(metric.lower()))

    @cached_property
    def _run(self) -> Callable[[str], object] | None:
        return _glob(self.view.run)

    @cached_property
    def _group(self) -> Callable[[str], object] | None:
        return _glob(self.view.group)

    @cached_property
    def _metric(self) -> Callable[[str], object] | None:
        return _glob((self.view.metric or "*").lower())

    def for_user(self, user: str) -> AlertRule:
        return replace(self.view, user=user)


def _glob(text: str | None) -> Callable[[str], object] | None:
    return None if text is None else re.compile(fnmatch.translate(text)).match


def _kind(given: object) -> AlertKind:
    try:
        return AlertKind(given)
    except ValueError:
        known = ", ".join(one.value for one in AlertKind)
        raise WrongArguments(f"there is no rule {given!r:.80}; rule is one of {known}") from None


def _options(kind: AlertKind, asked: SetAlert) -> dict[str, Any]:
    """Return the options of a condition, with the defaults; refuse those that it does not have."""
    given = {name: value for name in _ALL_OPTIONS if (value := getattr(asked, name)) is not None}
    own = _OPTIONS.get(kind, ())
    if surplus := [name for name in given if name not in own]:
        raise WrongArguments(f"{kind} has no {' and no '.join(surplus)}; it has {', '.join(own) or 'no options'}")
    options = {**dict.fromkeys(_ALL_OPTIONS), **_DEFAULTS.get(kind, {}), **given}
    if kind is _K.NO_PROGRESS and not given:
        options["seconds"] = NO_STEP_FOR
    bounds = {
        "factor": (1.0, 1e9),
        "window": (0.0, MOST_SECONDS),
        "seconds": (1.0, MOST_SECONDS),
        "steps": (2.0, 1e9),
        "below": (0.0, 1.0),
        "above": (0.0, 1.0),
    }
    for name, (least, most) in bounds.items():
        if options[name] is not None:
            options[name] = _between(name, options[name], least, most)
    return options


def _between(name: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise WrongArguments(f"{name} is from {least:g} to {most:g}, not {value!r:.80}")
    return float(value)


def check_webhook(url: str) -> SplitResult:
    """Return the parts of a webhook's address; raise `WrongArguments`, which does not repeat it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urlsplit("")
    if (
        parts.scheme not in ("http", "https")
        or not host
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise WrongArguments("webhook is an address such as https://hooks.example.com/T0/B0/x, in ASCII")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise WrongArguments("webhook: an address without a user, a password and a fragment")
    if port == 0:
        raise WrongArguments("webhook: there is no port 0")
    return parts


def shown(webhook: SplitResult) -> str:
    """Return what may be shown of a webhook's address: path and query are secrets."""
    secret = webhook.path not in ("", "/") or webhook.query
    return f"{webhook.scheme}://{webhook.netloc}{'/…' if secret else ''}"


def receivers(rule: WatchedRule) -> Sequence[str]:
    """Return the places to which the rule's alerts are delivered."""
    found = [] if rule.view.webhook is None else [rule.view.webhook]
    return [*found, MAIL] if rule.view.email else found
