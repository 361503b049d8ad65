"""The logs that each framework would write of a simulated run.

Names and forms are those of the public sources that stand in `loom.rl.diagnosis.frameworks`; vLLM's and SGLang's
lines those of their loggers.
"""

from __future__ import annotations

import json
import pprint
import struct
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import fmean, median

from tests.unit.loom.rl.diagnosis.foreign.simulation import Batch, Simulated

BEGIN = datetime(2026, 1, 5, 9, 0, 0, tzinfo=timezone.utc)


def _at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def _full(seconds: float) -> str:
    return f"{_at(seconds):%Y-%m-%d %H:%M:%S}"


def _wall(run: Simulated, batch: Batch) -> float:
    """Seconds from the end of the last step to that of this one, if both sides take turns."""
    before = 0.0 if batch.step == 0 else _done(run.batches[batch.step - 1])
    return _done(batch) - before


def _done(batch: Batch) -> float:
    return batch.training[1] + batch.saving + batch.transfer


def _generates(batch: Batch) -> float:
    return batch.generation[1] - batch.generation[0]


def _trains(batch: Batch) -> float:
    return batch.training[1] - batch.training[0]


def vllm_lines(run: Simulated) -> Iterable[tuple[float, str]]:
    """vllm/v1/metrics/loggers.py; nothing is said while no request runs."""
    for state in run.engines:
        preempted = f"Preemptions: {state.preempted}, " if state.preempted else ""
        yield (
            state.at,
            f"INFO {_at(state.at):%m-%d %H:%M:%S} [loggers.py:321] Engine 000: "
            f"Avg prompt throughput: 12.0 tokens/s, Avg generation throughput: {state.rate:.1f} tokens/s, "
            f"Running: {state.running} reqs, "
            f"Waiting: {state.waiting} reqs, {preempted}GPU KV cache usage: {state.used:.1f}%, "
            "Prefix cache hit rate: 1.2%",
        )


def sglang_lines(run: Simulated) -> Iterable[tuple[float, str]]:
    """python/sglang/srt/managers/scheduler_metrics_mixin.py."""
    for state in run.engines:
        yield (
            state.at,
            f"(SGLangEngine pid=77) [{_full(state.at)}] Decode batch, #running-req: {state.running}, "
            f"#token: {state.running * 300}, token usage: {state.used / 100:.2f}, cuda graph: True, "
            f"gen throughput (token/s): {state.rate:.2f}, #queue-req: {state.waiting}",
        )


def _in_order(lines: Iterable[tuple[float, str]]) -> str:
    return "".join(f"{text}\n" for _, text in sorted(lines, key=lambda line: line[0]))


def _beats(run: Simulated) -> Iterable[tuple[float, str]]:
    """Lines of a process that has nothing to do with steps, until the log ends."""
    at = 0.0
    while at < run.ends:
        yield (
            at,
            f"(raylet) [{_at(at):%Y-%m-%d %H:%M:%S},000 I 77 77] node_manager.cc:525: resources are up to date",
        )
        at += 30.0


