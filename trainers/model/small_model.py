"""Small random-weight copies of a model, to check how its family handles attention, masks and documents.

A check takes a fraction of a second and needs no weights. Families name their sizes in many ways; a config that cannot
be shrunk is inconclusive.
"""

from __future__ import annotations

import copy
import logging
import traceback
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig

from trainers.config.mistakes import ConfigError
from trainers.model.attention import KERNELS, attention_function, eager
from trainers.model.mixers import split_mixers
from trainers.model.probe import (
    ForwardPass,
    ProbeError,
    compare,
    default_attention,
    our_pass,
    own_pass,
    probe_rows,
    refuse_encoder,
)  # fmt: skip
from trainers.model.randomness import drop_randomness, refuse_randomness
from trainers.objectives.loss_module import LossModule

_VOCAB_SIZE = 64
_COUNTED = "tunesmith_counted"
_LARGEST = 16_000_000
"""Maximum number of weights of a small copy, so that the check stays fast."""
_SIZES: dict[int, tuple[str, ...]] = {
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
        "num_decoder_layers", "num_encoder_layers", "num_key_value_heads", "num_experts_per_tok", "moe_topk",
        "num_experts_per_token", "moe_k", "top_k_experts", "linear_num_key_heads", "mamba_expand", "expand",
        "n_groups", "depth"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
        "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads", "num_experts",
        "num_local_experts", "n_routed_experts", "moe_num_experts", "rotary_dim", "sliding_window",
        "linear_num_value_heads", "linear_num_heads"),
    8: ("head_dim", "dim_head", "d_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "state_size",
        "ssm_state_size", "hidden_size_per_layer_input", "mamba_n_heads", "mamba_d_head", "mamba_num_heads",
        "mamba_head_dim", "mamba_headdim", "n_mamba_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_head_dim", "mamba_d_state"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "q_lora_rank",
         "kv_lora_rank", "mamba_chunk_size", "chunk_size", "qk_head_dim"),
    32: ("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim", "embedding_size",
         "embedding_dim", "projector_input_dim", "projector_output_dim", "vision_output_dim",
         "embed_dim", "out_hidden_size"),
    48: ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "n_inner", "dff", "decoder_ffn_dim",
         "encoder_ffn_dim", "dim_ff", "d_inner", "feed_forward_size", "ffn_hidden_size"),
    64: ("vocab_size", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
         "vocab_size_per_layer_input", "mamba_d_ssm"),
    28: ("image_size",),
    14: ("patch_size",),
    1: ("n_group", "num_expert_group", "topk_group", "first_k_dense_replace", "n_shared_experts"),
}  # fmt: skip
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "unk_token_id", "sep_token_id")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def small_config(model_config: Any) -> Any:
    """The config of a small model with at least two layers and one layer of each kind.

    Args:
        model_config: the transformers config of any model; not modified.

    Raises:
        Exception: of any kind, if the family constrains its sizes in ways that the small ones violate.
    """
    values = _small(copy.deepcopy(model_config))
    return type(model_config).from_dict({**copy.deepcopy(model_config).to_dict(), **values})


