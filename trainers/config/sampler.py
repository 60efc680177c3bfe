"""The option `sampler_url`: which addresses and which runs a server may sample for. Imports no torch."""

from __future__ import annotations

from urllib.parse import urlsplit

from trainers.config.mistakes import Mistake
from trainers.config.options import TrainConfig

API_KEY = "TUNESMITH_SAMPLER_API_KEY"
"""Environment variable with the key of the server; no option and no file holds it."""


def sampler_mistakes(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each reason why no server can sample the answers of a run."""
    url = config.sampler_url
    if url is None or not config.objective_spec.samples:
        return []
    if problem := url_problem(url, API_KEY):
        return [Mistake("sampler_url", None if "@" in url or "?" in url else url, *problem)]
    own = "leave it out, and the processes of the run sample"
    rules: list[tuple[bool, str, object, str]] = [
        (config.method == "full", "method", "full", "with sampler_url: the server gets an adapter, not all weights"),
        (config.method == "qlora", "method", "qlora",
         "with sampler_url: the adapter is trained on a base in 4 bits, whose weights the server does not have"),
        (bool(config.modules_to_save), "modules_to_save", ",".join(config.modules_to_save),
         "with sampler_url: the server adds adapters to its base, and replaces no module"),
        *((bool(patterns), name, ",".join(f"{key}={value}" for key, value in patterns.items()),
           "with sampler_url: the server scales all adapters alike")
          for name, patterns in (("lora_rank_pattern", config.lora_rank_pattern),
                                 ("lora_alpha_pattern", config.lora_alpha_pattern))),
        (bool(config.lora_target_parameters), "lora_target_parameters", ",".join(config.lora_target_parameters),
         "with sampler_url: the server adds adapters to modules alone"),
        (bool(config.new_tokens), "new_tokens", ",".join(config.new_tokens),
         "with sampler_url: the server has the vocabulary of its base"),
        (config.init_lora_weights == "pissa", "init_lora_weights", "pissa",
         "with sampler_url: the server adds adapters to the weights of its base, not to a residual"),
        (config.use_dora, "use_dora", True, "with sampler_url: the server adds adapters of plain LoRA"),
        (config.random_init, "random_init", True, "with sampler_url: the server has the pretrained weights"),
        (config.num_hidden_layers is not None, "num_hidden_layers", config.num_hidden_layers,
         "with sampler_url: the server has all layers"),
        (config.rope_scaling != "none", "rope_scaling", config.rope_scaling,
         "with sampler_url: the server has the positions of the base model"),
        (config.recorded_answers is not None, "recorded_answers", None,
         "and sampler_url are both set, and only one of them gives the answers"),
    ]  # fmt: skip
    remedies = {"method": f"use method=lora, or for sampler_url: {own}", "recorded_answers": "keep one"}
    return [
        Mistake(name, value, problem, remedies.get(name, f"for sampler_url: {own}"))
        for applies, name, value, problem in rules
        if applies
    ]


def url_problem(url: str, key: str) -> tuple[str, str] | None:
    """What is wrong with the address of a server, and the remedy.

    Args:
        url: the address.
        key: environment variable with the key of the server.
    """
    import httpx  # few runs need it

    example = "use one such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not an address", example
    if "@" in parts.netloc:
        return "holds credentials", f"leave them out and set {key} in the environment"
    if parts.scheme not in ("http", "https") or not host:
        return "is not an http(s) address", example
    if "?" in url or "#" in url:
        return "has a query or a fragment", example
    if not url.isprintable() or " " in url:
        return "holds a space or an invisible character", example
    try:
        _ = httpx.URL(url).host  # decodes the name
    except (httpx.InvalidURL, ValueError):  # as of a name that is none in any alphabet
        return "has no valid name of a host", example
    return None
