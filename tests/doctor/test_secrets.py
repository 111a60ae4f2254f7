"""Tests what a bundle leaves out, because those who get it need not know it."""

from __future__ import annotations

import pytest

from drivetrain.doctor.secrets import masked, masked_settings, shown_variables

SECRETS = {
    "HF_TOKEN": "t",
    "WANDB_API_KEY": "k",
    "AWS_SECRET_ACCESS_KEY": "s",
    "MYSQL_PASSWORD": "p",
    "DB_PASS": "p",
    "GITLAB_PAT": "p",
    "GOOGLE_APPLICATION_CREDENTIALS": "c",
    "SSH_AUTH_SOCK": "a",
    "my_token": "t",
}
PLAIN = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO"}


def test_variables_with_telling_names_go_and_others_stay() -> None:
    assert shown_variables({**SECRETS, **PLAIN}).splitlines() == sorted(f"{n}={v}" for n, v in PLAIN.items())


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host/simple",
        "https://hunter2@host/simple",
        "hf_hunter2hunter2hunter2",
        "Bearer eyJhunter2hunter2hunter2",
        "ghp_hunter2hunter2hunter2 in a sentence",
    ],
)
def test_passwords_in_addresses_and_known_tokens_go(text: str) -> None:
    assert "hunter2" not in masked(text)
    assert "left out" in masked(text)


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("api_key: hunter2\n", 'api_key: "(left out)"\n'),
        ("  - token: hunter2\n", '  - token: "(left out)"\n'),
        ('  "client_secret": "hunter2",\n', '  "client_secret": "(left out)",\n'),
        ("micro_batch_tokens: 512\n", "micro_batch_tokens: 512\n"),
        ("num_key_value_heads: 8", "num_key_value_heads: 8"),
        ("tokenizer: bpe\r\n", "tokenizer: bpe\r\n"),
        ("# a token: here\n", "# a token: here\n"),
    ],
)
def test_settings_with_telling_names_go_and_others_stay(line: str, kept: str) -> None:
    assert masked_settings(line) == kept
