"""Causal models of Hugging Face: what is wrong with a folder is said at once, and padding changes no number."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from loom.errors import MissingDependency, WrongArguments
from loom.rl.arithmetic import Characters
from loom.rl.generation import weight_files
from loom.rl.models import causal
from loom.rl.models.adapters import add_adapters
from loom.rl.models.tokenizers import tokenizer_of
from loom.rl.policy_gradient import PolicyBatch, policy_loss, token_logprobs
from loom.rl.rollouts import Rollout, RolloutStore, split
from loom.rl.settings import Lora, TrainerRun, Trainers, Weights
from loom.rl.trainer import Trainer, Training
from loom.train.settings import Batch
from tests.support.language_model import END, PAD, SIZE, change_config, make_model, random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def run_in(folder: Path) -> TrainerRun:
    return TrainerRun(str(folder), steps=2, weights=Weights.FILES, temperature=1.0, keep=2, lines=False)


def rollout(prompt: list[int], tokens: list[int]) -> Rollout:
    return Rollout("0.0.0", prompt, tokens, [0.0] * len(tokens), 1.0, 1.0, 0)


ROLLOUTS = [rollout([5, 6, 7, 8, 9], [1, END]), rollout([PAD, 3], [4, 4, 4, END]), rollout([1], [2])]


def test_padding_changes_no_log_probability(folder: Path) -> None:
    model = causal.load(folder)

    together = token_logprobs(model, PolicyBatch.of(ROLLOUTS, PAD))

    for row, one in enumerate(ROLLOUTS):
        alone = token_logprobs(model, PolicyBatch.of([one], PAD))
        torch.testing.assert_close(together[row, : len(one.tokens)], alone[0], rtol=0, atol=1e-5)


def test_log_probabilities_are_those_of_the_model_without_padding(folder: Path) -> None:
    model = causal.load(folder)
    prompt, tokens = ROLLOUTS[0].prompt_tokens, ROLLOUTS[0].tokens

    found = token_logprobs(model, PolicyBatch.of(ROLLOUTS, PAD), temperature=0.5)

    logits = model(torch.tensor([prompt + tokens])).logits[0] / 0.5
    expected = [logits.log_softmax(-1)[len(prompt) - 1 + n, token] for n, token in enumerate(tokens)]
    torch.testing.assert_close(found[0, :2], torch.stack(expected), rtol=0, atol=1e-5)


def test_padding_gives_finite_gradients(folder: Path) -> None:
    model = causal.load(folder)
    batch = PolicyBatch.of(ROLLOUTS, PAD)

    policy_loss(token_logprobs(model, batch), batch).backward()

    assert all(one.grad is not None and one.grad.isfinite().all() for one in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_published_weights_are_a_folder_that_transformers_reads(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    source = make_model(tmp_path / "model", tied=tied)
    trainer = Trainer(Trainers(model=source), run_in(tmp_path))
    model = trainer.build()

    trainer._publish(model, 0)

    path = weight_files.path_of(tmp_path / "weights", 0)
    read, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(found.values())
    torch.testing.assert_close(dict(read.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert weight_files.latest(tmp_path / "weights") == 0


def test_experts_are_published_under_the_names_of_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8, "vocab_size": SIZE}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 2, "num_experts_per_tok": 1}
    config = Qwen3MoeConfig(**sizes, **heads, moe_intermediate_size=8, bos_token_id=None, eos_token_id=END)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    trainer = Trainer(Trainers(model=tmp_path / "model"), run_in(tmp_path))

    trainer._publish(trainer.build(), 0)

    published = load_file(tmp_path / "weights" / "step_0" / "model.safetensors")
    torch.testing.assert_close(published, load_file(tmp_path / "model" / "model.safetensors"), rtol=0, atol=0)
    assert "model.layers.0.mlp.experts.1.down_proj.weight" in published


def test_layers_are_computed_again_for_the_gradient_with_the_same_result(folder: Path) -> None:
    batch, found, computed = PolicyBatch.of(ROLLOUTS, PAD), [], []
    for again in (False, True):
        model = causal.load(folder)
        if again:
            causal.checkpoint_activations(model)
        calls: list[object] = []
        causal.layers_of(model)[0].self_attn.register_forward_hook(lambda *_, to=calls: to.append(1))

        policy_loss(token_logprobs(model, batch), batch).backward()

        computed.append(len(calls))
        found.append([one.grad for one in model.parameters()])

    assert computed == [1, 2]
    torch.testing.assert_close(*found)


def test_a_gpu_that_is_too_small_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 500_000))  # stands in for a GPU
    model = causal.load(folder)

    with pytest.raises(WrongArguments, match=r"cuda:0 is too small: it has 0.0 GB"):
        causal.check_room(model, "cuda:0", members=1)
    causal.check_room(model, "cuda:0", members=2)


def test_a_function_may_make_a_model_of_transformers(tmp_path: Path) -> None:
    config = {"vocab_size": SIZE, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    trainer = Trainer(Trainers(lambda: random_model(0, config), Characters()), run_in(tmp_path))

    trainer._publish(trainer.build(), 0)

    assert json.loads((tmp_path / "weights" / "step_0" / "config.json").read_text())["hidden_size"] == 8


def test_a_config_that_is_no_mapping_is_not_published(tmp_path: Path) -> None:
    class Configured(torch.nn.Linear):
        config = object()

    trainer = Trainer(Trainers(lambda: Configured(1, 1), Characters()), run_in(tmp_path))

    trainer._publish(trainer.build(), 0)

    _, config = weight_files.load(tmp_path / "weights" / "step_0")
    assert config == {"model": "Configured"}


def step_of(trainer: Trainer, model: Any, folder: Path) -> tuple[Any, dict[str, float]]:
    """Return the gradient of a step on the rollouts, and its metrics."""
    RolloutStore(folder).write(split(ROLLOUTS, 0, 1))
    trainer.loss(model, Batch(0, 1, 0, 1)).backward()
    return model.lm_head.weight.grad, trainer.stepped(model, 1)


def test_the_policy_is_kept_close_to_a_reference(folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", seed=1)
    found = {}
    for kl in (0.0, 0.5):
        trainer = Trainer(Trainers(model=folder, reference=other, kl=kl), run_in(tmp_path / str(kl)))
        found[kl] = step_of(trainer, trainer.build(), tmp_path / str(kl))
    same = Trainer(Trainers(model=folder, reference=folder), run_in(tmp_path / "same"))
    _, metrics = step_of(same, same.build(), tmp_path / "same")

    assert found[0.0][1]["kl"] == pytest.approx(found[0.5][1]["kl"])
    assert found[0.0][1]["kl"] > 0.001
    assert not torch.allclose(found[0.0][0], found[0.5][0])
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(math.log(264), abs=0.1)
    assert {"mismatch_kl", "clip_share"} <= metrics.keys()


@pytest.mark.parametrize("given", [{"kl": 0.1}, {"kl": -1.0, "reference": "x"}])
def test_a_weight_without_a_reference_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(WrongArguments, match="needs a model as reference"):
        Trainers(model="x", **given)


def test_a_reference_of_other_tokens_is_refused(folder: Path, copied: Path, tmp_path: Path) -> None:
    change_config(copied, vocab_size=100)

    with pytest.raises(WrongArguments, match="knows 100"):
        Training(None, Trainers(model=folder, reference=copied), run_in(tmp_path))  # type: ignore[arg-type]


def test_parts_of_a_step_have_the_gradient_of_the_whole(folder: Path, tmp_path: Path) -> None:
    found = []
    for parts in (1, 2, 4):  # of three rollouts
        RolloutStore(tmp_path / str(parts)).write(split(ROLLOUTS, 0, 1))
        trainer = Trainer(Trainers(model=folder), run_in(tmp_path / str(parts)))
        model = trainer.build()
        for part in range(parts):
            (trainer.loss(model, Batch(0, 1, 0, 1, part, parts)) / parts).backward()
        found.append((model.lm_head.weight.grad, trainer.stepped(model, 1)["entropy"]))

    for gradient, entropy in found[1:]:
        torch.testing.assert_close(gradient, found[0][0], rtol=0, atol=1e-6)
        assert entropy == pytest.approx(found[0][1])


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_adapters_alone_learn_and_are_published_merged(
    folder: Path, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    pytest.importorskip("peft")
    trainer = Trainer(Trainers(model=folder, lora=Lora(rank=4, targets=targets)), run_in(tmp_path))
    model = trainer.build()
    learned = [name for name, one in model.named_parameters() if one.requires_grad]
    for name, one in model.named_parameters():
        if name in learned:
            torch.nn.init.normal_(one, std=0.1)

    trainer._publish(model, 0)

    read = causal.load(weight_files.path_of(tmp_path / "weights", 0))
    batch = PolicyBatch.of(ROLLOUTS, PAD)
    found, own = token_logprobs(read, batch), token_logprobs(model, batch)
    torch.testing.assert_close(found, own, rtol=0, atol=1e-5)
    assert not torch.allclose(found, token_logprobs(causal.load(folder), batch), atol=1e-3)
    assert all("lora_" in name for name in learned)
    assert len(learned) == 2 * 2 * (len(targets) or 7)


def test_adapters_for_modules_that_are_not_there_are_refused(folder: Path) -> None:
    pytest.importorskip("peft")

    with pytest.raises(WrongArguments, match=r"takes no adapters at \['none'\]"):
        add_adapters(causal.load(folder), Lora(targets=("none",)))


def test_adapters_without_peft_name_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(MissingDependency, match=r"needs peft, not .*'monarch-loom\[lora\]'"):
        add_adapters(None, Lora())


def test_adapters_without_a_rank_or_a_model_are_refused() -> None:
    with pytest.raises(WrongArguments, match="a rank from 1"):
        Lora(rank=0)
    with pytest.raises(WrongArguments, match="lora is for model"):
        Trainers(lambda: None, Characters(), lora=Lora())


def refusal(path: Path, tokenizer: Path) -> str:
    with pytest.raises(WrongArguments) as caught:
        causal.check(path, tokenizer_of(tokenizer))
    return str(caught.value)


def test_a_folder_that_is_not_there_is_named(folder: Path, tmp_path: Path) -> None:
    assert f"there is no folder {tmp_path / 'none'}" in refusal(tmp_path / "none", folder)


def test_a_folder_without_a_config_is_no_model(folder: Path, copied: Path) -> None:
    (copied / "config.json").unlink()

    assert "is no Hugging Face model" in refusal(copied, folder)


@pytest.mark.parametrize(
    ("kind", "architecture"), [("bert", "BertForMaskedLM"), ("qwen2", "Qwen2Model"), ("vit", "ViTModel")]
)
def test_a_model_without_a_causal_head_is_named(folder: Path, copied: Path, kind: str, architecture: str) -> None:
    change_config(copied, model_type=kind, architectures=[architecture])

    assert f"has a {architecture}, which is no causal language model" in refusal(copied, folder)


def test_more_tokens_than_the_model_knows_are_refused(folder: Path, copied: Path) -> None:
    change_config(copied, vocab_size=100)

    assert f"the tokenizer has {SIZE} tokens, and the model {copied} knows 100" in refusal(copied, folder)


def test_a_file_written_in_part_is_named(folder: Path, copied: Path) -> None:
    whole = (copied / "model.safetensors").read_bytes()
    (copied / "model.safetensors").write_bytes(whole[:-100])

    assert f"model.safetensors has {len(whole) - 100} bytes instead of {len(whole)}" in refusal(copied, folder)


def test_a_missing_part_is_named(folder: Path, copied: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "model-00002-of-00002.safetensors is missing" in refusal(copied, folder)


def test_a_folder_without_weights_is_not_whole(folder: Path, copied: Path) -> None:
    (copied / "model.safetensors").unlink()

    assert "it has no weights" in refusal(copied, folder)


def test_missing_weights_are_refused_instead_of_drawn(copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(copied / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, copied / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(WrongArguments, match=r"lacks 1 of its weights.*: lm_head.weight"):
        causal.load(copied)


def test_a_run_with_a_wrong_model_ends_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(WrongArguments, match="has no tokenizer"):
        Training(None, Trainers(model=tmp_path / "none"), run_in(tmp_path))  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{}, {"make_model": lambda: None, "model": "x"}, {"make_model": lambda: None}])
def test_trainers_get_one_model(given: dict[str, object]) -> None:
    with pytest.raises(WrongArguments, match="make_model"):
        Trainers(**given)  # type: ignore[arg-type]


def test_a_tokenizer_encodes_decodes_and_fills_a_chat_template(folder: Path) -> None:
    tokenizer = tokenizer_of(folder)

    tokens = tokenizer.encode("ä 1")
    chat = tokenizer.chat([{"role": "user", "content": "7"}])

    assert (tokenizer.eos, tokenizer.pad, tokenizer.size) == (END, PAD, SIZE)
    assert tokenizer.decode([*tokens, END, PAD]) == "ä 1"
    assert tokenizer._tokenizer.decode(chat) == "<|begin|>user\n7<|end|><|begin|>assistant\n"


def test_a_folder_without_a_template_takes_no_messages(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()

    with pytest.raises(WrongArguments, match="has no chat template"):
        tokenizer_of(copied).chat([{"role": "user", "content": "7"}])


def test_messages_that_the_template_refuses_are_named(copied: Path) -> None:
    (copied / "chat_template.jinja").write_text("{{ raise_exception('only users') }}")

    with pytest.raises(WrongArguments, match="refuses the messages: only users"):
        tokenizer_of(copied).chat([{"role": "system", "content": "7"}])
