"""A client of a mode that an older driver does not know never drives by mistake."""

from __future__ import annotations

import pytest

import loom
from loom_proxy.session.open import _job
from tests.unit.loom_proxy.session.test_interrupts import Wire, connection_over


def test_a_driver_that_makes_the_client_drive_is_left() -> None:
    connection = connection_over(Wire())

    with pytest.raises(loom.ProtocolMismatch, match="older Loom, whose driver knows no mode 'ranks'"):
        _job(connection, True, "ranks")

    assert connection.calls.error is not None
