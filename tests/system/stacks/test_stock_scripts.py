"""Stock training scripts, none changed by a byte, watched and steered on all of their ranks."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loom.process.listen import free_ports
from tests.support.gateways import Gateway
from tests.support.paths import ROOT
from tests.support.weavers import await_weaver
from tests.system.stacks.stack import BOUND, LOOM, SCRIPTS, Command, Stack, environment, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIMES = rb"'\w*(runtime|per_second|step_time)': '[^']*'"
"""Of what a Trainer prints, that which no two runs have alike."""


def python(script: str, *options: str) -> Command:
    def command(folder: Path, steps: int) -> list[str]:
        return [sys.executable, str(SCRIPTS / script), str(folder / "out"), *options, f"--max-steps={steps}"]

    return command


def torchrun(script: str, *options: str) -> Command:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return lambda folder, steps: [*launcher, *python(script, *options)(folder, steps)[1:]]


def accelerate(script: str, *options: str) -> Command:
    def command(folder: Path, steps: int) -> list[str]:
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        port = ["--main_process_port", str(*free_ports(1))]
        return [*launcher, *port, *python(script, *options)(folder, steps)[1:]]

    return command


def trl(script: str, dataset: str, *options: str) -> Command:
    """A script that TRL ships."""

    def command(folder: Path, steps: int) -> list[str]:
        (found,) = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[union-attr,misc]
        made = folder.parent / "made"
        given = {"model_name_or_path": made / "model", "dataset_name": made / dataset, "output_dir": folder / "out"}
        given |= {"max_steps": steps, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
        given |= {"bf16": "false", "eval_strategy": "steps", "eval_steps": 10_000, "seed": 1}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [sys.executable, f"{found}/scripts/{script}", *words, "--use_cpu", *options]

    return command


def two_groups(folder: Path, steps: int) -> list[str]:
    """Two replica groups of torchft, each of which its launcher starts again when it has left its quorum."""
    again = (
        'group() { while :; do REPLICA_GROUP_ID=$1 "$2" "$3" "$4"; code=$?; [ $code = 75 ] || return $code; done; }'
    )
    script = f'{again}; group 0 "$@" & zero=$!; group 1 "$@" & one=$!; wait $zero && wait $one'
    return ["sh", "-c", script, "sh", sys.executable, str(SCRIPTS / "torchft_ddp.py"), str(steps)]


CHECKPOINT = "out/checkpoint-{}"

HF = ("max_grad_norm=0.5", "gradient_accumulation_steps=2", "logging_steps=3")
"""Keys of a Trainer."""

REWARDS = [f"tests.system.stacks.scripts.rewards.{name}" for name in ("brevity", "digits")]

STACKS = [
    Stack("plain", python("plain.py"), metric="Loss/train", needs=("tensorboard",)),
    Stack("ddp", torchrun("ddp.py"), ranks=2, needs=("tensorboard",)),
    Stack("fsdp2", torchrun("fsdp2.py"), ranks=2, needs=("tensorboard",)),
    Stack("hf", python("hf_trainer.py"), saves=CHECKPOINT, evaluates=True, config=HF, needs=("accelerate",)),
    Stack(
        "hf_accelerate",
        accelerate("hf_trainer.py"),
        ranks=2,
        saves=CHECKPOINT,
        evaluates=True,
        config=HF,
        needs=("accelerate",),
    ),
    Stack(
        "trl_sft",
        trl("sft.py", "texts", "--per_device_train_batch_size", "2", "--max_length", "32"),
        saves=CHECKPOINT,
        evaluates=True,
        needs=("trl",),
    ),
    Stack(
        "trl_grpo",
        trl(
            *("grpo.py", "prompts", "--per_device_train_batch_size", "4", "--num_generations", "4"),
            *("--per_device_eval_batch_size", "4", "--max_completion_length", "8", "--reward_funcs", *REWARDS),
        ),
        metric="rewards/brevity/mean",
        saves=CHECKPOINT,
        evaluates=True,
        config=("reward_weights=[1, 0.5]", "top_p=0.9", "top_k=20", "max_grad_norm=0.5"),
        needs=("trl",),
    ),
    Stack("torchft", two_groups, ranks=2, metric="participants", needs=("torchft",)),
    Stack(
        "lightning",
        python("lightning_ddp.py"),
        ranks=2,
        metric="train_loss",
        saves="out/checkpoints/loom-step={}.ckpt",
        evaluates=True,
        config=("gradient_clip_val=0.5", "accumulate_grad_batches=2"),
        needs=("lightning",),
    ),
]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    made = Gateway([f"tcp://127.0.0.1:{free_ports(1)[0]}"]).start()  # no session asks for the worker
    yield made
    made.close()


@pytest.fixture(params=STACKS, ids=str)
def stack(request: pytest.FixtureRequest) -> Stack:
    found: Stack = request.param
    for module in found.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -e '.[stacks]'")
    return found


@pytest.fixture
def folder(stack: Stack, tmp_path: Path) -> Path:
    """The folder of the script, beside which is what it needs."""
    if "trl" in stack.needs:
        subprocess.run([sys.executable, "-m", "tests.system.stacks.tiny_model", tmp_path / "made"], check=True)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _lighthouse(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if "torchft" not in stack.needs:
        yield
        return
    from torchft.coordination import LighthouseServer

    options = {"join_timeout_ms": 5000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 2000}
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **options)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    yield
    server.shutdown()


def hashes(stack: Stack, folder: Path) -> dict[str, str]:
    scripts = [Path(word) for word in stack.command(folder, 1) if word.endswith(".py")]
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in [*scripts, *SCRIPTS.glob("*.py")]}


def test_it_is_watched_and_steered_on_all_ranks(stack: Stack, gateway: Gateway, folder: Path) -> None:
    before = hashes(stack, folder)
    with running(stack, gateway, folder) as run:
        await_weaver(run.weaver)
        run.await_ranks(lambda one: one.connected and one.step)
        run.await_ranks(lambda one: one.step_time is not None and one.config.get("learning_rate") is not None)
        run.await_ranks(lambda one: one.id != stack.replicas[0] or stack.metric in one.metrics)

        code, outcomes = run.loom("config", "set", "learning_rate=0.0004")
        assert code == 0, outcomes
        assert set(outcomes) == set(stack.replicas)
        assert len({made["step"] for made in outcomes.values()}) == 1, outcomes
        run.await_ranks(lambda one: one.config["learning_rate"] == 0.0004)
        if stack.config:
            code, outcomes = run.loom("config", "set", *stack.config)
            assert code == 0, outcomes

        gateway.end()
        gateway.start()
        await_weaver(run.weaver)
        run.await_steps()

        assert run.loom("pause")[0] == 0
        paused = [one.step for one in run.await_ranks(lambda one: one.state == "paused")]
        assert run.loom("resume")[0] == 0
        run.await_steps()
        assert [one.step for one in run.replicas()] > paused

        for action, offered in (("save", bool(stack.saves)), ("evaluate", stack.evaluates)):
            code, outcomes = run.loom(action)
            assert (code == 0) is offered, outcomes
            assert all(made["ok"] is offered and (offered or made["reason"]) for made in outcomes.values())
            if action == "save" and offered:
                (step,) = {made["step"] for made in outcomes.values()}
                assert (folder / stack.saves.format(step)).exists()

        code, outcomes = run.loom("stop")
        assert code == 0, outcomes
        assert run.process.wait(BOUND) == 0, run.output.read_text()[-3000:]
    assert hashes(stack, folder) == before


def test_it_prints_and_exits_as_without_loom(stack: Stack, gateway: Gateway, folder: Path) -> None:
    steps, ended = 12, []
    watched = [*LOOM, "run", "--name", f"{stack}_twin", "--"]
    for before in ([], watched):
        command = [*before, *stack.command(folder, steps)]
        made = subprocess.run(command, env=environment(gateway), capture_output=True, timeout=BOUND, cwd=ROOT)
        lines = re.sub(TIMES, b"", made.stdout).splitlines(keepends=True)
        ended.append((made.returncode, sorted(lines) if stack.ranks > 1 else lines))  # ranks print in any order

    assert ended[0] == ended[1]
    assert ended[0][0] == 0
