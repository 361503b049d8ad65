"""`write_arithmetic_model`: a small Qwen2 with its tokenizer as a Hugging Face folder, which knows nothing.

It stands for any Hugging Face model in the demo and in tests: every engine reads it.
"""

from __future__ import annotations

import json
from pathlib import Path

EOS, PAD = "<|endoftext|>", "<|pad|>"  # Qwen2 tokenizers add the first to those that lack it
LONGEST = 128
"""Tokens of a prompt with its completion."""

_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_arithmetic_model(
    folder: str | Path, *, layers: int = 2, hidden: int = 128, seed: int = 0, letters: str | None = None
) -> Path:
    """Write a Qwen2 with random weights in float32, and a tokenizer of single bytes; return the folder.

    Args:
        folder: where they go; it may be there.
        layers: of the model.
        hidden: the size of the model, 64 for each head. All heads share one head of keys and values.
        seed: of the weights.
        letters: a text of all characters that the tokenizer knows, in ASCII; None for all bytes.

    Raises:
        MissingDependency: transformers or tokenizers are not installed.
    """
    from loom.extras import require

    require(
        {"torch": "torch", "transformers": "transformers", "tokenizers": "tokenizers"}, "a Hugging Face model", "hf"
    )
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    size = _write_tokenizer(folder, letters)
    config = Qwen2Config(
        vocab_size=size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=1,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=size - 2,
        pad_token_id=size - 1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    return folder


def _write_tokenizer(folder: Path, letters: str | None) -> int:
    """Write a byte-level BPE without merges; return its size."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = set(as_bytes.alphabet())
    if letters is not None:
        known = {letter for text, _ in as_bytes.pre_tokenize_str(letters) for letter in text}
    tokenizer = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(sorted(known))}, merges=[]))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": LONGEST,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return int(tokenizer.get_vocab_size())
