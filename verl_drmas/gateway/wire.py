"""`POST /v1/generate` as bytes, for the gateway and for its caller: token ids in, token ids and weight versions out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator

from verl_drmas.body import Refused

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Version = Annotated[int, Field(ge=0, lt=2**31)]
STRICT = ConfigDict(strict=True, extra="forbid")


class Sampling(BaseModel):
    """What a call may say of sampling: what this package's workflows and verl's rollouts use.

    Engines know more, some of which makes one call as dear as a thousand; none of that comes in.
    """

    model_config = STRICT

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 1.0
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    presence_penalty: FiniteFloat = 0.0
    frequency_penalty: FiniteFloat = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool = False
    logprobs: bool = False


class GenerateBody(BaseModel):
    """A request."""

    model_config = STRICT

    id: Annotated[str, Field(min_length=1, max_length=128)]
    role: Annotated[str, Field(min_length=1, max_length=64)]
    prompt_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling: Sampling
    min_version: Version

    def digest(self) -> bytes:
        """Of all that decides the answer: the same for the same call asked again."""
        return hashlib.blake2b(orjson.dumps(self.model_dump(exclude={"id"})), digest_size=16).digest()

    def parameters(self) -> dict[str, Any]:
        """The sampling parameters that were given."""
        return self.sampling.model_dump(exclude_unset=True)


class Answer(BaseModel):
    """An answer. `log_probs` are those of `token_ids`; null among them is a number that JSON can't carry."""

    model_config = ConfigDict(strict=True)

    token_ids: list[TokenId]
    log_probs: list[float | None] | None
    stop_reason: str | None
    min_version: Version
    max_version: Version
    num_preempted: int | None = None
    num_cached_tokens: int | None = None

    @field_validator("log_probs")
    @classmethod
    def _null_is_nan(cls, given: list[float | None] | None) -> list[float | None] | None:
        return None if given is None else [math.nan if value is None else value for value in given]

    @model_validator(mode="after")
    def _lengths(self) -> Answer:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError("another number of log-probs than of tokens")
        if self.min_version > self.max_version:
            raise ValueError("min_version is above max_version")
        return self


def read_request(body: bytes, role: str) -> GenerateBody:
    """Parse a request's body.

    Args:
        body: As it came.
        role: That is served here.

    Raises:
        Refused: 422 where it is malformed, 404 where it is for another role. What was sent is not repeated, but for
            the names of keys.
    """
    try:
        asked = GenerateBody.model_validate_json(body)
    except ValidationError as error:
        raise Refused(422, "malformed", _first(error)) from None
    if asked.role != role:
        raise Refused(404, "role", "this gateway serves another role")
    return asked


def write_request(
    id: str, role: str, prompt_ids: Sequence[int], sampling: Mapping[str, Any], min_version: int
) -> bytes:
    """The body of a call. Parameters that are None are left out; NumPy's numbers and any sequences are taken."""
    given = {name: value for name, value in sampling.items() if value is not None}
    call = {"id": id, "role": role, "prompt_ids": prompt_ids, "sampling": given, "min_version": min_version}
    return orjson.dumps(call, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def write_answer(answer: Mapping[str, Any]) -> bytes:
    """The body of an answer, from the fields of `Answer`."""
    return orjson.dumps(answer, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def read_answer(body: bytes) -> Answer:
    """Parse an answer.

    Raises:
        ValueError: It is none; the message repeats nothing of it.
    """
    try:
        return Answer.model_validate_json(body)
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} can't be sent")


def _first(error: ValidationError) -> str:
    """The first problem, without what was given."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])[:100] or "body"
    if first["type"] == "json_invalid":
        return f"{where}: not JSON"  # the parser's own words repeat what it read
    return f"{where}: {' '.join(first['msg'].split())[:200]}"
