"""OpenAI's form of requests, answers and errors for completions."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from loom.errors import CheckpointBroken, Denied, LimitReached, LoomError, WrongArguments, WrongState

if TYPE_CHECKING:
    from loom.rl.generation.completions import Completion, TextOrTokens
    from loom.rl.generation.decoding import TextTokenizer

MODEL = "policy"
"""The name of a generator's only model. A request may name another one, and gets this."""

_Model = TypeVar("_Model", bound=BaseModel)

_IGNORED_AT: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (None, True, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "ignore_eos": (None, False),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
    "presence_penalty": (None, 0),
    "priority": (None, 0),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True, False),
    "stop_token_ids": (None, []),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Fields of OpenAI's and vLLM's that a generator lacks, and the values at which that makes no difference."""
_OF_CACHES = ("cache_salt", "request_id", "session_id", "user")
"""Fields that name a request, or part caches from each other: a generator has no cache of prompts."""


class ApiError(Exception):
    """The error of a request, as an HTTP answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: LoomError) -> ApiError:
        """Return the answer for one of Loom's errors."""
        statuses = {WrongArguments: 400, Denied: 403, CheckpointBroken: 409, LimitReached: 429, WrongState: 503}
        status = next((status for kind, status in statuses.items() if isinstance(error, kind)), 500)
        return cls(status, str(error), code=error.code)


class StreamOptions(BaseModel):
    """The parts of a stream beside its pieces."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of ``POST /v1/completions``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[str] | list[int] | list[list[int]]
    """One text or several, or their tokens."""
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    n: int = 1
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    """0 or 1: the log probability of each token that was drawn is in the answer."""
    return_token_ids: bool = False
    """True if the answer has the tokens of prompts and completions, too."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of the sampling that the request has."""
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**found, "seed": self.seed, **({"stop": self.stop} if self.stop else {})}

    @property
    def prompts(self) -> list[TextOrTokens]:
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        return [*prompt]


class UpdateRequest(BaseModel):
    """The body of ``POST /update_weights``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = None
    """The folder of the weights. A relative one is in the folder of all weights."""
    weight_dir: str | None = None
    """The same, as prime-rl names it."""
    step: int | None = None
    """The step of the weights; without it that of the path's name."""


def parse(body: bytes, model: type[_Model]) -> _Model:
    """Return a request; raise `ApiError` with status 400 for a body that is none."""
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body is no JSON object")
    if model is CompletionRequest:
        for name in _OF_CACHES:
            found.pop(name, None)
        for name, harmless in _IGNORED_AT.items():
            if name in found and not any(found[name] == one for one in harmless):
                raise ApiError(400, f"{name} is not supported here", param=name, code="unsupported_parameter")
            found.pop(name, None)
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        code = {"extra_forbidden": "unknown_parameter", "missing": "missing_parameter"}.get(first["type"])
        raise ApiError(400, f"{param}: {first['msg']}", param=param, code=code) from None


@dataclass(frozen=True)
class CompletionAnswers:
    """Builds the answers to one request."""

    request: CompletionRequest
    tokenizer: TextTokenizer
    id: str
    created: int

    @classmethod
    def to(cls, request: CompletionRequest, tokenizer: TextTokenizer) -> CompletionAnswers:
        return cls(request, tokenizer, f"cmpl-{uuid.uuid4().hex}", int(time.time()))

    def whole(self, completions: list[Completion]) -> dict[str, object]:
        """Return the answer that has all completions."""
        choices = [self._choice(number, completion) for number, completion in enumerate(completions)]
        return self._object(choices, usage(completions, self.request.n))

    def piece(
        self, index: int, text: str, tokens: list[int], logprobs: list[float], done: Completion | None
    ) -> dict[str, object]:
        """Return a chunk of a stream; ``done`` is the whole completion, if this is its last piece."""
        choice: dict[str, object] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs(tokens, logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = tokens
        if done is not None:
            choice["finish_reason"] = _reason(done)
            choice["weights_step"] = done.weights_step
        return self._object([choice])

    def end(self, completions: list[Completion]) -> dict[str, object]:
        """Return the chunk with the usage, which is the last one."""
        return self._object([], usage(completions, self.request.n))

    def _choice(self, index: int, completion: Completion) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": _reason(completion),
            "weights_step": completion.weights_step,
        }
        if self.request.logprobs is not None:
            choice["logprobs"] = self._logprobs(completion.tokens, completion.logprobs)
        if self.request.return_token_ids:
            choice["token_ids"] = completion.tokens
            choice["prompt_token_ids"] = completion.prompt_tokens
        return choice

    def _logprobs(self, tokens: list[int], logprobs: list[float]) -> dict[str, object]:
        """Return the log probabilities of the tokens that were drawn, and of no others."""
        texts = [self.tokenizer.decode([token]) for token in tokens]
        offsets = [0, *accumulate(map(len, texts))][: len(texts)]
        tops = [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _object(self, choices: list[dict[str, object]], used: dict[str, int] | None = None) -> dict[str, object]:
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": MODEL}
        return {**head, "choices": choices, **({"usage": used} if used is not None else {})}


def usage(completions: list[Completion], n: int) -> dict[str, int]:
    """Return how many tokens a request took; its prompts count once each."""
    prompt = sum(len(completion.prompt_tokens) for completion in completions[::n])
    written = sum(len(completion.tokens) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _reason(completion: Completion) -> str:
    return "length" if completion.truncated else "stop"
