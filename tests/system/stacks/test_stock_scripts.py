"""Stock training scripts, none changed by a byte, watched and steered on all of their ranks."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import pytest

from loom.process.listen import free_ports
from tests.support.gateways import Gateway, await_true
from tests.support.paths import ROOT
from tests.support.weavers import await_weaver
from tests.system.stacks.stack import (
    BOUND,
    FOREVER,
    LOOM,
    SCRIPTS,
    Command,
    Run,
    Stack,
    await_observed,
    end_observed,
    environment,
    observed,
    running,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TIMES = rb"'\w*(runtime|per_second|step_time)': '[^']*'"
"""Of the prints of a Trainer, the ones that no two runs have alike."""

DIGITS = rb"global_rank\S+|\d[\d.,]*"


def comparable(printed: bytes, ordered: bool) -> list[bytes]:
    """Return the lines of a script's output without what differs between any two runs.

    Not ordered, these are its characters: a process may write between a line of another one and its end.
    """
    lines = re.sub(TIMES, b"", printed).splitlines(keepends=True)
    # A line of torchtitan's log has times, rates, losses of random weights, or the random name of a file.
    lines = [
        re.sub(rb"global_rank\S+|\d[\d.,]*", b"#", one) if one.startswith(b"[titan]") else one for one in lines
    ]
    return lines if ordered else [bytes(sorted(b"".join(lines)))]


def python(script: str, *options: str) -> Command:
    def command(folder: Path, steps: int) -> list[str]:
        return [sys.executable, str(SCRIPTS / script), str(folder / "out"), *options, f"--max-steps={steps}"]

    return command


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torchrun(script: str, *options: str) -> Command:
    return lambda folder, steps: [*TORCHRUN, "2", *python(script, *options)(folder, steps)[1:]]


def accelerate(script: str, *options: str) -> Command:
    def command(folder: Path, steps: int) -> list[str]:
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
        launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        port = ["--main_process_port", str(*free_ports(1))]
        return [*launcher, *port, *python(script, *options)(folder, steps)[1:]]

    return command


TRL = importlib.util.find_spec("trl")
TRL_SCRIPTS = Path(str(TRL.origin if TRL else "trl")).with_name("scripts")


def trl(start: Sequence[str], dataset: str, *options: str) -> Command:
    """A script that TRL ships, started in one of the ways that its documentation has."""

    def command(folder: Path, steps: int) -> list[str]:
        made = folder.parent / "made"
        given = {"model_name_or_path": made / "model", "dataset_name": made / dataset, "output_dir": folder / "out"}
        given |= {"max_steps": steps, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
        given |= {"bf16": "false", "eval_strategy": "steps", "eval_steps": 10_000, "seed": 1}
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        return [*start, *words, "--use_cpu", *options]

    return command


def titan(folder: Path, steps: int) -> list[str]:
    """The debug model of torchtitan, in a folder with the files that it reads from its own repository."""
    made = folder.parent / "made"
    given = {"module": "llama3", "config": "llama3_debugmodel", "hf_assets_path": made / "model"}
    given |= {"dump_folder": folder / "out", "training.steps": steps}
    given |= {"training.seq_len": 64, "training.local_batch_size": 2, "checkpoint.interval": FOREVER}
    given |= {"validator.freq": FOREVER, "validator.steps": 2, "validator.dataloader.dataset": "c4_test"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    script = str(SCRIPTS.with_name("titan_on_cpu.py"))
    return ["env", "-C", str(made), *TORCHRUN, "1", script, *words, "--checkpoint.enable", "--validator.enable"]


def two_groups(folder: Path, steps: int) -> list[str]:
    """Two replica groups of torchft, each of which its launcher starts again when it has left its quorum."""
    again = 'while :; do REPLICA_GROUP_ID=$1 "$2" "$3" "$4" "$5"; code=$?; [ $code = 75 ] || return $code; done'
    script = f'group() {{ {again}; }}; group 0 "$@" & zero=$!; group 1 "$@" & one=$!; wait $zero && wait $one'
    return ["sh", "-c", script, "sh", sys.executable, str(SCRIPTS / "torchft_ddp.py"), str(steps), "49152"]


def lightning_cli(folder: Path, steps: int) -> list[str]:
    """Lightning's command line, which makes the model, its data and the Trainer from the options."""
    given = {"default_root_dir": folder / "out", "max_steps": steps, "max_epochs": -1, "accelerator": "cpu"}
    given |= {"devices": 1, "enable_progress_bar": "false", "check_val_every_n_epoch": 1000}
    options = [f"--trainer.{name}={value}" for name, value in given.items()]
    return [sys.executable, str(SCRIPTS / "lightning_cli.py"), "fit", *options, "--model.out_dim=100000"]


