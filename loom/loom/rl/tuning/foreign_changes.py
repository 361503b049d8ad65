"""What answers a finding about a run of another framework: a change while it runs, or options of its next start."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from loom.rl.diagnosis.diagnosis import Finding
from loom.rl.diagnosis.frameworks import OPENRLHF, PRIME_RL, SKYRL, SLIME, TRL, VERL, Framework, PublicSource
from loom.rl.diagnosis.rules import RuleName
from loom.rl.tuning.changes import Config, Goal, NoChange, OptionChange


@dataclass(frozen=True)
class StartOptions:
    """The options of a framework's next start by the rule that they answer, and where their names come from."""

    sources: tuple[PublicSource, ...]
    answers: dict[RuleName, str]


START_OPTIONS = {
    PRIME_RL.name: StartOptions(
        (
            PublicSource(
                "PrimeIntellect-ai/prime-rl",
                "packages/prime-rl-configs/src/prime_rl/configs/orchestrator.py",
                "004274ec964f016ec9b17b5ae990a4b535314ff1",
            ),
            PublicSource(
                "PrimeIntellect-ai/prime-rl",
                "packages/prime-rl-configs/src/prime_rl/configs/inference.py",
                "01496f7f4c74299bf5a738002ea649b2364b24e7",
            ),
        ),
        {
            RuleName.GENERATOR: "more inference.parallel.dp",
            RuleName.TRAINER: "a lower orchestrator.batch_size",
            RuleName.LOADING: "nccl as orchestrator.weight_broadcast.type, and as that of trainer and inference",
            RuleName.KV_CACHE: "a higher inference.gpu_memory_utilization, or a lower "
            "orchestrator.max_inflight_rollouts",
            RuleName.TAIL: "a lower orchestrator.train.sampling.max_completion_tokens",
            RuleName.TRUNCATION: "a higher orchestrator.train.sampling.max_completion_tokens",
            RuleName.CANCELLED: "a higher orchestrator.max_off_policy_steps",
            RuleName.STALENESS: "a lower orchestrator.max_off_policy_steps",
            RuleName.MISMATCH: "a lower orchestrator.max_off_policy_steps",
            RuleName.FAILED: "a higher orchestrator.train.max_retries",
        },
    ),
    VERL.name: StartOptions(
        (
            PublicSource(
                "verl-project/verl",
                "verl/trainer/config/rollout/rollout.yaml",
                "005f273254d00e9b03d07c80b906ac36e48b7f0d",
            ),
            PublicSource(
                "verl-project/verl",
                "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml",
                "d23b2829e523282094708b8ac16316878a5b0554",
            ),
        ),
        {
            RuleName.LOADING: "nccl as actor_rollout_ref.rollout.checkpoint_engine.backend",
            RuleName.KV_CACHE: "a higher actor_rollout_ref.rollout.gpu_memory_utilization",
            RuleName.TAIL: "a lower data.max_response_length",
            RuleName.TRUNCATION: "a higher data.max_response_length",
            RuleName.STALENESS: "a lower async_training.staleness_threshold",
            RuleName.MISMATCH: "a lower async_training.staleness_threshold",
        },
    ),
    SLIME.name: StartOptions(
        (PublicSource("THUDM/slime", "slime/utils/arguments.py", "002fa9d6bac42357d127df88ba01853fc56f939b"),),
        {
            RuleName.GENERATOR: "more --rollout-num-gpus",
            RuleName.TRAINER: "more --actor-num-nodes or --actor-num-gpus-per-node",
            RuleName.LOADING: "nccl as --update-weight-transport, or a larger --update-weight-buffer-size",
            RuleName.KV_CACHE: "a higher --sglang-mem-fraction-static",
            RuleName.TAIL: "--partial-rollout, or a lower --rollout-max-response-len",
            RuleName.TRUNCATION: "a higher --rollout-max-response-len",
        },
    ),
    SKYRL.name: StartOptions(
        (
            PublicSource(
                "NovaSky-AI/SkyRL",
                "skyrl/train/config/ppo_base_config.yaml",
                "1331ec7d373c664ef1dabec6ab2ae8f1fbf937c2",
            ),
        ),
        {
            RuleName.CHECKPOINT: "a higher trainer.ckpt_interval",
            RuleName.KV_CACHE: "a higher generator.inference_engine.gpu_memory_utilization",
            RuleName.TAIL: "a lower generator.sampling_params.max_generate_length",
            RuleName.TRUNCATION: "a higher generator.sampling_params.max_generate_length",
            RuleName.STALENESS: "a lower trainer.fully_async.max_staleness_steps",
            RuleName.MISMATCH: "a lower trainer.fully_async.max_staleness_steps",
        },
    ),
    TRL.name: StartOptions(
        (
            PublicSource(
                "huggingface/trl", "trl/trainer/grpo_config.py", "006d32c9bf5da698815726ebd0de78b404e8163d"
            ),
            PublicSource(
                "huggingface/trl",
                "trl/experimental/async_grpo/async_grpo_config.py",
                "019ac735792bb3a56e904d4d086d3bfa13acf8e2",
            ),
        ),
        {
            RuleName.LOADING: "a higher weight_sync_steps, of the AsyncGRPOTrainer",
            RuleName.KV_CACHE: "a higher vllm_gpu_memory_utilization",
            RuleName.TAIL: "a lower max_completion_length",
            RuleName.TRUNCATION: "a higher max_completion_length",
            RuleName.STALENESS: "a lower max_staleness, of the AsyncGRPOTrainer",
            RuleName.MISMATCH: "a lower max_staleness, of the AsyncGRPOTrainer",
        },
    ),
    OPENRLHF.name: StartOptions(
        (
            PublicSource(
                "OpenRLHF/OpenRLHF", "openrlhf/cli/train_ppo_ray.py", "021d1b09641902f7f06dc42331c75b37793ca950"
            ),
        ),
        {
            RuleName.GENERATOR: "more --vllm_num_engines",
            RuleName.LOADING: "nccl as --vllm_sync_backend",
            RuleName.KV_CACHE: "a higher --vllm_gpu_memory_utilization",
            RuleName.TAIL: "a lower --generate_max_len",
            RuleName.TRUNCATION: "a higher --generate_max_len",
            RuleName.STALENESS: "a lower --async_queue_size",
            RuleName.MISMATCH: "--enable_vllm_is_correction, or a lower --async_queue_size",
        },
    ),
}
"""The options by the name of the framework."""
FACTOR = "learning_rate_factor"
"""The key of a training under ``loom run`` that multiplies the learning rate of its schedule."""


