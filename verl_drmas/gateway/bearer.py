"""The bearer token: read once, carried where no log shows it, compared in constant time."""

from __future__ import annotations

import os
import re
from hmac import compare_digest

from pydantic import SecretStr

from verl_drmas.config import ConfigError

_SCHEME = "bearer "


def read_token(name: str, key: str) -> SecretStr:
    """The token of an environment variable; its `repr` hides it.

    Args:
        name: The variable.
        key: The configuration key that names it.

    Raises:
        ConfigError: It isn't set, or holds what no header can carry.
    """
    return as_token(os.environ.get(name, ""), f"{key} is {name!r}, and the variable")


def as_token(text: str | SecretStr, what: str = "the gateway's token") -> SecretStr:
    """A text as a token.

    Raises:
        ConfigError: It is empty, or holds what no header can carry.
    """
    token = (text.get_secret_value() if isinstance(text, SecretStr) else text).strip()
    if not token:
        raise ConfigError(f"{what} is not set; set it to the same long random text for both jobs")
    if not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(f"{what} holds characters that no token has; use letters, digits and signs without spaces")
    return SecretStr(token)


def header(token: SecretStr) -> str:
    """The value of `Authorization` that carries it."""
    return f"Bearer {token.get_secret_value()}"


def is_right(given: str | None, token: SecretStr) -> bool:
    """Whether an `Authorization` header carries the token."""
    given = given or ""
    carried = given[len(_SCHEME) :].strip() if given[: len(_SCHEME)].lower() == _SCHEME else ""
    return compare_digest(carried.encode(), token.get_secret_value().encode())