def _small(model_config: Any) -> dict[str, Any]:
    known = model_config.to_dict()
    aliases = getattr(type(model_config), "attribute_map", {})
    values: dict[str, Any] = {}
    for size, names in _SIZES.items():
        for name in names:
            current = known.get(name)
            if isinstance(current, int) and not isinstance(current, bool) and current > 0 and name not in aliases:
                values[name] = min(size, current)
    if "original_max_position_embeddings" in str(known.get("rope_parameters")):
        values.pop("max_position_embeddings", None)  # scaled RoPE has to stay longer than its original
    if known.get("num_key_value_heads") and known.get("num_key_value_heads") == known.get("num_attention_heads"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    if known.get("expand") and {"num_heads", "head_dim", "hidden_size"} <= values.keys():  # Mamba 2: inner size / heads
        values["head_dim"] = values["hidden_size"] * values["expand"] // values["num_heads"]
    if known.get("attention_hidden_size") and "hidden_size" in values:  # twice the width in Zamba's
        values["attention_hidden_size"] = known["attention_hidden_size"] * values["hidden_size"] // known["hidden_size"]
    if isinstance(known.get("initializer_range"), float):
        values["initializer_range"] = 0.2  # so that every part of a narrow model affects its output
    takes_sections = "mrope_section" in getattr(type(model_config), "ignore_keys_at_rope_validation", ())
    if takes_sections or "mrope_section" in (known.get("rope_parameters") or {}):
        values["rope_parameters"] = {**known["rope_parameters"], "mrope_section": _sections(known, values)}
    for name in _TOKENS:
        token = known.get(name)
        if isinstance(token, list) or (isinstance(token, int) and token >= _VOCAB_SIZE):
            values[name] = 0
    for name, part in vars(model_config).items():
        if isinstance(part, PreTrainedConfig):
            values[name] = {**part.to_dict(), **_small(part)}
    return values | _small_layers(known, values)


def _sections(known: dict[str, Any], values: dict[str, Any]) -> list[int]:
    """The frequencies for time, height and width of M-RoPE (Qwen-VL): half of what is rotated in a head.

    In another order in Ernie's, which wants the first two to be equal.
    """
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    half = int(head * known["rope_parameters"].get("partial_rotary_factor", 1.0)) // 2
    return [half // 3, half // 3, half - 2 * (half // 3)]


def _small_layers(known: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Reduces all per-layer lists of a config to the first layer of each kind, at least two layers."""
    count = next((known[name] for name in _LAYERS if name in values), 0)
    lists = {name: value for name, value in known.items() if isinstance(value, list) and len(value) == count > 2}
    chosen = {0, max(min(1, count - 1), 0)}
    # From here on, layers take the keys and values of an earlier one of their kind.
    borrowers = count - (known.get("num_kv_shared_layers") or 0)
    for value in lists.values():
        kinds = value if all(isinstance(kind, str) for kind in value) else []
        chosen |= {kinds.index(kind) for kind in kinds} | {kinds.index(kind, borrowers) for kind in kinds[borrowers:]}
        shared = [layer for layer, kind in enumerate(kinds) if kind == "hybrid"]
        chosen |= set(shared[:3])  # Zamba's hybrid layers share their weights
    small: dict[str, Any] = {name: [value[layer] for layer in sorted(chosen)] for name, value in lists.items()}
    if 0 < borrowers < count:
        small["num_kv_shared_layers"] = sum(layer >= borrowers for layer in chosen)
    if known.get("hybrid_layer_ids"):
        hybrid = known["hybrid_layer_ids"]
        small["hybrid_layer_ids"] = [index for index, layer in enumerate(sorted(chosen)) if layer in hybrid]
    if isinstance(known.get("per_layer_config"), dict):
        layers = {str(layer): index for index, layer in enumerate(sorted(chosen))}
        small["per_layer_config"] = {
            layers[str(layer)]: value for layer, value in known["per_layer_config"].items() if str(layer) in layers
        }
    if known.get("attention_types"):  # GPT-Neo: kinds and repetitions
        small["attention_types"] = [[known["attention_types"][0][0], 1]]
        chosen = set(range(len(known["attention_types"][0][0])))
    return small | {name: len(chosen) for name in _LAYERS if name in values}


def choose_attention(model_config: Any, packing: bool) -> str:
    """Chooses the attention to load a model with: ours, or the model's own if it supports no other.

    Tests a small copy, which must compute the same with our attention as the model itself does for each document. If no
    copy can be made, chooses ours, which the probe at the start of the run accepts or refuses.

    Args:
        model_config: the transformers config of the model.
        packing: whether rows contain several documents.

    Returns:
        The name of the attention implementation.

    Raises:
        ConfigError: if models of this kind cannot be trained this way; suggests packing=false if that helps.
    """
    ours = KERNELS["sdpa"]
    if (reference_pass := _reference(model_config, packing, False)) is None:
        return ours
    config, reference, expected = reference_pass
    problem = _problem(config, reference, ours, packing, expected[packing])
    if problem is None:
        return ours
    own = default_attention(reference)
    unpacked = [name for name in (ours, own) if _problem(config, reference, name, False, expected[False]) is None]
    if unpacked and not packing:
        return unpacked[0]
    if unpacked:
        raise ConfigError.about("packing", True, f": {problem}", "use packing=false")
    raise ConfigError(f"{problem}; use another model")


def row_sharding_problem(model_config: Any) -> str | None:
    """Why ranks cannot share the rows of models of this kind; None if no problem was found.

    As with packing, tokens may look back only through our attention, which alone sees the other parts of a row.

    Raises:
        ConfigError: if models of this kind fail on their own.
    """
    if (reference_pass := _reference(model_config, True)) is None:
        return None
    config, reference, expected = reference_pass
    return _problem(config, reference, KERNELS["sdpa"], True, expected[True], splits_rows=True)


def _reference(model_config: Any, *packings: bool) -> tuple[Any, Any, dict[bool, ForwardPass]] | None:
    """Builds a small model and runs its own forward pass.

    Args:
        model_config: the transformers config of the full model.
        packings: values of `packing` to run a pass for.

    Returns:
        Config, model and the pass for each value of `packing`; None if no small model can be made.

    Raises:
        ConfigError: if models of this kind fail on their own.
    """
    try:
        config = small_config(model_config)
        drop_randomness(config)
        _refuse_large(config)
        model = _build(config, None)
        outcomes = {packed: _own_pass(model, packed) for packed in packings}
        refuse_randomness(model)
        return config, model, outcomes
    except Exception as error:  # families raise errors of any kind
        logging.getLogger(__name__).debug("no small model of this kind", exc_info=True)
        if isinstance(error, ProbeError) and _fails_alike(model_config, error):
            raise ConfigError(f"{error}; use another model") from None
        if isinstance(error, ConfigError):
            raise
        return None


def _build(config: Any, attention: str | None) -> Any:
    """Builds a small model with random fp32 weights that depend only on the config; preserves torch's RNG state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {"dtype": torch.float32, "attn_implementation": attention}  # most configs say bf16
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **settings)
    return model.eval()


def _refuse_large(config: Any) -> None:
    """Raises ValueError for a copy that is too large, before allocating its weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    if sum(weight.numel() for weight in model.parameters()) > _LARGEST:
        raise ValueError("the copy is not small")


@torch.no_grad()
def _fails_alike(model_config: Any, failure: ProbeError) -> bool:
    """Whether the full-size model, run without memory, fails at the same line of code as its small copy."""
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it would log the failure at length
    try:
        with FakeTensorMode():  # the meta device would fail earlier, where a mask depends on values
            model = AutoModelForCausalLM.from_config(copy.deepcopy(model_config)).eval()
            model(probe_rows(_VOCAB_SIZE, torch.device("cpu")), use_cache=False)
    except Exception as error:
        return _failing_line(error) == _failing_line(failure.__context__)
    return False


def _failing_line(error: BaseException | None) -> tuple[str, int] | None:
    """File and line at which a model's own code failed; functions that it called may differ for fake tensors."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    frames = [frame for frame in frames if "/transformers/models/" in frame.filename] or frames
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else None


@torch.no_grad()
def _own_pass(model: Any, packing: bool) -> ForwardPass:
    return own_pass(LossModule(model).eval(), model, packing, torch.device("cpu"))


@torch.no_grad()
def _problem(
    config: Any, reference: Any, attention: str, packing: bool, expected: ForwardPass, splits_rows: bool = False
) -> str | None:
    """Why a small model cannot be trained with an attention implementation; None if it can.

    Args:
        config: the config of the small model.
        reference: the small model with its own attention, whose weights are copied.
        attention: name of the implementation.
        packing: whether rows contain several documents.
        expected: the own forward pass of `reference`.
        splits_rows: whether ranks share each row.
    """
    kind, ours = config.model_type, attention in KERNELS.values()
    calls, attend = list[int](), attention_function(eager)

    def counted(*tensors: Any, **options: Any) -> Any:
        calls.append(1)
        return attend(*tensors, **options)

    AttentionInterface.register(_COUNTED, counted)
    try:
        refuse_encoder(kind, expected, torch.float32)
        try:
            model = _build(config, _COUNTED if ours else attention)
            model.load_state_dict(reference.state_dict())
        except Exception:
            return f"{kind} models support only their own attention, which cannot keep packed documents apart"
        split_mixers(model)
        loss = LossModule(model).eval()
        if splits_rows and loss.mixers:
            return f"{kind} models have layers that mix the tokens of a row without attention"
        outcome = our_pass(loss, model, packing, torch.device("cpu"))
        if ours and not calls and not loss.mixers:
            return f"{kind} models have attention or layers of their own, which cannot keep packed documents apart"
        compare(outcome, expected, kind, packing, torch.float32)
    except ProbeError as error:
        return str(error)
    return None
