"""Causal language models of Hugging Face: checked before a run, loaded for training, and published as files."""

from __future__ import annotations

import functools
import inspect
import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loom.errors import WrongArguments
from loom.extras import require
from loom.rl.generation.tensor_files import Final, gathered, unchanged, whats_wrong
from loom.rl.task import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("loom")

READING = timedelta(hours=2)
"""The time in which the first process of a group reads a model."""

UNUSED = 1024
"""Tokens that a model may have beyond its tokenizer's, to fill a matrix up, before that is worth a warning."""


def check(path: str | os.PathLike[str], tokenizer: Tokenizer) -> None:
    """Raise `WrongArguments` if a folder has no causal model for a tokenizer. No weight is read.

    Raises:
        MissingDependency: transformers is not installed.
        WrongArguments: no such folder, one that is written in part, a model without a causal head, or one with
            fewer tokens than the tokenizer has.
    """
    path = os.fspath(path)
    config = _config_of_folder(path)
    _check_kind(path, config)
    size = int(config.get_text_config().vocab_size)
    if tokenizer.size > size:
        raise WrongArguments(
            f"the tokenizer has {tokenizer.size} tokens, and the model {path} knows {size}: "
            "they are not of one model; resize the model's embeddings, or take its own tokenizer"
        )
    if size - tokenizer.size > UNUSED:
        _log.warning("the model %s knows %d tokens, and its tokenizer only %d", path, size, tokenizer.size)
    if Path(path).is_dir() and (reason := _whats_wrong(Path(path))):
        raise WrongArguments(f"the model {path} is not whole: {reason}")


def load(path: str | os.PathLike[str]) -> Any:
    """Return a folder's model on the CPU, in float32 and without dropout.

    Raises:
        MissingDependency: transformers is not installed.
        WrongArguments: the folder has no causal model, or weights are missing, or of other shapes.
    """
    path = os.fspath(path)
    _check_kind(path, _config_of_folder(path))
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    except Exception as error:
        raise WrongArguments(f"the model {path} cannot be read: {error}") from error
    wrong = [*found["missing_keys"], *(one[0] for one in found["mismatched_keys"])]
    if wrong:
        named = ", ".join(sorted(wrong)[:5])
        raise WrongArguments(
            f"the model {path} lacks {len(wrong)} of its weights, or has them in another shape: {named}"
        )
    return model.eval()  # the policy that learns is the policy that sampled: no dropout


def load_for_group(path: str | os.PathLike[str]) -> Any:
    """Return a folder's model, of which only the first process of torch's default group reads the weights.

    In the other processes it is on the meta device, where `loom.train` gives them their parts, unless the model
    keeps tensors that are neither parameters nor buffers. All processes call this, and wait for the first.

    Raises:
        WrongArguments: as `load`, in all processes.
    """
    from torch import distributed

    waiting = distributed.new_group(backend="gloo", timeout=READING)  # for longer than other exchanges take
    model, reasons = None, [""] * distributed.get_world_size()
    own = ""
    try:
        model = load(path) if distributed.get_rank() == 0 else _empty(os.fspath(path)) or load(path)
    except WrongArguments as error:
        own = str(error)
    distributed.all_gather_object(reasons, own, group=waiting)
    distributed.destroy_process_group(waiting)
    if reason := next(filter(None, reasons), ""):
        raise WrongArguments(reason)
    return model


def _empty(path: str) -> Any:
    """Return a folder's model on the meta device; None if it keeps tensors where nobody would fill them."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _config_of_folder(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if any(isinstance(one, torch.Tensor) for module in model.modules() for one in vars(module).values()):
        return None
    return model.eval()


def is_causal(model: Any) -> bool:
    """Return whether a model is one of transformers, which has tokens, a mask and positions as arguments."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def logits_of(model: Any, tokens: Tensor, seen: Tensor, last: int) -> Tensor:
    """Return a model's logits of the last positions, [rows, last, size].

    Args:
        model: one of transformers.
        tokens: [rows, positions].
        seen: True if a position has a token, False for padding, as ``tokens``.
        last: number of positions, from the end, that are wanted.
    """
    known = inspect.signature(model.forward).parameters
    wanted = {
        "attention_mask": seen.long(),
        "position_ids": (seen.long().cumsum(1) - 1).clamp(min=0),
        "use_cache": False,
        "logits_to_keep": last,
    }
    taken = {name: value for name, value in wanted.items() if name in known}
    logits: Tensor = model(input_ids=tokens, **taken).logits
    return logits[:, -last:]


