"""Trackers as sources: what a script gives to W&B, TensorBoard, MLflow or trackio is a metric in Loom too.

The tracker gets what the script gave, unchanged. Numbers are taken, also those of numpy and torch; images, texts
and whole tensors are passed over.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from loom.instrument.training import log

Metrics = Callable[..., object]
"""Returns the metrics in the arguments of a method of a tracker; it takes the names of those that it knows."""


def hook_wandb(module: ModuleType) -> None:
    """Hook ``wandb.sdk.wandb_run``."""
    _watch(module.Run, "log", lambda data=None, *_, **__: _flat(data))


def hook_tensorboard(module: ModuleType) -> None:
    """Hook ``torch.utils.tensorboard.writer``, or that of tensorboardX."""
    _watch(module.SummaryWriter, "add_scalar", lambda tag, scalar_value, *_, **__: {tag: scalar_value})
    _watch(
        module.SummaryWriter,
        "add_scalars",
        lambda main_tag, tag_scalar_dict, *_, **__: {
            f"{main_tag}/{tag}": value for tag, value in tag_scalar_dict.items()
        },
    )


def hook_mlflow(module: ModuleType) -> None:
    """Hook ``mlflow.tracking.client``, which also the functions of ``mlflow`` use."""
    _watch(module.MlflowClient, "log_metric", lambda run_id, key, value, *_, **__: {key: value})
    _watch(module.MlflowClient, "log_batch", _of_batch)


def hook_trackio(module: ModuleType) -> None:
    """Hook ``trackio.run``."""
    _watch(module.Run, "log", lambda metrics=None, *_, **__: metrics)


def _flat(data: Any) -> Mapping[Any, object]:
    """Return nested metrics by the names that W&B gives them, such as ``train.loss``."""
    found: dict[Any, object] = {}
    for name, value in list(data.items()):
        within = _flat(value) if isinstance(value, Mapping) else None
        found.update({name: value} if within is None else {f"{name}.{one}": within[one] for one in within})
    return found


def _of_batch(run_id: str, metrics: Any = (), *_: object, **__: object) -> Mapping[str, object]:
    return {one.key: one.value for one in metrics if not one.key.startswith("system/")}  # of the machine


def _watch(kind: type, method: str, metrics: Metrics) -> None:
    """Log what each call of a method is given, before the method itself gets it."""
    original = getattr(kind, method)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):  # what the tracker refuses, it refuses itself
            log(numbers_in(metrics(*args, **kwargs)))
        return original(self, *args, **kwargs)

    setattr(kind, method, call)


def numbers_in(metrics: object) -> dict[str, Any]:
    """Return the metrics that are numbers; those on a device are read later, and stay as they are until then."""
    if not isinstance(metrics, Mapping):
        return {}
    found: dict[str, Any] = {}
    for name, value in list(metrics.items()):
        with contextlib.suppress(Exception):  # whatever a stranger's value raises
            if isinstance(name, str) and (number := _number(value)) is not None:
                found[name] = number
    return found


def _number(value: Any) -> Any:
    if isinstance(value, numbers.Real):
        return None if isinstance(value, bool) else float(value)
    if getattr(value, "ndim", None) != 0 or getattr(value, "dtype", None) is None:
        return None
    device = getattr(getattr(value, "device", None), "type", "cpu")
    return float(value.item()) if device == "cpu" else value.detach().clone()