def foreign_change(
    finding: Finding,
    framework: Framework,
    config: Config,
    replica: str | None,
    tried: Container[tuple[str, str]] = (),
) -> OptionChange | NoChange:
    """Return the change that answers a finding about a framework's run, or why there is none while it runs.

    Args:
        finding: of the analysis of the run's logs.
        framework: the framework.
        config: the keys that the run takes, with their values; none if it has no replica.
        replica: the name of its replicas; None if they are not known.
        tried: the keys of changes that were taken back.
    """
    rule = finding.name
    if rule is RuleName.MISMATCH and replica is not None and FACTOR in config:
        now = config[FACTOR] or 1.0
        why = "A policy that moves half as far in a step differs less from the one that generated."
        change = OptionChange(FACTOR, now, now / 2, rule.value, why, None, replica, Goal.MISMATCH)
        return change if change.key not in tried else NoChange(rule.value, f"{change} was tried and taken back.")
    if framework.door is None:
        while_runs = f"{framework.name} takes no changes while it runs."
    elif rule is RuleName.MISMATCH:
        while_runs = (
            f"{framework.name} takes a lower learning rate under `loom run`: name its replica with --replica."
        )
    else:
        while_runs = f"Nothing that {framework.name} takes while it runs answers it."
    options = START_OPTIONS.get(framework.name)
    answer = None if options is None else options.answers.get(rule)
    then = f"Start the next one with {answer}." if answer else finding.rule.suggests
    return NoChange(rule.value, f"{while_runs} {then}")
