"""Loads a base model, adds adapters, and knows which dtype each weight has.

Weights come from the pretrained files or from one seeded initialisation, alike on every rank.
"""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from trainers.attention import KERNELS
from trainers.config import EMBEDDED, ConfigError, TrainConfig
from trainers.data.layout import DocumentLayout
from trainers.embedded import BASE_DIR
from trainers.quantise import finish, loading_options, many_threads, refuse_unfit

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_COMPUTE = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def model_path(config: TrainConfig) -> str:
    """The Hub id or folder of the base model, the embedded one resolved."""
    return str(BASE_DIR) if config.model_name_or_path == EMBEDDED else config.model_name_or_path


def compute_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype of matrix products."""
    return _COMPUTE[config.mixed_precision]


def base_dtype(config: TrainConfig) -> torch.dtype:
    """Dtype that the base is kept in: fp32 where it is trained (see `master_weights`), else the compute dtype."""
    return torch.float32 if config.method == "full" and config.master_weights else compute_dtype(config)


def _where(config: TrainConfig) -> dict[str, Any]:
    return {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}


def load_shape(config: TrainConfig) -> Any:
    """The base model's transformers config, changed as training wants it.

    Raises:
        ConfigError: when it is missing, gated or damaged, or the architecture cannot be packed or quantised.
    """
    try:
        shape = AutoConfig.from_pretrained(model_path(config), **_where(config))
    except (OSError, ValueError) as error:
        raise ConfigError(explain_load_error(config, error)) from None
    _keep_layers(config, shape)
    _check_layers(config, shape)
    _check_quantisation(config, shape)
    _drop_dropout(shape)
    return shape


def load_base(config: TrainConfig) -> PreTrainedModel:
    """The base model on the CPU, in `base_dtype` (quantised for qlora), with the attention that keeps documents apart.

    Raises:
        ConfigError: when the files are missing, gated or damaged, or the architecture cannot be packed or quantised.
    """
    where, shape = _where(config), load_shape(config)
    settings: dict[str, Any] = {"dtype": base_dtype(config), "attn_implementation": KERNELS["sdpa"]}
    if config.method == "qlora":
        settings |= loading_options(compute_dtype(config))
    if config.random_init:
        set_seed(config.seed)
        model = AutoModelForCausalLM.from_config(shape, trust_remote_code=config.trust_remote_code, **settings)
    else:
        try:
            # Safetensors only: other weight files are pickles, which run code when they are read.
            with many_threads() if config.method == "qlora" else nullcontext():
                model = AutoModelForCausalLM.from_pretrained(
                    model_path(config), config=shape, use_safetensors=True, **where, **settings
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ConfigError(explain_load_error(config, error)) from None
    if config.method == "qlora":
        finish(model)
    model.config.use_cache = False
    for weight in silent_weights(model):
        weight.requires_grad_(False)
    return model


def _text_parts(base: Any) -> list[nn.Module]:
    """What text goes through; a vision tower beside it gets no gradients, and stays as it is."""
    return [part for part in (base.get_decoder(), base.get_output_embeddings()) if part is not None]


def silent_weights(base: nn.Module) -> list[nn.Parameter]:
    """Weights that text does not reach; frozen with any method."""
    spoken = {id(weight) for part in _text_parts(base) for weight in part.parameters()}
    return [weight for weight in base.parameters() if id(weight) not in spoken]


def explain_load_error(config: TrainConfig, error: Exception) -> str:
    """One line for a model that could not be loaded: what, the value, the way out."""
    first = str(error).strip().partition("\n")[0][:300]
    return (
        f"model_name_or_path={config.model_name_or_path} cannot be loaded: {first}; check the name or folder, "
        "and for a gated model set HF_TOKEN after accepting its terms on the Hub"
    )


def _keep_layers(config: TrainConfig, shape: Any) -> None:
    """Cuts a model after its first layers, where that is asked for."""
    wanted, text = config.num_hidden_layers, shape.get_text_config()
    if wanted is None:
        return
    if wanted > text.num_hidden_layers:
        raise ConfigError(
            f"num_hidden_layers={wanted}: {config.model_name_or_path} has {text.num_hidden_layers}; use fewer"
        )
    text.num_hidden_layers = wanted
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:wanted]


def _drop_dropout(shape: Any) -> None:
    """Sets the model's own dropout to 0: it would differ from strategy to strategy. LoRA's is an option."""
    for name, value in vars(shape).items():
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0:
            setattr(shape, name, 0.0)
            if os.environ.get("RANK", "0") == "0":
                print(f"the model's own {name}={value} is set to 0 for training", flush=True)


def _check_layers(config: TrainConfig, shape: Any) -> None:
    layers = set(getattr(shape, "layer_types", None) or ["full_attention"])
    if "chunked_attention" in layers:
        raise ConfigError(
            f"{shape.model_type} has chunked_attention layers, which are not supported; use another model"
        )
    if config.packing and not layers <= _PACKABLE_LAYERS:
        kinds = ", ".join(sorted(layers - _PACKABLE_LAYERS))
        raise ConfigError(
            f"packing=true with {shape.model_type}, whose {kinds} layers carry state across documents; "
            "use packing=false"
        )


def _check_quantisation(config: TrainConfig, shape: Any) -> None:
    if config.method != "qlora":
        return
    if getattr(shape, "quantization_config", None) is not None:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path} is quantised already; name the model that it was made of, "
            "which method=qlora quantises"
        )
    refuse_unfit(shape, config.trust_remote_code)


@torch.no_grad()
def probe_attention(wrapped: nn.Module, base: PreTrainedModel, packing: bool, device: torch.device) -> None:
    """Proves on the model in hand that no token sees a later one and, packed, none of another document.

    Some architectures never ask for the attention they are given; they would train on the future in silence.
    One forward pass of four rows that differ in one token each, through whatever wraps the model.

    Args:
        wrapped: the module that computes the loss, as the strategy made it.
        base: the transformers model in it.

    Raises:
        ConfigError: when a hidden state moves that must not, or the model cannot run through our attention at all.
    """
    size, half = 12, 6
    place = torch.arange(size, device=device).expand(4, size)
    ids = (place + 1) % base.config.get_text_config().vocab_size
    for row, changed in enumerate((half, size - 1, half - 1), start=1):
        ids[row, changed] = (ids[row, changed] + 7) % base.config.get_text_config().vocab_size
    documents = DocumentLayout.of(np.arange(0, 4 * size + 1, half), 4).to(device) if packing else None
    seen: list[torch.Tensor] = []
    hook = base.get_decoder().register_forward_hook(lambda module, inputs, output: seen.append(output[0].float()))
    wrapped.eval()
    try:
        with torch.compiler.set_stance("force_eager"):  # no graph for a shape that never comes again
            wrapped(ids, place % half if packing else place, documents, place.flatten()[:1], place.flatten()[:1])
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        under = "" if type(wrapped).__name__ == "SupervisedLoss" else f" under {type(wrapped).__name__}"
        raise ConfigError(
            f"{base.config.model_type} models cannot be trained here{under}: {error}; use another model"
            + (" or strategy" if under else "")
        ) from None
    finally:
        hook.remove()
        wrapped.train()
    change = (seen[0][1:] - seen[0][0]).abs().amax(-1)  # [changed token, position]
    may_move, moved = change[0, half + 1 :].max(), change[1, : size - 1].max()
    if packing:
        moved = torch.maximum(moved, change[2, half:].max())
    if not moved <= 1e-2 * may_move:
        way = "packing=false, or another model" if packing else "another model"
        what = "later tokens or another document" if packing else "later tokens"
        raise ConfigError(f"{base.config.model_type} models see {what} through the attention they bring; use {way}")


def build_model(config: TrainConfig) -> nn.Module:
    """The model to train: the base, or the base with adapters on it.

    Raises:
        ConfigError: as `load_base` and `add_adapters`.
    """
    base = load_base(config)
    use_checkpointing(base, config)
    return base if config.method == "full" else add_adapters(base, config)


def use_checkpointing(base: PreTrainedModel, config: TrainConfig) -> None:
    """Lets the layers compute again in the backward pass what they would have kept for it, where that is asked for."""
    if not config.gradient_checkpointing:
        return
    choices: dict[str, Any] = {"use_reentrant": False}
    if config.selective_checkpointing:
        choices["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=choices)


def _keep_products(context: Any, operation: Any, *inputs: Any, **rest: Any) -> CheckpointPolicy:
    """Matrix products and attention are dear to repeat; what lies between them is not."""
    name = operation.name().partition(".")[0].rpartition("::")[2]
    dear = name in ("mm", "addmm", "bmm", "baddbmm", "linear", "_varlen_attn", "_scaled_mm") or "dot_product" in name
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


def add_adapters(base: PreTrainedModel, config: TrainConfig) -> nn.Module:
    """peft adapters on a frozen base; trained weights fp32, initialised by the seed on every rank alike."""
    from peft import LoraConfig, get_peft_model

    targets = config.lora_target_modules
    spoken = {id(module) for part in _text_parts(base) for module in part.modules()}
    silent = [name for name, part in base.named_modules() if _adaptable(part) and id(part) not in spoken]
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        exclude_modules=silent or None,
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
        revision=config.model_revision,
    )
    set_seed(config.seed)
    names = sorted({name.rpartition(".")[2] for name, part in base.named_modules() if _adaptable(part)})
    try:
        model: Any = get_peft_model(base, adapters, autocast_adapter_dtype=True)
        got = list(model.targeted_module_names)
    except ValueError as error:
        logging.getLogger(__name__).debug("peft refused the targets", exc_info=error)
        got = []
    missing = [name for name in targets if name != "all-linear" and not any(_ends(one, name) for one in got)]
    if missing or not got:
        raise ConfigError(
            f"lora_target_modules={','.join(missing or targets)} fits no module of {config.model_name_or_path}; "
            f"use all-linear, or some of {', '.join(names)}"
        )
    _refuse_merging_tied(config, base, got)
    return model


def _adaptable(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # GPT-2 writes its linear layers so


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _refuse_merging_tied(config: TrainConfig, base: Any, targeted: list[str]) -> None:
    """Merging into one of two tied matrices would change the other one too."""
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    if not config.merge_adapter or head is None or head.weight is not embedding.weight:
        return
    tied = [name for name, part in base.named_modules() if part is head or part is embedding]
    if any(_ends(target, name.rpartition(".")[2]) for name in tied for target in targeted):
        raise ConfigError(
            "merge_adapter=true with an adapter on tied embeddings would change both of them; "
            "leave lm_head and the embedding out of lora_target_modules, or export the adapter"
        )


def compile_blocks(base: PreTrainedModel) -> None:
    """Compiles each decoder block in place: one graph for all of them, names of weights unchanged."""
    decoder: Any = base.get_decoder()
    blocks = getattr(decoder, "layers", None)
    if blocks is None:
        raise ConfigError(
            f"torch_compile=true: {base.config.model_type} has no list of layers; use torch_compile=false"
        )
    for block in blocks:
        block.compile()


def matmul_parameters(model: nn.Module) -> tuple[int, int]:
    """Parameters in matrix products, (trained, frozen); an embedding look-up is none, an output head is one."""
    trained = frozen = 0
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight is not None:
            count = module.in_features * module.out_features  # the weight itself may be packed or sharded
            trained, frozen = (trained + count, frozen) if module.weight.requires_grad else (trained, frozen + count)
    return trained, frozen
