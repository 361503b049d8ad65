"""`TrainingState`: the model and everything else that a training needs to continue, for peers and checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor, distribute_tensor

from loom.errors import WrongArguments
from loom.train.checkpoints.store import on_the_cpu
from loom.train.loop.agreement import AgreedConfig
from loom.train.loop.data_feed import DataFeed
from loom.train.model import TrainerModel
from loom.train.settings import Averaging, TrainerReport
from loom.train.spec import Assignment


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor; every process of the group has to call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def plain(tree: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a state with each tensor converted, such as by `local` for a peer."""
    if isinstance(tree, torch.Tensor):
        return convert(tree.detach())
    if isinstance(tree, Mapping):
        return {key: plain(value, convert) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(plain(value, convert) for value in tree)
    return tree


def placed(model: Any, trainer: TrainerModel, members: int) -> Any:
    """Return a model on the trainer's device; several members of a group share its parameters (FSDP2).

    If some members have it on the meta device, all get the first member's values.
    """
    if members == 1:
        return model.to(trainer.device)
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    values = {name: tensor.detach() for name, tensor in _tensors(model)}  # the whole ones, before they are sharded
    is_empty = any(tensor.is_meta for tensor in values.values())
    some_empty = torch.tensor(is_empty, dtype=torch.int32, device=trainer.device)
    distributed.all_reduce(some_empty, op=distributed.ReduceOp.MAX)
    # By itself it takes a GPU wherever there is one, also for a model on the CPU.
    mesh = init_device_mesh(torch.device(trainer.device).type, (members,))
    for part in trainer.parts(model):
        fully_shard(part, mesh=mesh)  # a GPU has one of them as a whole at a time
    fully_shard(model, mesh=mesh)
    model = model.to_empty(device=trainer.device) if is_empty else model.to(trainer.device)
    if some_empty:
        _spread(model, values)
    return model


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each parameter and each buffer with its name, also the buffers that are in no state."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _spread(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Give all members of the group the first one's values, of which there is one as a whole at a time."""
    is_first = distributed.get_rank() == 0
    with torch.no_grad():
        for name, tensor in _tensors(model):
            value, own = values.pop(name), local(tensor)
            value = value.to(own.device) if is_first else torch.empty_like(value, device=own.device)
            if isinstance(tensor, DTensor):
                own.copy_(local(_like(tensor, value, of_whole=True)))
            else:
                distributed.broadcast(value, src=0)
                own.copy_(value)


def load_model(model: torch.nn.Module, state: Mapping[str, torch.Tensor], of_whole: bool) -> None:
    """Copy the values of a plain state into a model."""
    own = model.state_dict()
    if own.keys() != state.keys():
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        raise WrongArguments(f"the state is of another model: it lacks {missing}, and has {unknown}")
    with torch.no_grad():
        for name, tensor in own.items():
            local(tensor).copy_(local(_like(tensor, state[name], of_whole)))


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], of_whole: bool) -> None:
    """Load a plain state into an optimizer."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    kept = {
        number: {
            key: _like(parameters[number], value, of_whole) if _is_shaped(value) else value
            for key, value in entry.items()
        }
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({"state": kept, "param_groups": state["param_groups"]})


def _is_shaped(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _like(tensor: torch.Tensor, value: torch.Tensor, of_whole: bool) -> torch.Tensor:
    value = value.to(local(tensor).device)
    if not isinstance(tensor, DTensor) or isinstance(value, DTensor):
        return value
    if of_whole:
        return distribute_tensor(value, tensor.device_mesh, tensor.placements)
    return DTensor.from_local(
        value, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride()
    )


def flatten(tensors: Iterable[torch.Tensor], extra: Sequence[float] = ()) -> torch.Tensor:
    """Return tensors, followed by some numbers, as one flat tensor."""
    parts = [local(tensor).detach().reshape(-1) for tensor in tensors]
    return torch.cat([*parts, parts[0].new_tensor(list(extra))])


def unflatten(flat: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[float]:
    """Copy a flat tensor back into tensors; return the numbers that follow them."""
    offset = 0
    with torch.no_grad():
        for tensor in tensors:
            into = local(tensor)
            into.copy_(flat[offset : offset + into.numel()].view_as(into))
            offset += into.numel()
    rest: list[float] = flat[offset:].tolist()
    return rest


def hash_of(model: torch.nn.Module) -> str:
    """Return the SHA-256 of this process's part of a model's parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(local(tensor).detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class ParameterMean:
    """The outer step of local SGD: the mean of all groups' parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def progress(self) -> Sequence[torch.Tensor]:
        return self._parameters

    def follow(self, mean: torch.Tensor) -> None:
        unflatten(mean, self._parameters)


class OuterOptimizer:
    """DiLoCo's outer step: SGD with Nesterov momentum on the parameters on which all groups last agreed.

    The rates are those of the paper (https://arxiv.org/abs/2311.08105), section 3.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._anchors = [torch.nn.Parameter(local(one).detach().clone()) for one in parameters]
        self._sgd = torch.optim.SGD(self._anchors, lr=0.7, momentum=0.9, nesterov=True)

    def progress(self) -> list[torch.Tensor]:
        """Return the distance that each parameter has moved, as a gradient: with the opposite sign."""
        pairs = zip(self._anchors, self._parameters, strict=True)
        return [anchor.detach() - local(parameter).detach() for anchor, parameter in pairs]

    def follow(self, mean: torch.Tensor) -> None:
        """Step by the mean of all groups' progress, and copy the result to the parameters."""
        gradients = [torch.zeros_like(anchor) for anchor in self._anchors]
        unflatten(mean, gradients)
        for anchor, gradient in zip(self._anchors, gradients, strict=True):
            anchor.grad = gradient
        self._sgd.step()
        with torch.no_grad():
            for anchor, parameter in zip(self._anchors, self._parameters, strict=True):
                local(parameter).copy_(anchor)

    def state(self) -> Mapping[str, Any]:
        return {"anchors": [anchor.detach() for anchor in self._anchors], "sgd": self._sgd.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for anchor, value in zip(self._anchors, state["anchors"], strict=True):
                anchor.copy_(value)
        self._sgd.load_state_dict(state["sgd"])


FROM_THE_BEGINNING = "the beginning"  # `TrainerReport.restored` of a process that took over no state


class TrainingState:
    """The model, optimizers, step and configuration of a process. Only the training thread writes its report."""

    def __init__(
        self, trainer: TrainerModel, assignment: Assignment, rank: int, config: AgreedConfig, report: TrainerReport
    ) -> None:
        self.trainer = trainer
        self.assignment = assignment
        self.job = job = assignment.job
        self.rank = rank
        self.config = config
        self.report = report
        torch.manual_seed(trainer.seed)
        self.is_shared = job.members > 1 and job.parallel == "fsdp"
        """True if the members of the group share the parameters."""
        self.model = placed(trainer.build(), trainer, job.members if self.is_shared else 1)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.outer = OuterOptimizer(self.parameters) if job.averaging is Averaging.DILOCO else None
        loader = trainer.data_loader()
        self.feed = None if loader is None else DataFeed(loader)
        self._use_optimizer(config.current.optimizer)

    def adopt(self, changed: Iterable[str]) -> None:
        if "optimizer" in changed:
            self._use_optimizer(self.config.current.optimizer)

    def tune_optimizer(self) -> float:
        """Set the optimizer to what the configuration says for this step; return the learning rate."""
        config, groups = self.config.current, self.optimizer.param_groups
        rate = config.rate(self.report.step, self.job.steps)
        decays = any(group.get("weight_decay") for group in groups)
        for group, share in zip(groups, self._shares, strict=True):
            group["lr"] = rate * share
            if config.weight_decay is not None and (group.get("weight_decay") or not decays):
                group["weight_decay"] = config.weight_decay
            if "betas" in group:
                first, second = group["betas"]
                first = first if config.beta1 is None else config.beta1
                group["betas"] = (first, second if config.beta2 is None else config.beta2)
        return rate

    def _use_optimizer(self, name: str) -> None:
        self._optimizer_name = name
        rate = self.config.current.learning_rate
        self.optimizer: torch.optim.Optimizer = self.trainer.optimizers[name](self.parameters, rate)
        self._shares = [group["lr"] / rate for group in self.optimizer.param_groups]
        self.config.has_betas = "betas" in self.optimizer.defaults

    def evaluate(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            metrics = self.trainer.evaluate(self.model)
        self.model.train()
        return metrics

    def save(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> Mapping[str, Any]:
        """Return the state, with each tensor converted: by `local` for the same rank of a joining group."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "optimizer_name": self._optimizer_name,
            "outer": None if self.outer is None else self.outer.state(),
            "step": self.report.step,
            "config": self.config.state(),
            "trainer": self.trainer.save(),
            **({} if self.feed is None else {"data": self.feed.state(self.report.step)}),
        }
        converted: Mapping[str, Any] = plain(state, convert)
        return converted

    def place(self, name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor into which a checkpoint's is read: for shared parameters only this process's part."""
        kind, _, rest = name.partition(".")
        like = self.model.state_dict().get(rest if kind == "model" else name)
        if kind == "optimizer" and (number := rest.split(".")[1:2]) and number[0].isdigit():
            learned = [one for group in self.optimizer.param_groups for one in group["params"]]
            like = learned[int(number[0])] if int(number[0]) < len(learned) else None
        if isinstance(like, DTensor) and like.shape == shape:
            return torch.empty_like(like.detach(), dtype=dtype)
        return on_the_cpu(name, shape, dtype)

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Begin with the model of another program's checkpoint: its entry ``model``, or all of it."""
        load_model(self.model, state.get("model", state), of_whole=True)

    def take_from_peer(self, state: Mapping[str, Any]) -> None:
        """Continue from a peer's state."""
        self.load(state, of_whole=False)
        if self.report.restored:
            return
        step = self.report.step
        self.report.restored = f"peers, at step {step}" if step else FROM_THE_BEGINNING
        self.report.restored_step = step

    def load(self, state: Mapping[str, Any], of_whole: bool) -> None:
        """Continue from a state: of a checkpoint (``of_whole``), or one that `save` converted by `local`."""
        self.config.load(state["config"])
        self._use_optimizer(state["optimizer_name"])
        load_model(self.model, state["model"], of_whole)
        load_optimizer(self.optimizer, state["optimizer"], of_whole)
        if self.outer is not None:
            self.outer.load(state["outer"])
        self.trainer.load(state["trainer"])
        if self.feed is not None and "data" in state:  # it had no loader when it was saved
            self.feed.load(state["data"])
        self.report.step = state["step"]
