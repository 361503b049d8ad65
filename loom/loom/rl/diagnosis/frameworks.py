"""The names under which each framework logs the quantities of `loom.rl.diagnosis.signals`, as data.

Names and forms of lines come from the public sources that stand beside each table. A ``*`` in a name stands for one
or more characters: an environment, an agent, an engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from loom.rl.diagnosis.signals import RunSide, Signal


@dataclass(frozen=True)
class PublicSource:
    """A public file that a table was made from."""

    repository: str
    path: str
    commit: str


@dataclass(frozen=True)
class Quantity:
    """A signal, and the names that have it; the first of them that a row has counts."""

    signal: Signal
    names: tuple[str, ...]
    scale: float = 1.0
    beside: str | None = None
    """It counts only in a row that also has this name."""
    over: str | None = None
    """The name of the number that it is divided by."""
    behind_step: bool = False
    """True if it is a version, so that the signal is how far it is behind the step."""


@dataclass(frozen=True)
class LineForms:
    """The form of a framework's log lines with metrics."""

    head: str
    """Regular expression of the beginning; group ``step`` is the step's number, if the line has it."""
    item: str
    """Regular expression of one metric, with groups ``name``, ``value`` and perhaps ``unit``."""
    several: bool = False
    """True if the metrics may go on in the lines behind it, up to a closing brace."""
    counts: bool = False
    """True if each line is a step, for lines without the step's number; else they are about the next step."""


@dataclass(frozen=True)
class WaitLine:
    """A line by which one side says that it waits for the other."""

    text: str
    waits: RunSide
    seconds: float = 0.0
    """It is said once in so many seconds, for as long as that side waits; 0 if it is said once."""


@dataclass(frozen=True)
class Framework:
    """A framework whose runs can be read."""

    name: str
    sources: tuple[PublicSource, ...]
    telling: tuple[str, ...]
    """Texts by which its logs are recognized; two of them are enough."""
    quantities: tuple[Quantity, ...]
    steps: tuple[str, ...] = ("step", "_step")
    """The names of a row's step; the first one that a row has counts."""
    lines: tuple[LineForms, ...] = ()
    waits: tuple[WaitLine, ...] = ()
    prefix: str = ""
    """A prefix of the names in trackers, which its log lines do not have."""
    door: str | None = None
    """What a running run takes through `loom run`; None if nothing is known to get through to it."""


_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf)"
_MAPPING = rf"['\"](?P<name>[^'\"]+)['\"]: ?['\"]?(?:np\.\w+\()?(?P<value>{_NUMBER})"
_SECONDS, _SHARE = 1000.0, 100.0


def _timed(signal: Signal, *names: str, beside: str | None = None) -> Quantity:
    return Quantity(signal, names, _SECONDS, beside=beside)


def _share(signal: Signal, *names: str, over: str | None = None) -> Quantity:
    return Quantity(signal, names, _SHARE, over=over)