def layers_of(model: Any) -> list[Any]:
    """Return the layers of a model of transformers, whose parameters are used together."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def checkpoint_activations(model: Any) -> None:
    """Compute the layers of a model of transformers again for the gradient, instead of keeping activations."""
    from torch.utils.checkpoint import checkpoint

    for layer in layers_of(model):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


BYTES_EACH = 16
"""Bytes of a parameter in training: it, its gradient and two averages of Adam's, in float32."""


def check_room(model: Any, device: str, members: int) -> None:
    """Raise `WrongArguments` if a GPU cannot hold a member's share of a model in training, besides activations."""
    import torch

    learned = sum(one.numel() for one in model.parameters() if one.requires_grad)
    fixed = sum(one.numel() * one.element_size() for one in model.parameters() if not one.requires_grad)
    wanted = (BYTES_EACH * learned + fixed) / members
    room = torch.cuda.mem_get_info(device)[1]
    if wanted > room:
        raise WrongArguments(
            f"{device} is too small: it has {room / 1e9:.1f} GB, and one of {members} that train "
            f"{learned / 1e6:.0f} M parameters takes {wanted / 1e9:.1f} GB besides activations: "
            "give a group more members"
        )


def config_of(model: Any, dtype: str) -> Mapping[str, Any]:
    """Return what ``config.json`` says of a model of transformers with weights of a type, such as ``float32``."""
    name = type(model).__name__.removeprefix("FSDP")
    config: Mapping[str, Any] = json.loads(model.config.to_json_string())
    return {**config, "architectures": [name], "dtype": dtype, "torch_dtype": dtype}


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model of transformers, without second names of the same weight."""
    known: set[int] = set()
    weights = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if id(one) not in known:
            known.add(id(one))
            weights[name] = one.detach()
    return weights


def with_names_of_files(
    model: Any, weights: Mapping[str, Tensor], dtype: str | None, final: Final
) -> tuple[Mapping[str, Tensor], Final]:
    """Return weights under the names that files of the model have, which may differ from those in memory.

    For the few kinds of models with such names, all weights are gathered first, on the CPU, in their last form.
    """
    if getattr(model, "_weight_conversions", None) is None:
        return weights, final
    from transformers.core_model_loading import revert_weight_conversion

    converted: Mapping[str, Tensor] = revert_weight_conversion(
        model, {name: one.cpu() for name, one in gathered(weights, dtype, final)}
    )
    return converted, unchanged


def _config_of_folder(path: str) -> Any:
    require({"transformers": "transformers"}, "a Hugging Face model", "hf")
    from transformers import AutoConfig

    if os.path.isabs(path) and not Path(path).is_dir():
        raise WrongArguments(f"there is no folder {path}, which was given as a model")
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:
        raise WrongArguments(f"{path} is no Hugging Face model, by folder or by name: {error}") from error


def _check_kind(path: str, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    stated = config.architectures or []
    if kind is None or (stated and kind.__name__ not in stated):
        what = ", ".join(stated) or config.model_type
        raise WrongArguments(
            f"{path} has a {what}, which is no causal language model: give one that predicts the next token"
        )


def _whats_wrong(folder: Path) -> str | None:
    """Return why a folder's weights are not whole, as far as their sizes tell; None if they are."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        else:
            names = sorted(one.name for one in folder.glob("*.safetensors"))
            if not names and not list(folder.glob("pytorch_model*.bin")):
                return "it has no weights, such as model.safetensors"
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return f"{index.name} cannot be read: {error}"
    return next((reason for name in names if (reason := whats_wrong(folder / name))), None)
