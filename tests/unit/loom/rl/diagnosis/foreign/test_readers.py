"""Logs of other frameworks as they are: what is read of them, and what is said of those that cannot be read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from loom.errors import EmptyLog, WrongArguments
from loom.rl.diagnosis import Analysis, analyze, sources
from loom.rl.diagnosis.frameworks import ENGINE_SOURCES, FRAMEWORKS
from loom.rl.diagnosis.metric_rows import RowReader
from loom.rl.diagnosis.signals import Signal
from loom.rl.diagnosis.sources import BLOCK
from tests.unit.loom.rl.diagnosis.foreign.formats import wandb_file, write
from tests.unit.loom.rl.diagnosis.foreign.simulation import simulate

FRAGMENTS = Path(__file__).parent / "fragments"
"""Lines that people have shown in public.

prime-rl: github.com/PrimeIntellect-ai/prime-rl/pull/1318 and pull/2280. verl: issues/1208 of verl-project/verl, and
its docs/start/quickstart.rst at 7851b279. slime: github.com/THUDM/slime/issues/1837. torchtitan:
github.com/pytorch/torchtitan/pull/3142. TRL: github.com/huggingface/trl/pull/3219. Long ones are shortened.
"""
VERL, VERL_OLD, SLIME = ((FRAGMENTS / f"{name}.log").read_text() for name in ("verl", "verl-old", "slime"))
# huggingface.co/haihp02/environment-ttt_codellama_CodeLlama-7b-Instruct-hf, trainer_state.json, shortened
TRAINER_STATE = {
    "best_metric": None,
    "global_step": 1,
    "log_history": [
        {
            "completions/clipped_ratio": 0.15625,
            "completions/max_length": 16.0,
            "completions/mean_length": 7.53125,
            "epoch": 8e-05,
            "frac_reward_zero_std": 0.25,
            "reward": -0.06562499701976776,
            "reward_std": 0.04825586825609207,
            "sampling/sampling_logp_difference/mean": 0.0235621351748704,
            "step": 1,
        }
    ],
}


def means(found: Analysis) -> Mapping[str, float]:
    return {name: stats.mean for name, stats in found.metrics.items()}


@pytest.mark.parametrize(
    ("name", "framework", "expected"),
    [
        ("prime-rl", "prime-rl", {"step_s": 70.62, "reward": 0.36215, "staleness": 0.0, "wait_ms": 3000.0}),
        ("verl", "verl", {"step_s": 96.551, "dur_ms": 74_020, "train_ms": 21_288, "trunc_pct": 0.4}),
        ("verl-old", "verl", {"dur_ms": 22_245, "train_ms": 46_292.5, "length": 235.6875}),
        ("slime", "slime/miles", {"dur_ms": 371_179.69, "trunc_pct": 46.484, "longest": 4096}),
        ("torchtitan", "torchtitan rl", {"reward": 0.79, "longest": 42}),
        ("trl", "TRL", {"reward": 16.375, "trunc_pct": 100, "length": 8, "longest": 8}),
    ],
)
def test_public_fragments_are_read(name: str, framework: str, expected: dict[str, float]) -> None:
    found = analyze(FRAGMENTS / f"{name}.log")

    assert found.framework == framework
    for metric, mean in expected.items():
        assert means(found)[metric] == pytest.approx(mean, rel=1e-3), metric


def test_a_state_of_transformers_is_read_and_that_of_older_checkpoints_is_left_out(tmp_path: Path) -> None:
    rows = TRAINER_STATE["log_history"]
    assert isinstance(rows, list)
    for step in (1, 2):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        state = {**TRAINER_STATE, "log_history": [{**rows[0], "step": each} for each in range(1, step + 1)]}
        (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))

    found = analyze(tmp_path)

    assert found.framework == "TRL"
    assert found.metrics["mismatch"].count == 2
    assert len(found.sources) == 1


def test_an_offline_file_of_wandb_is_read_over_its_blocks(tmp_path: Path) -> None:
    rows = [
        {"_step": step, "actor/pg_loss": 0.1, "timing_s/gen": 2.0 * step, "x": "y" * 9000} for step in range(20)
    ]
    (tmp_path / "run-abc.wandb").write_bytes(wandb_file(rows))

    found = analyze(tmp_path)

    assert found.framework == "verl"
    assert found.metrics["dur_ms"].max == 38_000


@pytest.mark.slow
def test_a_file_that_wandb_wrote_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="x", dir=tmp_path)
    for step in range(5):
        run.log({"actor/pg_loss": 0.1, "timing_s/gen": 2.0 + step})
    run.finish()

    found = analyze(tmp_path)

    assert (found.framework, found.metrics["dur_ms"].count, found.metrics["dur_ms"].max) == ("verl", 5, 6000)


def test_event_files_of_tensorboard_are_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step in range(5):
        for value in (
            Summary.Value(tag="actor/pg_loss", simple_value=0.1),
            Summary.Value(tag="timing_s/gen", simple_value=step + 1.5),
            Summary.Value(tag="timing_s/step", tensor=TensorProto(dtype=1, float_val=[step + 2.5])),
            Summary.Value(tag="text", tensor=TensorProto(dtype=7, string_val=[b"no number"])),
        ):
            writer.add_event(Event(wall_time=1e9 + step, step=step, summary=Summary(value=[value])))
    writer.close()

    found = analyze(tmp_path)

    assert found.framework == "verl"
    assert (found.metrics["dur_ms"].count, found.metrics["dur_ms"].max) == (5, 5500)
    assert found.metrics["step_s"].max == 6.5


def test_a_cut_off_tracker_file_counts_up_to_there_and_is_named(tmp_path: Path) -> None:
    rows = [{"_step": step, "actor/pg_loss": 0.1, "timing_s/gen": 2.0} for step in range(20)]
    (tmp_path / "run-abc.wandb").write_bytes(wandb_file(rows)[:-20])

    found = analyze(tmp_path)

    assert found.metrics["dur_ms"].count == 19
    (problem,) = found.broken.first
    assert "cut off" in problem.why


def test_a_row_that_goes_on_in_the_next_block_counts_once(tmp_path: Path) -> None:
    write(simulate("healthy", 1), "SkyRL", tmp_path)
    log = tmp_path / "infra.log"
    text = log.read_text()
    place = text.index("'timing/sync_weights'")
    padding = f"{'#' * 100}\n" * ((BLOCK - place) // 101)
    log.write_text(padding + "#" * (BLOCK - place - len(padding) - 1) + "\n" + text)

    found = analyze(tmp_path)

    assert found.metrics["rpc_ms"].count == 24


def test_a_negative_time_is_named_and_left_out(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(VERL + VERL.replace("step:2", "step:3").replace("gen:74", "gen:-74"))

    found = analyze(tmp_path)

    (problem,) = found.broken.first
    assert (problem.line, problem.why) == (2, "timing_s/gen is below zero")
    assert found.metrics["dur_ms"].min > 0


def test_lines_of_a_session_are_recognized_though_they_come_once() -> None:
    lines = iter([{"text": line} for line in VERL_OLD.splitlines()])

    found = analyze(sources=[sources.session("verl-1", lines)])

    assert (found.framework, found.metrics["dur_ms"].count) == ("verl", 2)


def test_logs_of_nobody_are_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("epoch 1 loss 0.3\n")

    with pytest.raises(EmptyLog) as error:
        analyze(tmp_path)

    for framework in FRAMEWORKS:
        assert f"of {framework.name} {framework.telling[0]}" in str(error.value)


def test_logs_of_two_frameworks_are_refused_unless_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "verl.log").write_text("step:1 - timing_s/gen:2.0 - actor/pg_loss:0.1\n")
    (tmp_path / "slime.log").write_text("perf 1: {'perf/rollout_time': 3.0, 'rollout/raw_reward': 0.5}\n")

    with pytest.raises(
        WrongArguments, match=r"several frameworks: verl by timing_s/, .*; slime/miles by perf/rollout"
    ):
        analyze(tmp_path)
    assert analyze(tmp_path, framework="verl").metrics["dur_ms"].mean == 2000
    assert analyze(tmp_path, framework="miles").metrics["dur_ms"].mean == 3000
    with pytest.raises(WrongArguments, match="no framework 'other'; known are prime-rl, verl, slime/miles"):
        analyze(tmp_path, framework="other")


def test_a_named_framework_without_its_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("epoch 1 loss 0.3\n")

    with pytest.raises(EmptyLog, match="has a metric of verl, such as timing_s/step"):
        analyze(tmp_path, framework="verl")


def test_the_evidence_names_file_line_and_metric(tmp_path: Path) -> None:
    found = analyze(write(simulate("slow engines", 0), "verl", tmp_path))

    (first, *_) = found.findings
    assert first.name.value == "generator"
    line = next(each for each in first.evidence if "timing_s/gen" in each.text)
    said = Path(line.file).read_text().splitlines()[line.line - 1]
    step, value = re.findall(r"step (\d+): timing_s/gen=([\d.]+)", line.text)[0]
    assert f"step:{step} - " in said
    assert f"timing_s/gen:{value[:5]}" in said


def test_a_step_that_is_done_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(VERL + VERL.replace("gen:74", "gen:60"))

    assert analyze(tmp_path).metrics["dur_ms"].mean == 60_020


def test_every_table_has_its_sources_and_can_be_read() -> None:
    for one in FRAMEWORKS:
        RowReader(one)
        assert {Signal.REWARD, Signal.STEP} <= {each.signal for each in one.quantities}
        assert one.sources
        for source in (*one.sources, *ENGINE_SOURCES):
            assert re.fullmatch(r"[0-9a-f]{40}", source.commit)