PRIME_RL = Framework(
    "prime-rl",
    (
        PublicSource(
            "PrimeIntellect-ai/prime-rl",
            "src/prime_rl/orchestrator/shipper.py",
            "b0d452038c8217a25a14fe6b535db4e62764ea53",
        ),
        PublicSource(
            "PrimeIntellect-ai/prime-rl",
            "src/prime_rl/trainer/rl/train.py",
            "004274ec964f016ec9b17b5ae990a4b535314ff1",
        ),
        PublicSource(
            "PrimeIntellect-ai/prime-rl",
            "src/prime_rl/orchestrator/inference_metrics.py",
            "5ac93e88c118fff24efe25b0673e72477b519be6",
        ),
        PublicSource(
            "PrimeIntellect-ai/prime-rl",
            "src/prime_rl/monitors/file.py",
            "0b77f2379587fd793fa039c502b24165cc5972e4",
        ),
    ),
    (
        "time/wait_for_batch",
        "time/wait_for_policy",
        "time/wait_for_ckpt",
        "off_policy/",
        "Off-Policy",
        "mismatch_kl/",
        "Mismatch KL",
        "inference/agg/",
        "Orchestrator paused",
    ),
    (
        Quantity(Signal.STEP, ("time/step",), beside="time/wait_for_policy"),
        Quantity(Signal.STEP, ("time/step",), beside="time/wait_for_ckpt"),
        Quantity(Signal.STEP, ("Time",), beside="Reward"),
        Quantity(Signal.TRAINER_STEP, ("time/step",), beside="time/wait_for_batch"),
        Quantity(Signal.TRAINER_STEP, ("Time",), beside="Loss"),
        _timed(Signal.WAIT_BATCH, "time/wait_for_batch"),
        _timed(Signal.WAIT_POLICY, "time/wait_for_policy", "time/wait_for_ckpt", "resumed"),
        _timed(Signal.GENERATE, "time/generate_completions"),
        _timed(Signal.TRAIN, "time/forward_backward"),
        _timed(Signal.TRAIN, "time/load_data"),
        _timed(Signal.SYNC, "time/broadcast_weights"),
        _timed(Signal.WRITE, "time/save_ckpt", beside="time/wait_for_batch"),
        _share(Signal.TRUNCATED, "train/agg/effective/*/is_truncated/mean", "is_truncated/all/mean"),
        Quantity(Signal.TRUNCATED, ("Truncation",)),
        Quantity(
            Signal.STALENESS,
            ("off_policy/mean", "dispatcher/off_policy/mean", "Max Off-Policy", "Max. Off-Policy Level"),
        ),
        Quantity(Signal.REWARD, ("train/agg/effective/*/reward/mean", "reward/all/mean", "Reward")),
        _share(Signal.FAILED, "train/agg/all/has_error/mean", "rollouts/errored_rate"),
        Quantity(Signal.FAILED, ("Error",)),
        _share(Signal.CANCELLED, "train/agg/all/cancelled/mean"),
        _share(Signal.CANCELLED, "dispatcher/cancelled/train", over="progress/rollouts"),
        Quantity(Signal.CANCELLED, ("Cancelled",)),
        Quantity(Signal.MISMATCH, ("mismatch_kl/all/mean", "mismatch_kl/mean", "Mismatch KL")),
        Quantity(Signal.LENGTH, ("train/agg/effective/num_output_tokens/mean", "decode_len/all/mean")),
        Quantity(Signal.LONGEST, ("train/agg/effective/num_output_tokens/max", "decode_len/all/max")),
        _share(Signal.KV_CACHE, "inference/agg/kv_cache_usage_perc/max", "inference/agg/kv_cache_usage_max"),
        Quantity(Signal.RUNNING, ("inference/agg/num_requests_running/sum", "inference/agg/running_requests")),
        Quantity(Signal.WAITING, ("inference/agg/num_requests_waiting/sum", "inference/agg/waiting_requests")),
        Quantity(Signal.PREEMPTIONS, ("inference/agg/num_preemptions_total:rate/sum",)),
        Quantity(Signal.TOKENS, ("inference/agg/generation_tokens_total:rate/sum", "inference/agg/throughput")),
    ),
    lines=(
        LineForms(
            r"(?:SUCCESS|INFO)\s+Step (?P<step>\d+) \|(?=.*(?:Reward|Loss))",
            rf"(?:^|\|) *(?P<name>[A-Z][A-Za-z. -]*?)?:? *(?P<value>{_NUMBER})(?P<unit>%|ms|s|m|h)?"
            r"(?= *(?:\||$|tok|Gi|/))",
        ),
        LineForms(
            r"Orchestrator (?=resumed: checkpoint)", rf"(?P<name>resumed): .*\(after (?P<value>{_NUMBER})s\)"
        ),
    ),
    waits=(
        WaitLine("Pausing dispatcher until inference applies policy", RunSide.GENERATORS),
        WaitLine("Orchestrator paused: waiting for trainer", RunSide.GENERATORS),
        WaitLine("Waiting for training batch to arrive", RunSide.TRAINERS),
    ),
    door="the learning rate and the other values of the optimizer, if its trainers run under `loom run`",
)