CHECKPOINT = "out/checkpoint-{}"

HF = ("max_grad_norm=0.5", "gradient_accumulation_steps=2", "logging_steps=3")
"""Keys of a Trainer."""

REWARDS = [f"tests.system.stacks.scripts.rewards.{name}" for name in ("brevity", "digits")]

SFT = ("--per_device_train_batch_size", "32", "--max_length", "32")
GRPO = (
    *("--per_device_train_batch_size", "4", "--num_generations", "4"),
    *("--per_device_eval_batch_size", "4", "--max_completion_length", "8", "--reward_funcs", *REWARDS),
)

# Each has a size at which a step takes 50 to 100 ms, so that steps are what a change waits for.
STACKS = [
    Stack("plain", python("plain.py", "--width=300000"), metric="Loss/train", needs=("tensorboard",)),
    Stack("ddp", torchrun("ddp.py", "--batch-size=100000"), ranks=2, needs=("tensorboard",)),
    Stack("fsdp2", torchrun("fsdp2.py", "--batch-size=256"), ranks=2, needs=("tensorboard",)),
    Stack(
        "hf",
        python("hf_trainer.py", "--batch-size=192"),
        saves=CHECKPOINT,
        evaluates=True,
        config=HF,
        needs=("accelerate",),
    ),
    Stack(
        "hf_accelerate",
        accelerate("hf_trainer.py", "--batch-size=128"),
        ranks=2,
        saves=CHECKPOINT,
        evaluates=True,
        config=HF,
        needs=("accelerate",),
    ),
    Stack(
        "trl_sft",
        trl([sys.executable, f"{TRL_SCRIPTS}/sft.py"], "texts", *SFT),
        saves=CHECKPOINT,
        evaluates=True,
        needs=("trl",),
    ),
    Stack(
        "trl_grpo",
        trl([sys.executable, f"{TRL_SCRIPTS}/grpo.py"], "prompts", *GRPO),
        metric="rewards/brevity/mean",
        saves=CHECKPOINT,
        evaluates=True,
        config=("reward_weights=[1, 0.5]", "top_p=0.9", "top_k=20", "max_grad_norm=0.5"),
        needs=("trl",),
    ),
    Stack("torchft", two_groups, ranks=2, metric="participants", needs=("torchft",), begins_together=False),
    Stack(
        "lightning",
        python("lightning_ddp.py", "--width=40000"),
        ranks=2,
        metric="train_loss",
        saves="out/checkpoints/loom-step={}.ckpt",
        evaluates=True,
        config=("gradient_clip_val=0.5", "accumulate_grad_batches=2"),
        needs=("lightning",),
    ),
    Stack(
        "torchtitan",
        titan,
        metric="loss_metrics/global_avg_loss",
        saves="out/checkpoint/step-{}",
        evaluates=True,
        config=("max_norm=0.5",),
        needs=("torchtitan", "triton"),
    ),
]


STARTS = [
    Stack(
        "lightning_cli",
        lightning_cli,
        metric="grad_norm",
        saves="out/lightning_logs/version_0/checkpoints/loom-step={}.ckpt",
        config=("gradient_clip_val=0.5", "log_every_n_steps=3"),
        needs=("lightning", "jsonargparse"),
    ),
    Stack(
        "trl_command",
        trl([str(Path(sys.executable).with_name("trl")), "sft"], "texts", *SFT),
        saves=CHECKPOINT,
        evaluates=True,
        needs=("trl",),
    ),
    Stack(
        "trl_module",
        trl([sys.executable, "-m", "trl.scripts.grpo"], "prompts", *GRPO),
        metric="rewards/brevity/mean",
        saves=CHECKPOINT,
        evaluates=True,
        config=("reward_weights=[1, 0.5]",),
        needs=("trl",),
    ),
]
"""Other ways to start a training: the command line of a library, and a module of a package."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    made = Gateway([f"tcp://127.0.0.1:{free_ports(1)[0]}"]).start()  # no session asks for the worker
    yield made
    made.close()


@pytest.fixture(params=[*STACKS, *STARTS], ids=str)
def stack(request: pytest.FixtureRequest) -> Stack:
    found: Stack = request.param
    for module in found.needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install -e '.[stacks]'")
    return found


@pytest.fixture
def folder(stack: Stack, tmp_path: Path) -> Path:
    """The folder of the script, beside which is what it needs."""
    if stack.needs[0] in ("trl", "torchtitan"):
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
    scripts += [*SCRIPTS.glob("*.py"), *TRL_SCRIPTS.glob("*.py")]
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in scripts}


ON_PAGE_WITHIN = 5.0
"""Seconds from a rank's first step until the page shows it."""

