"""What a page subscribes to, and how much of it the page has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from loom.errors import WrongArguments
from loom_gateway.weaver_socket.columns import NAMES, Column

MAX_ROWS = 200
"""Replicas of which a page gets whole changes, and devices of which it gets the status."""

Identity = Annotated[str, Field(min_length=1, max_length=500)]


class PageSubscription(BaseModel, extra="forbid"):
    """What of replicas' reports a page gets."""

    aggregates: bool = False
    columns: Annotated[list[str], Field(max_length=len(NAMES))] = []
    """Names of `loom_gateway.weaver_socket.columns.Column`."""
    rows: Annotated[list[Identity], Field(max_length=MAX_ROWS)] = []
    """Ids of replicas of which all changes come; one that does not exist may come to exist."""
    devices: Annotated[list[Identity], Field(max_length=MAX_ROWS)] = []
    """Uuids of devices whose status comes, likewise."""


def read_subscription(message: Mapping[str, Any]) -> PageSubscription:
    """Return the subscription that a message asks for. Raise `WrongArguments` if its fields make no sense."""
    fields = {name: value for name, value in message.items() if name not in ("type", "id")}
    try:
        found = PageSubscription.model_validate(fields, strict=True)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise WrongArguments(f"the subscription makes no sense: {wrong[:2000]}") from None
    unknown = [name for name in found.columns if name not in NAMES]
    if unknown:
        raise WrongArguments(f"there is no column {unknown[0]!r:.80}; there are {', '.join(NAMES)}")
    return found


class ShownSubscription:
    """A page's subscription, with the position up to which the page has each part; None for a part that is new."""

    def __init__(self) -> None:
        self.aggregates = False
        self.aggregates_at: int | None = None
        self.columns: dict[Column, int | None] = {}
        self.rows: dict[str, int | None] = {}
        self.devices: dict[str, int | None] = {}
        self.changed = False
        """Whether a part is new, which is sent without waiting for the next round."""

    def __bool__(self) -> bool:
        return bool(self.aggregates or self.columns or self.rows or self.devices)

    def subscribe(self, wanted: PageSubscription) -> None:
        """Replace the subscription. What the page has of a part that stays is not sent again."""
        columns = {NAMES[name]: self.columns.get(NAMES[name]) for name in wanted.columns}
        self.columns = {column: columns[column] for column in sorted(columns)}
        self.rows = {id: self.rows.get(id) for id in wanted.rows}
        self.devices = {uuid: self.devices.get(uuid) for uuid in wanted.devices}
        self.aggregates_at = self.aggregates_at if self.aggregates and wanted.aggregates else None
        self.aggregates = wanted.aggregates
        self.changed = True

    def forget(self) -> None:
        """Note that the page has nothing: a snapshot of another feed comes."""
        self.aggregates_at = None
        self.columns = dict.fromkeys(self.columns)
        self.rows = dict.fromkeys(self.rows)
        self.devices = dict.fromkeys(self.devices)
        self.changed = True