_VERL_SOURCES = "verl-project/verl"
VERL = Framework(
    "verl",
    (
        PublicSource(
            _VERL_SOURCES, "verl/utils/logger/aggregate_logger.py", "b017a83320fdbc6c4e76efe499dc5f3f4aec76af"
        ),
        PublicSource(_VERL_SOURCES, "verl/trainer/ppo/metric_utils.py", "01bd7e85b1f6b7e87db6759d9260e644001a54f0"),
        PublicSource(_VERL_SOURCES, "verl/utils/tracking.py", "047621b2583780b8ebda21126e75f5bf48dea7b9"),
        PublicSource(
            _VERL_SOURCES,
            "verl/experimental/fully_async_policy/detach_utils.py",
            "0351589fc034541a88d7244488652ac325172e7d",
        ),
    ),
    (
        "timing_s/",
        "actor/pg_loss",
        "actor/ppo_kl",
        "critic/score/mean",
        "global_seqlen/",
        "response_length/clip_ratio",
        "fully_async/",
    ),
    (
        Quantity(Signal.STEP, ("timing_s/step", "perf/time_per_step")),
        _timed(Signal.GENERATE, "timing_s/gen", "timing/gen", beside="actor/pg_loss"),
        _timed(Signal.TRAIN, "timing_s/update_actor", "timing/update_actor"),
        _timed(Signal.TRAIN, "timing_s/update_critic", "timing/update_critic"),
        _timed(Signal.TRAIN, "timing_s/old_log_prob"),
        _timed(Signal.TRAIN, "timing_s/ref", "timing/ref"),
        _timed(Signal.TRAIN, "timing_s/values", "timing/values"),
        _timed(Signal.SYNC, "timing_s/update_weights", "timing_s/param_sync"),
        _timed(Signal.WRITE, "timing_s/save_checkpoint"),
        _timed(Signal.EVALUATE, "timing_s/testing"),
        _share(Signal.TRUNCATED, "response_length/clip_ratio"),
        Quantity(Signal.REWARD, ("critic/score/mean", "critic/rewards/mean")),
        _share(Signal.FAILED, "response/aborted_ratio"),
        Quantity(Signal.STALENESS, ("fully_async/partial/max_partial_span",)),
        Quantity(Signal.MISMATCH, ("rollout_corr/kl", "training/rollout_probs_diff_mean")),
        Quantity(Signal.LENGTH, ("response_length/mean",)),
        Quantity(Signal.LONGEST, ("response_length/max",)),
    ),
    steps=("step", "training/global_step", "_step"),
    lines=(
        LineForms(
            r"\bstep:(?P<step>\d+) - ",
            rf"(?:^| - )(?P<name>[^\s:]+(?:\([^)]*\))?):(?:np\.\w+\()?(?P<value>{_NUMBER})",
        ),
    ),
)

SLIME = Framework(
    "slime/miles",
    (
        PublicSource("THUDM/slime", "slime/ray/rollout.py", "a51f0714179da87b1abdff81f99ae1e22034be92"),
        PublicSource(
            "THUDM/slime",
            "slime/utils/training/train_metric_utils.py",
            "d8c7cc6f51d21530c147a8a84a15270d216fcb95",
        ),
        PublicSource("radixark/miles", "miles/ray/rollout/metrics.py", "0174ab47d235f96c406b05e8133bf6cb50f5db2a"),
    ),
    (
        "perf/rollout_time",
        "perf/train_wait_time",
        "rollout/response_len/",
        "train/train_rollout_logprob_abs_diff",
        "rollout/raw_reward",
        "rollout/repetition_frac",
    ),
    (
        Quantity(Signal.STEP, ("perf/step_time",)),
        _timed(Signal.GENERATE, "perf/rollout_time"),
        _timed(Signal.WAIT_BATCH, "perf/train_wait_time"),
        _timed(Signal.TRAIN, "perf/train_time", "perf/actor_train_time"),
        _timed(Signal.SYNC, "perf/update_weights_time"),
        _timed(Signal.WRITE, "perf/save_model_time"),
        _timed(Signal.EVALUATE, "perf/eval_time"),
        _share(Signal.TRUNCATED, "rollout/truncated_ratio"),
        Quantity(Signal.REWARD, ("rollout/raw_reward", "rollout/episode_raw_reward", "rollout/rewards")),
        Quantity(Signal.STALENESS, ("rollout/weight_version/mean",), behind_step=True),
        Quantity(Signal.MISMATCH, ("train/train_rollout_kl", "train/train_rollout_logprob_abs_diff")),
        Quantity(Signal.LENGTH, ("rollout/response_len/mean",)),
        Quantity(Signal.LONGEST, ("rollout/response_len/max",)),
    ),
    steps=("rollout/step", "train/step", "_step", "step"),
    lines=(LineForms(r"\b(?:perf|rollout|step) (?P<step>\d+): \{", _MAPPING),),
)