RATES = [0.0004, 0.0003, 0.0005, 0.0002, 0.0006]


def test_it_is_watched_and_steered_on_all_ranks(stack: Stack, gateway: Gateway, folder: Path) -> None:
    before = hashes(stack, folder)
    with running(stack, gateway, folder) as run:
        run.await_ranks(lambda one: one.connected and one.step)
        run.await_ranks(lambda one: one.step_time is not None and one.config.get("learning_rate") is not None)
        run.await_ranks(lambda one: one.id != stack.replicas[0] or stack.metric in one.metrics)
        check_page(run, folder)

        waited = [check_learning_rate(run, folder, rate) for rate in RATES]
        # A step that has begun, and one that began while the ranks agreed, end with the old value; more may begin
        # where a busy machine lets the ranks' threads wait for a whole step.
        assert [median(counts) <= 2 for counts in zip(*waited, strict=True)] == [True, True], waited
        if stack.config:
            code, outcomes = run.loom("config", "set", *stack.config)
            assert code == 0, outcomes

        check_pause(run, folder)
        check_save(run, folder)
        code, outcomes = run.loom("evaluate")
        assert (code == 0) is stack.evaluates, outcomes
        assert all(made["ok"] is stack.evaluates for made in outcomes.values())

        stop = run.weaver.stop(stack.name)
        gateway.end()
        assert run.process.wait(BOUND) == 0, run.output.read_text()[-3000:]
        gateway.start()
        await_weaver(run.weaver)
        assert all(made.ok for made in stop.get(60).values())
        assert {one.ending for one in run.replicas()} == {"stopped"}
    assert hashes(stack, folder) == before


def check_page(run: Run, folder: Path) -> None:
    """Check that the page shows each rank, and what it logs, soon after its first step."""
    ranks = observed(folder)
    shown = {(id, what) for id in run.stack.replicas for what in ("step", "rate")}
    for id, what in [*shown, (run.stack.replicas[0], run.stack.metric)]:
        await_true(lambda id=id, what=what: (id, what) in run.page.first)  # type: ignore[misc]
        made = ranks[run.stack.replicas.index(id)].made[what == "rate"]  # which needs two steps
        after = run.page.first[id, what] - made
        assert after < ON_PAGE_WITHIN, (id, what, after)


def check_learning_rate(run: Run, folder: Path, rate: float) -> tuple[int, int]:
    """Check that a learning rate comes to all ranks at one step.

    Return how many steps a rank began from hearing of it to the first step with it, and from the weaver's record of
    the command to that of its acknowledgement.
    """
    code, answer = run.answer("config", "set", f"learning_rate={rate}")
    assert code == 0, answer
    assert set(answer["outcomes"]) == set(run.stack.replicas)
    steps = {made["step"] for made in answer["outcomes"].values()}
    assert len(steps) == 1, answer
    await_true(lambda: all(rate in one.rates for one in observed(folder).values()))
    run.await_ranks(lambda one: one.config["learning_rate"] == rate)

    ranks = observed(folder)
    first = {rank: one.first_with(rate) for rank, one in ranks.items()}
    heard = {rank: one.heard[answer["id"]] for rank, one in ranks.items()}
    assert len(set(first.values())) == 1 or not run.stack.begins_together, first
    events = [one for one in run.weaver.events(0) if one.data.get("command") == answer["id"]]
    given = next(one.time for one in events if one.kind == "command")
    acknowledged = {one.replica: one.time for one in events if one.kind == "applied"}
    return min(first[rank] - heard[rank] for rank in ranks), max(
        ranks[rank].begun(acknowledged[id]) - ranks[rank].begun(given) for rank, id in enumerate(run.stack.replicas)
    )


