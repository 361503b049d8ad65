"""`make_engine`: the engine of a generator by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.errors import WrongArguments
from loom.extras import require
from loom.rl.engines.engine import EngineKind, InferenceEngine
from loom.rl.generation.completions import RequestLimits

if TYPE_CHECKING:
    from torch import nn

    from loom.rl.task import Tokenizer


@dataclass(frozen=True)
class EngineSettings:
    """The settings that all engines have."""

    kind: EngineKind
    make_model: Callable[[], nn.Module] | None
    tokenizer: Tokenizer | None
    model: str | None
    limits: RequestLimits
    seed: int
    folder: Path | None
    name: str
    gpus: int
    """GPUs of the generator."""
    slot: int
    """The number of the generator among those of its host, which decides on its GPUs."""


def make_engine(settings: EngineSettings, options: Mapping[str, Any]) -> InferenceEngine:
    """Return an engine, which is not started.

    Args:
        settings: of the engine.
        options: further ones, that only this kind of engine has.

    Raises:
        WrongArguments: a setting is missing, or none of this engine.
        MissingDependency: the engine is not installed.
    """
    shared = bool(options.get("colocated"))
    devices = gpus_of(settings.slot, settings.gpus, shared) if settings.gpus else []
    if settings.kind is EngineKind.VLLM:
        from loom.rl.engines.vllm import VllmEngine, VllmOptions

        return VllmEngine(
            _model_of(settings),
            VllmOptions.of(options),
            gpus=devices,
            concurrency=settings.limits.concurrency,
            seed=settings.seed,
            folder=settings.folder,
            name=settings.name,
        )
    if settings.kind is EngineKind.SGLANG:
        from loom.rl.engines.sglang import SglangEngine, SglangOptions

        return SglangEngine(settings.model, SglangOptions.of(options), folder=settings.folder)
    if options:
        raise WrongArguments(f"engine={settings.kind.value!r} has no option {sorted(options)[0]!r}")
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)  # before torch looks at them
    device = "cuda:0" if devices else "cpu"
    if settings.kind is EngineKind.TRANSFORMERS:
        return _transformers(settings, device)
    return _own(settings, device)


def _transformers(settings: EngineSettings, device: str) -> InferenceEngine:
    require({"transformers": "transformers"}, "engine='transformers'", "hf")
    from loom.rl.engines.transformers_engine import TransformersEngine

    return TransformersEngine(
        _model_of(settings),
        _tokenizer_of(settings),
        limits=settings.limits,
        seed=settings.seed,
        folder=settings.folder,
        device=device,
    )


def _own(settings: EngineSettings, device: str) -> InferenceEngine:
    from loom.rl.engines.own import OwnEngine

    make_model, tokenizer = settings.make_model, _tokenizer_of(settings)
    if make_model is None:
        from loom.rl.engines.cached_model import CachedModel
        from loom.rl.models import causal

        path = _model_of(settings)
        causal.check(path, tokenizer)

        def make_model() -> nn.Module:
            return CachedModel(causal.load(path).to(device), tokenizer.pad)

    return OwnEngine(make_model, tokenizer, limits=settings.limits, seed=settings.seed, folder=settings.folder)


def _model_of(settings: EngineSettings) -> str:
    if settings.model is None:
        raise WrongArguments(f"engine={settings.kind.value!r} needs a model: its folder, or its name on the hub")
    return settings.model


def _tokenizer_of(settings: EngineSettings) -> Tokenizer:
    if settings.tokenizer is not None:
        return settings.tokenizer
    from loom.rl.models.tokenizers import tokenizer_of

    return tokenizer_of(_model_of(settings))


def gpus_of(slot: int, count: int, shared: bool = False) -> Sequence[str]:
    """Return the uuids of a generator's GPUs on this host. Trainers take the first ones, so these are the last.

    Args:
        slot: the number of the generator on this host.
        count: GPUs of each generator.
        shared: whether they are those of trainers: the first ones.

    Raises:
        WrongArguments: this host has not as many.
    """
    from loom.devices.use import local_devices

    found = [device.uuid for device in local_devices() if device.kind == "gpu"]
    end = len(found) - slot * count
    if end < count:
        raise WrongArguments(
            f"generator {slot} of this host wants {count} GPUs after {slot * count} of others, and the "
            f"host has {len(found)}: fewer generators, or gpus=0 to share what is visible"
        )
    return found[slot * count : (slot + 1) * count] if shared else found[end - count : end]