SKYRL = Framework(
    "SkyRL",
    (
        PublicSource(
            "NovaSky-AI/SkyRL", "skyrl/train/fully_async_trainer.py", "06a734eacb1531367cb7bb0560a9c04985b1aa58"
        ),
        PublicSource(
            "NovaSky-AI/SkyRL", "skyrl/train/utils/tracking.py", "0e0416b6c7ed772f73496798fa61b15086c661e3"
        ),
    ),
    (
        "trainer/global_step",
        "generate/avg_num_tokens",
        "timing/sync_weights",
        "timing/wait_for_generation_buffer",
        "reward/avg_raw_reward",
        "timing/policy_train",
        "async/staleness_mean",
    ),
    (
        Quantity(Signal.STEP, ("timing/step",)),
        _timed(Signal.GENERATE, "timing/generate"),
        _timed(Signal.WAIT_BATCH, "timing/wait_for_generation_buffer"),
        _timed(Signal.TRAIN, "timing/train_critic_and_policy", "timing/policy_train"),
        _timed(Signal.TRAIN, "timing/fwd_logprobs_values_reward"),
        _timed(Signal.SYNC, "timing/sync_weights"),
        _timed(Signal.WRITE, "timing/save_checkpoints"),
        _timed(Signal.EVALUATE, "timing/eval"),
        Quantity(Signal.REWARD, ("reward/avg_raw_reward", "loss/avg_final_rewards")),
        _share(Signal.FAILED, "generate/num_failed_trajectories", over="generate/num_trials"),
        Quantity(Signal.STALENESS, ("async/staleness_mean",)),
        Quantity(Signal.MISMATCH, ("policy/rollout_train_logprobs_abs_diff_mean", "policy/tis/log_ratio_abs_mean")),
        Quantity(Signal.LENGTH, ("generate/avg_num_tokens",)),
        Quantity(Signal.LONGEST, ("generate/max_num_tokens",)),
    ),
    steps=("trainer/global_step", "_step", "step"),
    lines=(LineForms(r"\bStep (?P<step>\d+): *(?=\{|$)", _MAPPING, several=True),),
)

TORCHTITAN = Framework(
    "torchtitan rl",
    (
        PublicSource(
            "pytorch/torchtitan",
            "torchtitan/experiments/rl/controller_metrics.py",
            "29de35abdf0efd2362264db1a557d2f64a980ef5",
        ),
        PublicSource(
            "pytorch/torchtitan",
            "torchtitan/experiments/rl/observability/metrics/console.py",
            "a4021b33b604a9f434685d2337075c334e62c82f",
        ),
    ),
    (
        "timing/step/",
        "rollout_reward/",
        "Train | Step:",
        "train_batch/policy_age",
        "bit_wise/logprob_diff",
        "perf/trainer/",
    ),
    (
        Quantity(Signal.STEP, ("timing/step/total/mean", "timing/step/total")),
        _timed(
            Signal.WAIT_BATCH, "timing/step/wait_for_training_batch/mean", "timing/step/wait_for_training_batch"
        ),
        _timed(Signal.TRAIN, "timing/step/forward_backward/mean", "timing/step/forward_backward"),
        _timed(Signal.TRAIN, "timing/step/optim/mean", "timing/step/optim"),
        _timed(Signal.SYNC, "timing/step/push_model_state_dict/mean", "timing/step/push_model_state_dict"),
        _timed(Signal.SYNC, "timing/step/pull_model_state_dict/mean", "timing/step/pull_model_state_dict"),
        _timed(Signal.EVALUATE, "timing/validate"),
        _share(Signal.TRUNCATED, "rollout/truncation_rate/mean", "rollout/truncation_rate"),
        Quantity(Signal.REWARD, ("rollout_reward/_mean", "reward/_mean")),
        Quantity(Signal.STALENESS, ("train_batch/policy_age/mean",)),
        Quantity(Signal.MISMATCH, ("bit_wise/logprob_diff/mean",)),
        Quantity(Signal.LENGTH, ("rollout/response_length/mean",)),
        Quantity(Signal.LONGEST, ("rollout/response_length/max",)),
    ),
    lines=(LineForms(r"\bTrain \| Step: *(?P<step>\d+)", rf"  (?P<name>[^\s:]+): (?P<value>{_NUMBER})"),),
)

