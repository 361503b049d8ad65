"""What an actor mesh says of endpoints that it does not have."""

from __future__ import annotations

from typing import Any

import pytest

from loom.errors import EndpointNotFound
from tests.unit.loom_proxy.notebook.test_html import Connection, actor_mesh, proc_mesh


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ech", "Echo has no endpoint 'ech'; did you mean 'echo'? Its endpoints: echo"),
        ("add", "Echo has no endpoint 'add'. Its endpoints: echo"),
    ],
)
def test_an_endpoint_that_there_is_not(name: str, text: str) -> None:
    connection: Any = Connection()
    actors = actor_mesh(connection, proc_mesh(connection))

    with pytest.raises(EndpointNotFound) as found:
        getattr(actors, name)

    assert str(found.value) == text
