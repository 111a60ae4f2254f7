"""Translates who answers in TRL's GRPO: the model itself, vLLM within the trainer, or vLLM's server.

Keys, defaults and meaning: TRL 1.16, trl/trainer/grpo_config.py.
"""

from __future__ import annotations

from drivetrain.importing.key_reader import KeyReader

FIELD = "workload.reinforcement.server"
PLACE = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
TOGETHER = ("use_vllm", "vllm_mode", *PLACE)
OWN = "answers are the model's own, made under the run's engine"
START = "weights go to it through a folder, not by NCCL: start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL"


def server(given: KeyReader) -> None:
    """Translates vLLM's server. vLLM within the trainer becomes generation of our own."""
    if not given.switch("use_vllm") or given.word("vllm_mode", "colocate") != "server":
        for key in TOGETHER:
            given.note(key, "unneeded", OWN)
        return
    port = given.count("vllm_server_port", 8000, 1)
    host = str(given.take("vllm_server_host", "0.0.0.0"))
    here = "127.0.0.1" if host == "0.0.0.0" else host  # its default stands for this machine
    url = given.take("vllm_server_base_url") or f"http://{here}:{port}"
    given.found.translation.settings[f"{FIELD}.url"] = str(url)
    for key in TOGETHER:
        given.note(key, "mapped", f"{FIELD}.url: {url}; {START}")