TRL = Framework(
    "TRL",
    (
        PublicSource("huggingface/trl", "trl/trainer/grpo_trainer.py", "d2b69d769dab6f77acbfd33252bcd7d22765571b"),
        PublicSource(
            "huggingface/trl",
            "trl/experimental/async_grpo/async_grpo_trainer.py",
            "20463989e8d9fef8dbba7230c7fb11bdd7f6387f",
        ),
    ),
    (
        "completions/mean_length",
        "completions/clipped_ratio",
        "frac_reward_zero_std",
        "profiling/Time taken: ",
        "'reward_std'",
        "sampling/sampling_logp_difference",
        "queue_wait_time_s",
    ),
    (
        Quantity(Signal.STEP, ("step_time",)),
        _timed(
            Signal.GENERATE,
            "profiling/Time taken: *Trainer.vLLM.generate",
            "profiling/Time taken: *Trainer.vllm_generate",
            "profiling/Time taken: *Trainer.transformers.generate",
        ),
        _timed(Signal.WAIT_BATCH, "queue_wait_time_s"),
        _timed(Signal.TRAIN, "profiling/Time taken: *Trainer.compute_loss", "forward_time_s"),
        _timed(Signal.TRAIN, "profiling/Time taken: *Trainer._get_per_token_logps*"),
        _timed(
            Signal.SYNC,
            "profiling/Time taken: *Trainer._move_model_to_vllm",
            "profiling/Time taken: *Trainer.sync_weights",
        ),
        _share(Signal.TRUNCATED, "completions/clipped_ratio", "clipped_completions_ratio"),
        Quantity(Signal.REWARD, ("reward",)),
        _share(Signal.FAILED, "tools/failure_frequency"),
        Quantity(Signal.MISMATCH, ("sampling/sampling_logp_difference/mean",)),
        Quantity(Signal.LENGTH, ("completions/mean_length", "mean_completion_length", "completion_length")),
        Quantity(Signal.LONGEST, ("completions/max_length", "max_completion_length")),
    ),
    steps=("train/global_step", "step"),
    lines=(LineForms(r"\{(?=.*'reward')(?=.*'(?:loss|kl|epoch)')", _MAPPING, counts=True),),
    waits=(
        WaitLine("queue empty, waiting for rollout samples", RunSide.TRAINERS),
        WaitLine("Rollout queue empty for", RunSide.TRAINERS),
    ),
    prefix="train/",
    door="the learning rate and the other values of the optimizer, max_grad_norm, reward_weights, top_p, top_k, "
    "min_p and repetition_penalty, if it runs under `loom run`",
)

OPENRLHF = Framework(
    "OpenRLHF",
    (
        PublicSource(
            "OpenRLHF/OpenRLHF", "openrlhf/trainer/ppo_trainer_async.py", "03ae817ee387ad8ecfee0d3e6fdce6a761b43543"
        ),
        PublicSource(
            "OpenRLHF/OpenRLHF", "openrlhf/trainer/ppo_trainer_async.py", "d86779bb15acb3187f75f1b5ee71aaa9f975ca9d"
        ),
        PublicSource(
            "OpenRLHF/OpenRLHF", "openrlhf/trainer/ppo_utils/loggers.py", "82c060e61b2a3f30c52a94657ecae3e5b5eac3e2"
        ),
    ),
    (
        "Global step ",
        "timing/ppo_train",
        "timing/make_experience",
        "rollout/truncated_rate",
        "'actor_lr'",
        "train/actor_lr",
    ),
    (
        Quantity(Signal.STEP, ("timing/step_total",)),
        _timed(Signal.GENERATE, "timing/generation"),
        _timed(Signal.TRAIN, "timing/ppo_train", "timing/policy_train"),
        _timed(Signal.TRAIN, "timing/make_experience"),
        _timed(Signal.SYNC, "timing/broadcast"),
        _share(Signal.TRUNCATED, "rollout/truncated_rate", "truncated"),
        Quantity(Signal.REWARD, ("rollout/reward_mean", "reward")),
        Quantity(Signal.LENGTH, ("rollout/response_length_mean", "response_length")),
    ),
    steps=("train/global_step", "global_step", "step"),
    lines=(LineForms(r"Global step (?P<step>\d+): \{", _MAPPING),),
    waits=(WaitLine("Queue is full, waiting for training to consume samples", RunSide.GENERATORS, 10.0),),
    prefix="train/",
)

FRAMEWORKS = (PRIME_RL, VERL, SLIME, SKYRL, TORCHTITAN, TRL, OPENRLHF)

ENGINE_SOURCES = (
    PublicSource("vllm-project/vllm", "vllm/v1/metrics/loggers.py", "a6f0308cfe806b7731ad4979c9bea6e470c35efd"),
    PublicSource(
        "sgl-project/sglang",
        "python/sglang/srt/managers/scheduler_metrics_mixin.py",
        "78ac30c2056f2c25089c1d3203c3d5c13dc3d946",
    ),
)
ENGINE_LINE = re.compile(
    rb"(?:generation throughput: (?P<vllm>[\d.]+) tokens/s"
    rb".*?Running: (?P<running>\d+) reqs, Waiting: (?P<waiting>\d+) reqs"
    rb"(?:.*?Preemptions: (?P<preemptions>\d+))?.*?KV cache usage: (?P<cache>[\d.]+)%)"
    rb"|(?:Decode batch.*?#running-req: (?P<sglang_running>\d+).*?token usage: (?P<usage>[\d.]+)"
    rb".*?gen throughput \(token/s\): (?P<sglang>[\d.]+).*?#queue-req: (?P<queued>\d+))"
)
"""The line in which vLLM or SGLang says how busy an engine is, whatever framework uses it."""
