"""A random Hugging Face model of some kilobytes with a tokenizer of single bytes and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT = (
    "{% for one in messages %}<|begin|>{{ one.role }}\n{{ one.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
BYTES = 256
BEGIN, END, PAD = BYTES, BYTES + 1, BYTES + 2
SIZE = BYTES + 3
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


def make_model(folder: Path, *, seed: int = 0, tied: bool = False, size: int = SIZE + 5, **sizes: Any) -> Path:
    """Write a Qwen2 with its tokenizer; return the folder."""
    make_tokenizer(folder)
    config = {"vocab_size": size, "tie_word_embeddings": tied, **SIZES, **sizes}
    random_model(seed, config).save_pretrained(folder)
    return folder


def random_model(seed: int, config: dict[str, Any]) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(bos_token_id=None, eos_token_id=END, pad_token_id=PAD, **config))


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": "<|pad|>"}
    tokenizer.add_special_tokens(list(dict.fromkeys(special.values())))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **special).save_pretrained(folder)


def change_config(folder: Path, **values: Any) -> None:
    """Change what ``config.json`` says; None removes a key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
