"""``python -m tests.system.stacks.tiny_model FOLDER`` makes a small language model, its tokenizer and data sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

TEXTS = [f"{first} plus {second} is {first + second}." for first in range(20) for second in range(20)]


def make(folder: Path) -> None:
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    bytes_of = ByteLevelBPETokenizer()
    bytes_of.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_of._tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    )
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=304, num_key_value_heads=1, max_position_embeddings=64, **sizes)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 0, 0
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    for name, rows in (
        ("texts", [{"text": text} for text in TEXTS]),
        ("prompts", [{"prompt": text.partition(" is ")[0] + " is", "solution": text} for text in TEXTS]),
    ):
        (folder / name).mkdir()
        for split in ("train", "test"):
            lines = "\n".join(map(json.dumps, rows[:: 1 if split == "train" else 20]))
            (folder / name / f"{split}.jsonl").write_text(lines + "\n")
    (folder / "tests" / "assets").mkdir(parents=True)  # where torchtitan looks for the texts of its debug model
    (folder / "tests" / "assets" / "c4_test").symlink_to(folder / "texts")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
