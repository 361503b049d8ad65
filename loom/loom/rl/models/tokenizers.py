"""`tokenizer_of`: the tokenizer of a Hugging Face model's folder, as a `loom.rl.Tokenizer` with a chat template."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loom.errors import WrongArguments
from loom.extras import require


class FolderTokenizer:
    """A tokenizer that transformers has read from a folder; a `loom.rl.Tokenizer`.

    Raises:
        WrongArguments: it has no token that ends a text.
    """

    def __init__(self, path: str, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise WrongArguments(
                f"the tokenizer of {path} has no eos token, with which a completion ends: name one"
            )
        self._path = path
        self._tokenizer = tokenizer
        self.eos: int = tokenizer.eos_token_id
        self.pad: int = self.eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        """The token that fills shorter texts up. A text may have it, too: what is padding is told by lengths."""
        self.size: int = len(tokenizer)

    def __reduce__(self) -> tuple[Callable[[str], FolderTokenizer], tuple[str]]:
        return tokenizer_of, (self._path,)  # every host reads the folder by itself

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the model wants before it, without `eos`."""
        tokens: list[int] = self._tokenizer.encode(text)
        return tokens[:-1] if tokens and tokens[-1] == self.eos else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, without special ones such as `eos` and `pad`."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    @property
    def has_chat_template(self) -> bool:
        """True if `chat` works."""
        return bool(self._tokenizer.chat_template)

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the tokens of messages, up to where the model's answer begins.

        Args:
            messages: such as ``{"role": "user", "content": "…"}``.
            tools: JSON schemas, or functions, that the template describes to the model.

        Raises:
            WrongArguments: the folder has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise WrongArguments(
                f"{self._path} has no chat template: give a text, or add chat_template.jinja to it"
            )
        from jinja2 import TemplateError

        try:
            tokens: list[int] = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise WrongArguments(f"the chat template of {self._path} refuses the messages: {error}") from error
        return tokens


def tokenizer_of(path: str | os.PathLike[str]) -> FolderTokenizer:
    """Return the tokenizer of a Hugging Face model.

    Args:
        path: the model's folder, or its name on the hub.

    Raises:
        MissingDependency: transformers is not installed.
        WrongArguments: there is no tokenizer, or it cannot be read.
    """
    require({"transformers": "transformers", "jinja2": "jinja2"}, "a Hugging Face tokenizer", "hf")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(os.fspath(path))
    except Exception as error:
        raise WrongArguments(f"{os.fspath(path)} has no tokenizer that transformers can read: {error}") from error
    return FolderTokenizer(os.fspath(path), tokenizer)
