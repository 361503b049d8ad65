"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685) by peft: they alone learn; published merged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from loom.errors import WrongArguments
from loom.extras import require
from loom.rl.generation.tensor_files import Final
from loom.rl.settings import Lora

if TYPE_CHECKING:
    from torch import Tensor

_BASE, _ADAPTER = ".base_layer", ".lora_"


def add_adapters(model: Any, settings: Lora) -> None:
    """Add adapters to a model of transformers, whose own parameters learn no more.

    Raises:
        MissingDependency: peft is not installed.
        WrongArguments: the model has no modules of the names that are to be adapted.
    """
    require({"peft": "peft"}, "Trainers(lora=…)", "lora")
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(settings.targets) or "all-linear"
    try:
        config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=targets)
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise WrongArguments(f"{type(model).__name__} takes no adapters at {targets}: {error}") from error


def without_adapters(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's own weights under its own names."""
    return {name.replace(_BASE, ""): one for name, one in weights.items() if _ADAPTER not in name}


def merged(model: Any) -> Final:
    """Return a function that adds what the adapters have learned to a whole weight of the model.

    All members of a group call it, for the same names in the same order.
    """
    from loom.train.loop.training_state import whole

    adapted = {f"{name}.weight": one for name, one in model.named_modules() if hasattr(one, "lora_A")}

    def add(name: str, weight: Tensor) -> Tensor:
        layer = adapted.get(name)
        if layer is None:
            return weight
        for key in layer.active_adapters:
            first, second = (whole(one[key].weight.detach()) for one in (layer.lora_A, layer.lora_B))
            change = layer.scaling[key] * (second @ first)
            weight = weight + (change.T if layer.fan_in_fan_out else change)
        return weight

    return add