def prime_rl(run: Simulated) -> Mapping[str, str | bytes]:
    rows: list[tuple[float, dict[str, object]]] = []
    said: list[tuple[float, str]] = []
    for batch in run.batches:
        number = batch.step + 1
        before = run.batches[batch.step - 1].generation[1] if batch.step else 0.0
        orchestrator = {
            "train/agg/all/has_error/mean": batch.failed,
            "train/agg/all/cancelled/mean": batch.cancelled,
            "train/agg/effective/default/is_truncated/mean": batch.truncated,
            "train/agg/effective/default/reward/mean": batch.reward / (1 - batch.failed),
            "train/agg/effective/num_output_tokens/mean": fmean(batch.lengths),
            "train/agg/effective/num_output_tokens/max": max(batch.lengths),
            "progress/rollouts": len(batch.lengths),
            "time/step": batch.generation[1] - before,
            "time/pack": 0.1,
            "time/save_ckpt": 0.0,
            "time/wait_for_policy": batch.waits_policy,
            "off_policy/mean": batch.staleness,
            "off_policy/max": batch.staleness,
        }
        rows.append((batch.generation[1], {"step": number, "producer": "orchestrator", **orchestrator}))
        said.append(
            (
                batch.generation[1],
                f"{_at(batch.generation[1]):%H:%M:%S} SUCCESS Step {number} | "
                f"{batch.generation[1] - before:6.2f}s | "
                f"Reward {batch.reward:.4f} | Trainable 90/96 (93.8%) | Turns 1.0 | Branches 1.0 | "
                f"Max Off-Policy {batch.staleness:.0f} | Error {batch.failed:.1%} | "
                f"Cancelled {batch.cancelled:.1%} | "
                f"Truncation {batch.truncated:.1%}",
            )
        )
        step = batch.waits_batch + _trains(batch) + batch.transfer + batch.saving
        times = {
            "time/step": step,
            "time/wait_for_batch": batch.waits_batch,
            "time/load_data": 0.05,
            "time/broadcast_weights": batch.transfer,
            "time/save_ckpt": batch.saving,
            "time/forward_backward": _trains(batch),
        }
        at = _done(batch)
        rows.append((at, {"step": number, "producer": "trainer", "mismatch_kl/all/mean": batch.mismatch}))
        rows.append((at, {"step": number, "producer": "trainer", **times}))
    for state in run.engines:
        looked = {
            "inference/agg/kv_cache_usage_perc/max": state.used / 100,
            "inference/agg/num_requests_running/sum": state.running,
            "inference/agg/num_requests_waiting/sum": state.waiting,
            "inference/agg/num_preemptions_total:rate/sum": state.preempted / 5,
            "inference/agg/generation_tokens_total:rate/sum": state.rate,
        }
        rows.append((state.at, {"step": None, **looked}))
    if run.hung == "trainers":
        at = run.batches[-1].training[1] + 5
        said.append(
            (at, f"{_at(at):%H:%M:%S}    INFO Pausing dispatcher until inference applies policy v9 (currently v8)")
        )
    rows += [
        (
            at,
            {
                "step": None,
                "inference/agg/num_requests_running/sum": 0,
                "inference/agg/kv_cache_usage_perc/max": 0.0,
            },
        )
        for at in _idle(run)
    ]
    lines = [
        json.dumps({"step": row.pop("step"), "time": _at(at).timestamp(), **row})
        for at, row in sorted(rows, key=lambda each: each[0])
    ]
    return {
        "monitors/file/metrics.jsonl": "".join(f"{line}\n" for line in lines),
        "logs/attempt_1/orchestrator.log": _in_order(said),
    }


def _idle(run: Simulated) -> Iterable[float]:
    """Times at which engines are looked at while they have nothing to do, because the trainers hang."""
    if run.hung != "trainers":
        return
    at = max((state.at for state in run.engines), default=0.0) + 10
    while at < run.ends:
        yield at
        at += 10


def verl(run: Simulated) -> Mapping[str, str | bytes]:
    said = [(at, f"(vLLMHttpServer pid=9) {text}") for at, text in vllm_lines(run)]
    for batch in run.batches:
        metrics = {
            "actor/pg_loss": 0.01,
            "actor/ppo_kl": 0.0003,
            "training/global_step": batch.step + 1,
            "critic/score/mean": batch.reward / (1 - batch.failed),
            "response_length/mean": fmean(batch.lengths),
            "response_length/max": float(max(batch.lengths)),
            "response_length/clip_ratio": batch.truncated,
            "response/aborted_ratio": batch.failed,
            "timing_s/gen": _generates(batch),
            "timing_s/old_log_prob": 0.2 * _trains(batch),
            "timing_s/update_actor": 0.8 * _trains(batch),
            "timing_s/update_weights": batch.transfer,
            **({"timing_s/save_checkpoint": batch.saving} if batch.saving else {}),
            "timing_s/step": _wall(run, batch),
            "perf/total_num_tokens": batch.tokens,
        }
        text = " - ".join(f"{name}:{pprint.pformat(value)}" for name, value in metrics.items())
        said.append((_done(batch), f"(TaskRunner pid=1) step:{batch.step + 1} - {text}"))
    said += _beats(run)
    return {"verl_demo.log": _in_order(said)}


