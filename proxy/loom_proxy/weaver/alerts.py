"""`loom.alerts`: the rules of alerts, and what was sent.

::

    loom.alerts().add("not_a_number", webhook="https://hooks.slack.com/services/…")
    loom.alerts().add("no_progress", run="sft*", seconds=900, email=["ann@example.com"])
    for alert in loom.alerts().log():
        print(alert.message, alert.deliveries)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loom.control.operations import Ask
from loom.weaver.alert_views import Alert, AlertRule


class AlertRules(list[AlertRule]):
    """A user's rules, as they were when they were read. Each change of them is made at the weaver at once."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(AlertRule.from_body(one) for one in ask("alerts"))
        self._ask = ask

    def add(
        self,
        rule: str,
        *,
        run: str | None = None,
        group: str | None = None,
        webhook: str | None = None,
        form: str | None = None,
        email: Sequence[str] = (),
        quiet: bool = False,
        id: str | None = None,
        **options: Any,
    ) -> AlertRule:
        """Set a rule, and return it.

        Args:
            rule: the condition: ``not_a_number``, ``diverged``, ``no_progress``, ``crashed``, ``finished``,
                ``device``, ``disk`` or ``goodput``.
            run: the id or the name of runs, or a glob over both; without it and ``group`` all runs are meant.
            group: the group of runs, or a glob.
            webhook: the address that each alert is posted to. Its path is a secret, and is not shown again.
            form: ``json``, or ``slack``; by default what the address shows.
            email: addresses, if the gateway's operator allows e-mail.
            quiet: whether the page shows no notice.
            id: of the rule that this one replaces, or of your choice for a new one.
            options: those of the condition, such as ``metric``, ``factor``, ``window``, ``seconds``, ``steps``,
                ``below`` and ``above``, and ``rearm``, as the guide's page about alerts has them.

        Raises:
            WrongArguments: the rule makes no sense.
            LimitReached: there are too many.
        """
        wanted = {"rule": rule, "run": run, "group": group, "webhook": webhook, "form": form, "id": id, **options}
        made = AlertRule.from_body(self._ask("set_alert", **wanted, email=list(email), quiet=quiet or None))
        self[:] = [*(one for one in self if one.id != made.id), made]
        return made

    def remove(self, rule: AlertRule | str) -> None:
        """Remove a rule, by its id or the beginning of it. What of it is not delivered is given up.

        Raises:
            UnknownAlert: there is none.
        """
        gone = self._ask("remove_alert", alert=_id(rule))
        self[:] = [one for one in self if one.id != gone["id"]]

    def test(self, rule: AlertRule | str, wait: float = 15.0) -> Alert:
        """Send a test alert of a rule, and return what became of it within some seconds."""
        return Alert.from_body(self._ask("test_alert", alert=_id(rule), wait=wait))

    def log(self, rule: AlertRule | str | None = None, run: str | None = None, limit: int = 100) -> list[Alert]:
        """Return the last alerts, the latest first, each with what became of its deliveries."""
        named = None if rule is None else _id(rule)
        return [Alert.from_body(one) for one in self._ask("alert_log", alert=named, run=run, limit=limit)]


def _id(rule: AlertRule | str) -> str:
    return rule if isinstance(rule, str) else rule.id
