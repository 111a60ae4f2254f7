"""Removes from a text what looks like a secret: values of telling names, passwords in addresses, known tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping

LEFT_OUT = "(left out)"
_WORDS = re.compile(
    r"key|token|secret|passw|passphrase|credential|auth|cookie|(^|_)(pass|pat|pwd|sas)($|_)", re.IGNORECASE
)
_HARMLESS = {"TOKENIZERS_PARALLELISM", "XAUTHORITY"}
# of a setting the last part of its name counts: num_key_value_heads and micro_batch_tokens are no secrets
_SETTING = re.compile(
    r"secret|passw|passphrase|credential|(^|[_.-])(api_?key|access_?key|key|token|auth|pwd|pat)$", re.IGNORECASE
)
_LINE = re.compile(r'^(\s*(?:-\s+)?["\']?([\w.-]+)["\']?\s*:\s*)(\S.*?)(,?)$')
_ADDRESS = re.compile(r"(\w+://)[^/\s@\"']+@")
_KNOWN = re.compile(r"\b(hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|eyJ)[\w-]{12,}")


def is_secret(name: str) -> bool:
    """Returns whether an environment variable's name marks its value as a secret."""
    return name not in _HARMLESS and _WORDS.search(name) is not None


def shown_variables(variables: Mapping[str, str]) -> str:
    """Returns a line NAME=value for each variable, in order; secrets are left out with their names."""
    kept = (f"{name}={masked(value)}" for name, value in sorted(variables.items()) if not is_secret(name))
    return "".join(f"{line}\n" for line in kept)


def masked(text: str) -> str:
    """Returns the text without passwords in addresses and without strings in the form of a service's token."""
    return _KNOWN.sub(LEFT_OUT, _ADDRESS.sub(rf"\1{LEFT_OUT}@", text))


def masked_settings(text: str) -> str:
    """Returns YAML or JSON, a setting a line, without the values of settings whose names mark them as secrets."""
    return "".join(_without(line) for line in masked(text).splitlines(keepends=True))


def _without(line: str) -> str:
    body = line.rstrip("\r\n")
    found = _LINE.match(body)
    if found is None or _SETTING.search(found[2]) is None:
        return line
    return f'{found[1]}"{LEFT_OUT}"{found[4]}{line[len(body) :]}'
