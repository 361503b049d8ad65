"""The facts of a Hugging Face model's folder that tell whether two engines have the same model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loom.errors import CheckpointBroken, WrongArguments
from loom.rl.generation import weight_files as files

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Numbers of a model's config, which two engines of one model have alike."""

HEAD = "lm_head.weight"

_LARGEST_HEADER = 100 << 20


def config_of(folder: str | Path) -> Mapping[str, Any]:
    """Return the config of a model's folder.

    Raises:
        WrongArguments: there is no such folder, or it has no config.
    """
    path = Path(folder) / files.CONFIG
    try:
        config: Mapping[str, Any] = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WrongArguments(f"{folder} is no folder of a Hugging Face model: {error}") from None
    return config


def is_folder(model: str) -> bool:
    """Return whether a model's name is a folder of this machine, and not a name on the hub."""
    return Path(model).is_dir() or model.startswith(("/", "./", "../", "~"))


def difference(model: str, other: Mapping[str, Any]) -> str | None:
    """Return how the config of an engine's model differs from that of a model's folder; None if it does not."""
    own = config_of(model)
    found = [
        f"{name} is {other[name]} there and {own[name]} here"
        for name in SHAPE
        if own.get(name) is not None and other.get(name) is not None and own[name] != other[name]
    ]
    return ", ".join(found) or None


def check_same_model(model: str, other: str, server: str) -> None:
    """Raise `WrongArguments` if a server has another model than it should, as far as both folders can be read."""
    if is_folder(model) and Path(other).is_dir() and (found := difference(model, config_of(other))):
        raise WrongArguments(f"{server} has another model than {model}: {found}")


def tensors_of(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors in a model's folder, whose files may be several.

    Raises:
        CheckpointBroken: a file is not there, or has no whole header.
    """
    folder = Path(folder)
    try:
        return {name: shape for file in files.model_files(folder) for name, shape in _header(file).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointBroken(f"the weights {folder} cannot be read: {error}") from error


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8 or (length := struct.unpack("<Q", start)[0]) > _LARGEST_HEADER:
            raise ValueError(f"{path.name} has no whole header")
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def check_same_tensors(model: str, tensors: Mapping[str, tuple[int, ...]], named: str) -> None:
    """Raise `WrongArguments` unless tensors have the names and shapes of those in a model's folder.

    An engine that is given other names would keep its old weights there, and say nothing.

    Args:
        model: the folder.
        tensors: names and shapes.
        named: what they are, for the error.
    """
    own, other = tensors_of(model), dict(tensors)
    if config_of(model).get("tie_word_embeddings"):  # the head is the embedding, and a file may have both
        own.pop(HEAD, None)
        other.pop(HEAD, None)
    if own.keys() != other.keys():
        lacks, extra = sorted(own.keys() - other.keys()), sorted(other.keys() - own.keys())
        raise WrongArguments(f"{named} are not this model's: missing {lacks[:5]}, unknown {extra[:5]}")
    for name, shape in own.items():
        if shape != other[name]:
            raise WrongArguments(
                f"{named} are not this model's: {name} has the shape {list(other[name])}, and the model's is "
                f"{list(shape)}"
            )
