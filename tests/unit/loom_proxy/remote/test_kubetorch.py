"""What goes to Kubetorch's pod servers."""

from __future__ import annotations

from typing import Any

import pytest

from loom.errors import UnpicklableError
from loom_proxy.remote.kubetorch import SERIALIZATIONS, DeployedService


class Strange:
    def __reduce__(self) -> Any:
        raise KeyError("strange")


@pytest.mark.parametrize("serialization", SERIALIZATIONS)
def test_an_argument_that_is_nested_too_deeply_is_told_as_that(serialization: str) -> None:
    nested: Any = None
    for _ in range(20_000):
        nested = {"a": nested}

    with pytest.raises(UnpicklableError, match=f"sent as {serialization}: it is nested .* dict inside dict$"):
        DeployedService("http://127.0.0.1:9", "Shop", serialization).call("echo", (nested,), {}, 1)


def test_an_argument_that_raises_when_it_is_pickled_is_told() -> None:
    with pytest.raises(UnpicklableError, match="an argument cannot be sent as pickle: 'strange'"):
        DeployedService("http://127.0.0.1:9", "Shop", "pickle").call("echo", (Strange(),), {}, 1)


def test_an_answer_that_is_nested_too_deeply_is_told() -> None:
    with pytest.raises(UnpicklableError, match="nested too deeply"):
        DeployedService("http://127.0.0.1:9", "Shop", "json")._value(b"[" * 100_000 + b"]" * 100_000)
