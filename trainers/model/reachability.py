"""Finds the weights that get no gradient from text, whatever the data: a vision tower, a second head, an indexer.

Strategies treat a missing gradient in different ways: AdamW leaves the weight alone, FSDP 1 and ZeRO update it with
zeros, and DDP waits for it. Such weights are therefore frozen before any strategy sees them. They are found without
data and memory, by following the graph of a forward pass over fake tensors.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.config_checks import own_code
from trainers.model.probe import own_attention
from trainers.model.scalar_head import model_family
from trainers.model.weight_names import first_names
from trainers.objectives.output_head import decoder_of, scalar_head

OPTION = "ddp_find_unused_parameters"
_SHORT, _LONG = 12, 512
"""Tokens of a pass; layers that compress what is far away need a long one, which some families compute in a loop."""

_KNOWN: dict[tuple[str, str, int], Reach] = {}


@dataclass(frozen=True)
class Reach:
    """What the gradient of a text reaches.

    Args:
        unreached: names of the weights that it never reaches, beside those of `silent_weights`.
        sometimes: names of the weights that it reaches if it is long.
        varies: whether it may reach other weights in each batch, as with experts in a loop; True if unknown.
        fixed: names of the weights that it never reaches and that their class builds frozen, such as the biases by
            which routers choose experts; transformers makes them trainable as it loads them.
        bypassed: names of the linear layers that the model never calls, though it computes with their weights, as with
            Mamba's `dt_proj`; an adapter on one has no effect.
    """

    unreached: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()
    varies: bool = False
    fixed: tuple[str, ...] = ()
    bypassed: tuple[str, ...] = ()


def reach_of(config: TrainConfig, model_config: Any) -> Reach:
    """What text reaches in a model; builds an empty copy of it, except of one whose code is its own.

    Args:
        config: the run's config.
        model_config: the transformers config of the model; not modified.
    """
    if own_code(config, model_config):
        return Reach(varies=True)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    length = min(config.max_length, positions if isinstance(positions, int) else _LONG, _LONG)
    family = model_family(config)
    key = f"{family.__name__} {type(model_config).__name__}", model_config.to_json_string(use_diff=False), length
    if key not in _KNOWN:
        _KNOWN[key] = _reach_of_empty(family, model_config, length)
    return _KNOWN[key]


def _reach_of_empty(family: Any, model_config: Any, longest: int) -> Reach:
    try:
        with torch.device("cpu"), without_log("torch._subclasses.fake_tensor"):
            model = _empty(family, copy.deepcopy(model_config))
            frozen = {name for name, weight in model.named_parameters() if not weight.requires_grad}
            for weight in model.parameters():  # as they are once loaded
                weight.requires_grad_(weight.is_floating_point())
            with FakeTensorMode():
                as_fakes(model)
                unreached, bypassed = _traced(model, _SHORT)
                never = set(_traced(model, longest)[0]) if unreached else set[str]()
    except Exception:  # families fail in any way, such as by a loop over the experts that have tokens
        logging.getLogger(__name__).debug("what text reaches is unknown without values", exc_info=True)
        return Reach(varies=True)
    sometimes = tuple(name for name in unreached if name not in never)
    fixed = tuple(name for name in unreached if name in never & frozen)
    always = tuple(name for name in unreached if name in never - frozen)
    return Reach(always, sometimes, varies=bool(sometimes), fixed=fixed, bypassed=tuple(bypassed))


@contextmanager
def without_log(name: str) -> Iterator[None]:
    """Turns off a logger, which would show the user a traceback of an error that is caught."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def reach_of_loaded(model: Any) -> Reach:
    """What text reaches in a model with its weights on the CPU; experts of a list count as reached if one of them is.

    Args:
        model: a transformers model.
    """
    with own_attention(model):
        unreached, bypassed = _traced(model, _SHORT)
    reached = {expert_list(name) for name, _ in model.named_parameters() if name not in set(unreached)}
    lists = {expert_list(name) for name in unreached} & (reached - {None})
    always = tuple(name for name in unreached if expert_list(name) not in lists)
    return Reach(always, varies=True, bypassed=tuple(bypassed))


def expert_list(name: str) -> str | None:
    """The name of the list that contains a weight of a single expert, with what it is there; None for other weights.

    Args:
        name: such as `model.layers.0.mlp.experts.3.up_proj.weight`, which gives `model.layers.0.mlp.experts`.
    """
    before, _, after = name.partition(".experts.")
    return f"{before}.experts" if after.partition(".")[0].isdecimal() else None