def slime(run: Simulated) -> Mapping[str, str | bytes]:
    said = list(sglang_lines(run))
    for batch in run.batches:
        rollout = {
            "rollout/response_len/mean": fmean(batch.lengths),
            "rollout/response_len/median": median(batch.lengths),
            "rollout/response_len/max": max(batch.lengths),
            "rollout/response_len/min": min(batch.lengths),
            "rollout/truncated_ratio": batch.truncated,
            "rollout/repetition_frac": 0.0,
            "rollout/weight_version/mean": batch.step + 1 - batch.staleness,
            "perf/rollout_time": _generates(batch),
        }
        at = batch.generation[1]
        said.append(
            (
                at,
                f"(RolloutManager pid=5) [{_full(at)}] rollout.py:1193 - perf {batch.step}: {rollout}",
            )
        )
        wait = batch.waits_batch + (batch.transfer if not run.cluster.asynchronous else 0.0)
        trained = {
            "perf/train_wait_time": wait,
            "perf/train_time": _trains(batch),
            "perf/update_weights_time": batch.transfer,
            **({"perf/save_model_time": batch.saving} if batch.saving else {}),
            "perf/step_time": wait + _trains(batch) + batch.saving,
            "perf/wait_time_ratio": wait / (wait + _trains(batch)),
        }
        loss = {
            "train/loss": 0.01,
            "train/train_rollout_logprob_abs_diff": batch.mismatch,
            "rollout/raw_reward": batch.reward,
        }
        at = _done(batch)
        for where, what, row in (("train_metric_utils.py:44", "perf", trained), ("model.py:560", "step", loss)):
            said.append(
                (
                    at,
                    f"(MegatronTrainRayActor pid=6) [{_full(at)}] {where} - {what} {batch.step}: {row}",
                )
            )
    said += _beats(run)
    return {"slime.log": _in_order(said)}


def skyrl(run: Simulated) -> Mapping[str, str | bytes]:
    said = []
    for batch in run.batches:
        at = _done(batch)
        metrics: dict[str, float] = {
            "trainer/global_step": batch.step + 1,
            "reward/avg_raw_reward": batch.reward,
            "generate/avg_num_tokens": fmean(batch.lengths),
            "generate/max_num_tokens": max(batch.lengths),
            "generate/num_trials": len(batch.lengths),
            "generate/num_failed_trajectories": round(batch.failed * len(batch.lengths)),
            "policy/rollout_train_logprobs_abs_diff_mean": batch.mismatch,
        }
        timing: dict[str, float] = {
            "timing/fwd_logprobs_values_reward": 0.2 * _trains(batch),
            "timing/train_critic_and_policy": 0.8 * _trains(batch),
            "timing/sync_weights": batch.transfer,
        }
        if run.cluster.asynchronous:
            metrics |= {"async/staleness_mean": batch.staleness, "async/staleness_max": batch.staleness}
            timing["timing/wait_for_generation_buffer"] = batch.waits_batch
            timing["timing/step"] = batch.waits_batch + _trains(batch) + batch.transfer
        else:
            timing |= {"timing/generate": _generates(batch), "timing/step": _wall(run, batch)}
        for row in (metrics, timing):
            text = pprint.pformat(
                {name: f"{value:.4f}" if isinstance(value, float) else value for name, value in row.items()}
            )
            said.append(
                (
                    at,
                    f"{_full(at)}.123 | INFO     | skyrl.train.utils.tracking:log:283 - "
                    f"Step {batch.step + 1}: \n{text}",
                )
            )
    said += _beats(run)
    return {"infra.log": _in_order(said), "vllm.log": _in_order(vllm_lines(run))}


