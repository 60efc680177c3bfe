"""Loads a base model, adds adapters, and knows which dtype each weight has.

Weights come from the pretrained files or from one seeded initialisation, alike on every rank.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed

from trainers.attention import KERNELS
from trainers.config import EMBEDDED, ConfigError, TrainConfig
from trainers.embedded import BASE_DIR

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_COMPUTE = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def model_path(config: TrainConfig) -> str:
    """The Hub id or folder of the base model, the embedded one resolved."""
    return str(BASE_DIR) if config.model_name_or_path == EMBEDDED else config.model_name_or_path


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of matrix products."""
    return _COMPUTE[config.mixed_precision]


def base_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype that the base is kept in: fp32 where it is trained, the compute dtype where it is frozen."""
    return compute_dtype(config) if config.method == "lora" else torch.float32


def load_base(config: TrainConfig) -> PreTrainedModel:
    """The base model on the CPU, in `base_dtype`, with the attention that keeps documents apart.

    Raises:
        ConfigError: when the files are missing, gated or damaged, or the architecture cannot be packed.
    """
    where = {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}
    try:
        shape = AutoConfig.from_pretrained(model_path(config), **where)
    except (OSError, ValueError) as error:
        raise ConfigError(explain_load_error(config, error)) from None
    _check_packable(config, shape)
    kernel = KERNELS[config.attn_implementation]
    settings: dict[str, Any] = {"dtype": base_dtype(config), "attn_implementation": kernel}
    if config.random_init:
        set_seed(config.seed)
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code, **settings)
    else:
        try:
            # Safetensors only: other weight files are pickles, which run code when they are read.
            model = AutoModelForCausalLM.from_pretrained(
                model_path(config), config=shape, use_safetensors=True, **where, **settings
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(explain_load_error(config, error)) from None
    model.config.use_cache = False
    return model


def explain_load_error(config: TrainConfig, error: Exception) -> str:
    """One line for a model that could not be loaded: what, the value, the way out."""
    first = str(error).strip().partition("\n")[0][:300]
    return (
        f"model_name_or_path={config.model_name_or_path} cannot be loaded: {first}; check the name or folder, "
        "and for a gated model set HF_TOKEN after accepting its terms on the Hub"
    )


def _check_packable(config: TrainConfig, shape: Any) -> None:
    layers = set(getattr(shape, "layer_types", None) or ["full_attention"])
    if config.packing and not layers <= _PACKABLE_LAYERS:
        kinds = ", ".join(sorted(layers - _PACKABLE_LAYERS))
        raise ConfigError(
            f"packing=true with {shape.model_type}, whose {kinds} layers carry state across documents; "
            "use packing=false"
        )


def build_model(config: TrainConfig) -> nn.Module:
    """The model to train: the base, or the base with adapters on it.

    Raises:
        ConfigError: as `load_base`, or when `lora_target_modules` names nothing in the model.
    """
    base = load_base(config)
    if config.gradient_checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if config.torch_compile:
        _compile_blocks(base)
    return add_adapters(base, config) if config.method == "lora" else base


def add_adapters(base: PreTrainedModel, config: TrainConfig) -> nn.Module:
    """peft adapters on a frozen base; trained weights fp32, initialised by the seed on every rank alike."""
    from peft import LoraConfig, get_peft_model

    targets = config.lora_target_modules
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )
    set_seed(config.seed)
    try:
        return get_peft_model(base, adapters, autocast_adapter_dtype=True)
    except ValueError as error:
        names = sorted({name.rpartition(".")[2] for name, part in base.named_modules() if isinstance(part, nn.Linear)})
        logging.getLogger(__name__).debug("peft refused the targets", exc_info=error)
        raise ConfigError(
            f"lora_target_modules={','.join(targets)} fits no module of {config.model_name_or_path}; "
            f"use all-linear, or some of {', '.join(names)}"
        ) from None


def _compile_blocks(base: PreTrainedModel) -> None:
    """Compiles each decoder block in place: one graph for all of them, names of weights unchanged."""
    decoder: Any = base.get_decoder()
    for block in decoder.layers:
        block.compile()


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Trained weights for AdamW: matrices decay, norms and biases do not."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in trained if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in trained if weight.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Fused AdamW over the trained weights. The loop sets its rate at every step."""
    return torch.optim.AdamW(
        parameter_groups(model, config),
        lr=config.scaled_learning_rate(),
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def matmul_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters in matrix products, (trained, frozen); an embedding look-up is none, an output head is one."""
    trained = frozen = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not None:
            count = module.weight.numel()
            trained, frozen = (trained + count, frozen) if module.weight.requires_grad else (trained, frozen + count)
    return trained, frozen
