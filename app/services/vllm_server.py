"""The command that serves a model with vLLM, where that is installed. Nothing of it runs in this process.

What is relied on: vLLM's pages on `vllm serve` (`--served-model-name`, `--lora-modules`, `--middleware`,
`--override-generation-config`, whose `max_new_tokens` is a limit for all requests) and on `VLLM_API_KEY`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.accelerate_launch import module_environment
from app.services.model_names import NamedModel
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from trainers.embedded import BASE_DIR
from trainers.run.from_run import ADAPTER_CONFIG
from trainers.run.json_file import load_json
from trainers.run.web_host import SERVE_TOKEN, SERVED_HOST

API_KEY = "VLLM_API_KEY"
HOST_GUARD = "trainers.tools.host_guard.HostGuard"
"""Checks the Host header; imported by vLLM."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What `--max-lora-rank` takes."""
_OWN_KINDS = (
    "use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices", "target_parameters",
    "layer_replication",
)  # fmt: skip
"""Settings of an adapter that vLLM refuses, or leaves out without a word."""
_MAX_BYTES = 1 << 20


def vllm_argv(
    model: NamedModel,
    host: str,
    port: int,
    max_new_tokens: int,
    max_concurrent: int | None = None,
    revision: str | None = None,
    remote_code: bool = False,
) -> list[str]:
    """The command.

    With an adapter, vLLM also serves its base, under the name with `-base` at its end.

    Args:
        model: what to serve.
        host: address to listen on.
        port: port to listen on.
        max_new_tokens: most tokens of an answer.
        max_concurrent: sequences at a time; None for vLLM's default.
        revision: of a model on the Hub.
        remote_code: run model code that comes with the weights.

    Raises:
        ConfigError: for a checkpoint, and for an adapter that vLLM cannot load as it is.
    """
    if model.run is not None and model.folder is None:
        raise ConfigError(
            f"{model.label} is a checkpoint, which vLLM cannot load; `tunesmith export {model.run.id} --checkpoint "
            f"{model.weights}` makes a folder that it can"
        )
    name = model.label
    if model.is_adapter:
        assert model.folder is not None
        adapter = _adapter_config(model.folder)
        served, revision = str(adapter["base_model_name_or_path"]), adapter.get("revision") or None
        lora = {"name": name, "path": str(model.folder.absolute()), "base_model_name": f"{name}-base"}
        options = ["--served-model-name", f"{name}-base", "--enable-lora", "--max-lora-rank", str(_rank(adapter)),
                   "--lora-modules", json.dumps(lora)]  # fmt: skip
        if (model.folder / "tokenizer_config.json").is_file():  # with the chat template that it was trained with
            options += ["--tokenizer", str(model.folder.absolute())]
    else:
        local = BASE_DIR if model.label == EMBEDDED else model.folder
        served, options = str(local.absolute()) if local else model.label, ["--served-model-name", name]
    options += ["--host", host, "--port", str(port), "--allowed-origins", "[]", "--middleware", HOST_GUARD]
    options += ["--generation-config", "vllm"]  # as `chat` does: no settings that nobody asked for
    options += ["--override-generation-config", json.dumps({"max_new_tokens": max_new_tokens})]
    if max_concurrent is not None:
        options += ["--max-num-seqs", str(max_concurrent)]
    if revision:
        options += ["--revision", revision]
    if remote_code:
        options += ["--trust-remote-code"]
    return [*_program(), "serve", served, *options]


def vllm_environment(outer: Mapping[str, str], token: str | None, host: str, own: Mapping[str, str]) -> dict[str, str]:
    """The environment of the command.

    Args:
        outer: environment to extend.
        token: what clients must send; None for none.
        host: for the check of the Host header.
        own: variables to set besides, such as the GPUs that it sees.
    """
    environment = {
        name: value for name, value in module_environment(outer).items() if name not in (API_KEY, SERVE_TOKEN)
    }
    return {**environment, SERVED_HOST: host, **({API_KEY: token} if token else {}), **own}


def _program() -> list[str]:
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main"]


def _adapter_config(folder: Path) -> dict[str, Any]:
    """The config of an adapter that vLLM loads as it is.

    Raises:
        ConfigError: if it is another one.
    """
    try:
        config = load_json(folder / ADAPTER_CONFIG, _MAX_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}") from None
    if (folder / "base").is_dir():
        raise ConfigError(
            "vLLM would serve this adapter without the scaled RoPE that it was trained with; merge it with `tunesmith "
            "export RUN --merged`, and serve that folder"
        )
    if not isinstance(config, dict) or not config.get("base_model_name_or_path"):
        raise ConfigError(f"{folder / ADAPTER_CONFIG} names no base model; export the run again")
    own = [name for name in _OWN_KINDS if config.get(name)]
    if config.get("peft_type") != "LORA" or own:
        kind = own[0] if own else f"peft_type={config.get('peft_type')}"
        raise ConfigError(
            f"vLLM cannot serve this adapter as it is ({kind}); merge it with `tunesmith export RUN --merged`, and "
            "serve that folder"
        )
    return config


def _rank(adapter: Mapping[str, Any]) -> int:
    rank = adapter.get("r")
    fitting = [size for size in _RANKS if isinstance(rank, int) and rank <= size]
    if not fitting:
        raise ConfigError(f"vLLM serves adapters up to rank {_RANKS[-1]}, and this has {rank}; merge it")
    return fitting[0]