def check_pause(run: Run, folder: Path) -> None:
    """Check that a pause lasts while the gateway and the weaver are killed and back, and ends on command."""
    assert run.loom("pause")[0] == 0
    run.await_ranks(lambda one: one.state == "paused")
    begun = {rank: len(one.times) for rank, one in observed(folder).items()}
    assert len(set(begun.values())) == 1 or not run.stack.begins_together, begun
    kill(run.gateway, weaver=True)
    run.gateway.start()
    await_weaver(run.weaver)
    run.await_ranks(lambda one: one.connected and one.state == "paused")
    assert {rank: len(one.times) for rank, one in observed(folder).items()} == begun

    assert run.loom("resume")[0] == 0
    run.await_ranks(lambda one: one.state == "running")
    await_true(lambda: all(len(one.times) > begun[rank] + 2 for rank, one in observed(folder).items()), BOUND)


def check_save(run: Run, folder: Path) -> None:
    """Check that a save that is commanded just before the gateway and the weaver are killed is made once."""
    command = run.weaver.save(run.stack.name)
    kill(run.gateway, weaver=True)
    run.gateway.start()
    await_weaver(run.weaver)
    outcomes = command.get(120)
    run.await_ranks(lambda one: one.connected)  # all change at one step, or refuse
    assert set(outcomes) == set(run.stack.replicas)
    if not run.stack.saves:
        assert all(not made.ok and made.reason for made in outcomes.values()), outcomes
        return
    assert all(made.ok for made in outcomes.values()), outcomes
    (step,) = {made.step for made in outcomes.values()}
    saved = folder / run.stack.saves.format(step)
    assert list(saved.parent.glob(saved.name.replace(str(step), "*"))) == [saved]


def kill(gateway: Gateway, weaver: bool) -> None:
    gateway.end()
    for one in gateway.weavers() if weaver else ():
        one.kill()
        one.wait(BOUND)


def test_it_prints_and_exits_as_without_loom(stack: Stack, gateway: Gateway, folder: Path) -> None:
    steps, ended = 12, []
    for before in WITHOUT_AND_WITH:
        shutil.rmtree(folder / "out", ignore_errors=True)  # where torchtitan would find a checkpoint
        command = [*before, *stack.command(folder, steps)]
        made = subprocess.run(
            command, env=environment(gateway, folder), capture_output=True, timeout=BOUND, cwd=ROOT
        )
        ordered = stack.ranks == 1 and "torchtitan" not in stack.needs  # ranks and threads print in any order
        ended.append((made.returncode, comparable(made.stdout, ordered)))

    assert ended[0] == ended[1]
    assert ended[0][0] == 0


WITHOUT_AND_WITH = ([], [*LOOM, "run", "--name", "twin", "--"])


ENDS_WITHIN = 90.0
"""Seconds from a signal to the end of a script that does not hang."""


@pytest.mark.parametrize("stack", STACKS, ids=str, indirect=True)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda one: str(one.name))
def test_a_signal_ends_it_as_without_loom(
    stack: Stack, gateway: Gateway, folder: Path, sent: signal.Signals
) -> None:
    # Also without Loom, a launcher that is interrupted may abort, and Lightning's rank 0 waits for the other one.
    ended: tuple[set[int | None], set[int | None]] = set(), set()
    for _ in range(3):
        for codes, before in zip(ended, WITHOUT_AND_WITH, strict=True):
            codes.add(end_by(sent, [*before, *stack.command(folder, FOREVER)], stack, gateway, folder))
        if ended[0] & ended[1]:
            break

    assert ended[0] & ended[1], ended


def end_by(sent: signal.Signals, command: list[str], stack: Stack, gateway: Gateway, folder: Path) -> int | None:
    """Start a script, send it a signal when it trains, and return its exit code; None if it hangs."""
    process = subprocess.Popen(
        command,
        env=environment(gateway, folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        await_observed(folder, stack.ranks, 5, process)
        process.send_signal(sent)
        return process.wait(ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_observed(folder)
        process.wait()