def trl(run: Simulated) -> Mapping[str, str | bytes]:
    """GRPOTrainer, with W&B's offline file; AsyncGRPOTrainer's console if both sides do not take turns."""
    history: list[dict[str, object]] = []
    console = []
    for batch in run.batches:
        row: dict[str, object] = {
            "loss": 0.01,
            "grad_norm": 0.4,
            "reward": batch.reward,
            "reward_std": 0.3,
            "tools/failure_frequency": batch.failed,
            "completions/mean_length": fmean(batch.lengths),
            "completions/max_length": float(max(batch.lengths)),
            "completions/clipped_ratio": batch.truncated,
            "sampling/sampling_logp_difference/mean": batch.mismatch,
            "epoch": round(batch.step / 100, 3),
        }
        at = _done(batch)
        if run.cluster.asynchronous:
            row |= {"queue_wait_time_s": batch.waits_batch, "forward_time_s": _trains(batch)}
        else:
            row["step_time"] = _wall(run, batch)
            parts = {
                "vLLM.generate": _generates(batch),
                "_move_model_to_vllm": batch.transfer,
                "_get_per_token_logps_and_entropies": 0.2 * _trains(batch),
                "compute_loss": 0.8 * _trains(batch),
            }
            for name, took in parts.items():
                history.append(
                    {
                        f"profiling/Time taken: GRPOTrainer.{name}": took,
                        "_step": len(history),
                        "_timestamp": _at(at).timestamp(),
                    }
                )
            named = {f"train/{name}": value for name, value in row.items()}
            history.append(
                {
                    **named,
                    "train/global_step": batch.step + 1,
                    "_step": len(history),
                    "_timestamp": _at(at).timestamp(),
                }
            )
        console.append((at, f"{_at(at):%Y-%m-%d %H:%M:%S} {row}"))
    if run.hung == "generators" and run.cluster.asynchronous:
        at = run.batches[-1].training[1] + 3
        console.append((at, f"{_at(at):%Y-%m-%d %H:%M:%S} INFO queue empty, waiting for rollout samples..."))
    console += _beats(run)
    files: dict[str, str | bytes] = {"train.log": _in_order(console), "vllm.log": _in_order(vllm_lines(run))}
    if history:
        del files["train.log"]
        files["wandb/offline-run-20260105_090000-abc/run-abc.wandb"] = wandb_file(history)
        files["wandb/offline-run-20260105_090000-abc/files/output.log"] = _in_order(_beats(run))
    return files


_FULL = "Queue is full, waiting for training to consume samples..."


def openrlhf(run: Simulated) -> Mapping[str, str | bytes]:
    said = []
    for batch in run.batches:
        at = batch.generation[0] - batch.waits_policy
        while run.cluster.asynchronous and at < batch.generation[0] - 1:
            said.append(
                (at, f"(GenerateSamplesActor pid=4) INFO {_at(at):%m-%d %H:%M:%S} ppo_trainer_async.py:79] {_FULL}")
            )
            at += 10
        at = _done(batch)
        status = {
            "policy_loss": -0.001,
            "actor_lr": 5e-07,
            "kl": 0.001,
            "reward": batch.reward,
            "timing/make_experience": 0.2 * _trains(batch),
            "timing/ppo_train": 0.8 * _trains(batch),
            "timing/broadcast": batch.transfer,
            "rollout/reward_mean": batch.reward,
            "rollout/response_length_mean": fmean(batch.lengths),
            "rollout/truncated_rate": batch.truncated,
        }
        if not run.cluster.asynchronous:
            status |= {"timing/generation": _generates(batch), "timing/step_total": _wall(run, batch)}
        said.append(
            (
                at,
                f"(TrainingActor pid=3) INFO {_at(at):%m-%d %H:%M:%S} ppo_trainer_async.py:147] "
                f"✨ Global step {batch.step + 1}: {status}",
            )
        )
    if run.hung == "trainers":
        at = run.batches[-1].training[1] + 5
        while at < run.ends:
            said.append(
                (at, f"(GenerateSamplesActor pid=4) INFO {_at(at):%m-%d %H:%M:%S} ppo_trainer_async.py:79] {_FULL}")
            )
            at += 10
    return {
        "openrlhf.log": _in_order([*said, *((at, f"(LLMRayActor pid=8) {text}") for at, text in vllm_lines(run))])
    }


def wandb_file(rows: Iterable[Mapping[str, object]]) -> bytes:
    """A ``.wandb`` file: records of the history, in blocks of LevelDB's log."""
    written = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
    for row in rows:
        items = b"".join(
            _message(1, _message(2, name.encode()) + _message(16, json.dumps(value).encode()))
            for name, value in row.items()
        )
        left = _message(2, items)
        kind = 0
        while left or kind == 0:
            room = 32_768 - len(written) % 32_768
            if room < 7:
                written += b"\0" * room
                continue
            part, left = left[: room - 7], left[room - 7 :]
            first = kind == 0
            kind = (1 if not left else 2) if first else (3 if left else 4)
            written += struct.pack("<IHB", 0, len(part), kind) + part
    return written


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


FORMATS: dict[str, Callable[[Simulated], Mapping[str, str | bytes]]] = {
    "prime-rl": prime_rl,
    "verl": verl,
    "slime/miles": slime,
    "SkyRL": skyrl,
    "TRL": trl,
    "OpenRLHF": openrlhf,
}


def write(run: Simulated, framework: str, folder: Path) -> Path:
    """Write the logs of a run into a folder; return it."""
    for name, content in FORMATS[framework](run).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