def _empty(family: Any, model_config: Any) -> Any:
    # Their dtype in bf16: torch's grouped matrix product takes no other without a GPU's memory.
    with torch.device("meta"):
        model = family.from_config(model_config, dtype=torch.bfloat16, attn_implementation=None)
    return model.eval()


def as_fakes(model: nn.Module) -> None:
    """Replaces meta tensors, which have no autocast and no masks by value, by fake CPU ones; tied weights stay tied."""
    fakes: dict[int, Any] = {}
    for part in model.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if held is part._parameters else fake
                held[name] = None if tensor is None else fakes[id(tensor)]


@torch.enable_grad()
def _traced(model: Any, length: int) -> tuple[list[str], list[str]]:
    """`Reach.unreached`, with what a longer text reaches, and `Reach.bypassed` of one forward pass."""
    ids = torch.arange(1, length + 1)[None] % model.config.get_text_config().vocab_size
    called = set[int]()
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    hooks = [part.register_forward_pre_hook(lambda part, inputs: called.add(id(part))) for _, part in layers]
    try:
        reached = _leaves(model(input_ids=ids, use_cache=False).logits)
    finally:
        for hook in hooks:
            hook.remove()
    passed = reached | {id(weight) for weight in silent_weights(model)}
    unreached = [name for name, weight in model.named_parameters() if weight.requires_grad and id(weight) not in passed]
    bypassed = [name for name, part in layers if id(part) not in called and id(part.weight) in reached]
    tied = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    return unreached, [name for name in bypassed if id(model.get_submodule(name)) not in tied]


def _leaves(result: torch.Tensor) -> set[int]:
    """The ids of the weights that a result depends on."""
    seen, waiting, leaves = set[Any](), [result.grad_fn], set[int]()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (weight := getattr(node, "variable", None)) is not None:
            leaves.add(id(weight))
        waiting += [parent for parent, _ in node.next_functions]
    return leaves


def text_parts(base: Any) -> list[nn.Module]:
    """The modules that process text: all of a language model, or those of a multimodal one without its vision tower."""
    if base.config.get_text_config() is base.config:
        return [base]
    heads = base.get_output_embeddings(), scalar_head(base)
    return [part for part in (decoder_of(base), *heads) if part is not None]


def silent_weights(base: nn.Module) -> list[nn.Parameter]:
    """Weights outside the modules that process text, such as those of a vision tower; frozen under every method."""
    spoken = {id(weight) for part in text_parts(base) for weight in part.parameters()}
    return [weight for weight in base.parameters() if id(weight) not in spoken]


def refuse_unreached(config: TrainConfig, kind: str, unreached: Iterable[str]) -> None:
    """Raises ConfigError if all weights are to be trained and some cannot be, unless the config allows that.

    Args:
        config: the run's config.
        kind: `model_type`, for the message.
        unreached: names of the weights, from `Reach`.
    """
    names = list(unreached)
    if not names or config.method != "full" or config.ddp_find_unused_parameters:
        return
    verb = "weight gets" if len(names) == 1 else "weights get"
    raise ConfigError.about(
        OPTION,
        False,
        f": {len(names)} {verb} no gradient from any text in {kind} models ({first_names(names)})",
        f"use {OPTION}=true, which freezes them as they are, or method=lora, which trains adapters elsewhere",
    )


def freeze_unreached(base: Any, reach: Reach) -> None:
    """Freezes the weights that text does not reach, and notes on the model what it reaches, for `reach_noted`."""
    names = {*reach.unreached, *reach.fixed}
    unreached = [weight for name, weight in base.named_parameters() if name in names]
    for weight in [*silent_weights(base), *unreached]:
        weight.requires_grad_(False)
    base.reach = reach


def reach_noted(base: Any) -> Reach:
    """What `freeze_unreached` noted on a model; that every weight is reached if it was not called."""
    reach: Reach = getattr(base, "reach", Reach())
    return reach


def reach_lines(config: TrainConfig, reach: Reach) -> list[str]:
    """Log lines about the weights that are left as they are, and about the option if it has no effect."""
    if config.method != "full":
        return []
    if reach.unreached:
        return [f"frozen, as no text reaches them: {len(reach.unreached)} weights ({first_names(reach.unreached)})"]
    return [f"{OPTION} is ignored: text reaches every weight"] if config.ddp_find_unused_parameters else []
