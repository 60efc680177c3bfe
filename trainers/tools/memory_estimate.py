"""Estimates the memory of a model with torch's fake tensors, without loading or allocating weights.

    python -m trainers.tools.memory_estimate --config FILE --cases 1:1:1:1:8 2:1:1:1:8 --here

A case is `tp:cp:sp:stages:rows`, where rows is the micro-batch size; `--basis TP` adds those from which the cases
of every mesh follow (`trainers/tools/mesh_limits.py`), and the sizes that the model allows. `--here` means that this
machine is to train the model. The model config comes with the presets, or else from the model's folder or the Hub.
The last line on stdout is a JSON object: the estimate, or `mistakes` with exit status 2 if the request is invalid.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface

from trainers.config.mistakes import ConfigError, Mistakes, errors_about
from trainers.config.options import TrainConfig
from trainers.config.presets import published_config
from trainers.config.teacher import frozen_config, teacher_config
from trainers.config.validation import build
from trainers.config.yaml_file import read_yaml
from trainers.data.layout import TopTokens
from trainers.model.attention import KERNELS
from trainers.model.experts import chosen_count, expert_share
from trainers.model.freezing import freeze
from trainers.model.load import base_dtype, compute_dtype, load_model_config, use_checkpointing
from trainers.model.lora import add_adapters
from trainers.model.qat import prepare
from trainers.model.reachability import as_fakes, silent_weights
from trainers.model.scalar_head import model_family
from trainers.model.sizes import matmul_parameters, used_matmul_parameters
from trainers.model.vocabulary import grown_size, note_tokens
from trainers.objectives.distillation import Divergence
from trainers.objectives.load_balancing import LoadBalancing
from trainers.objectives.loss_module import LossModule
from trainers.objectives.output_head import decoder_of
from trainers.objectives.teacher import Teacher
from trainers.parallel.experts import expert_stacks
from trainers.parallel.muon import held_elements, is_hidden_matrix
from trainers.parallel.pipeline_split import refuse_unsplittable_family
from trainers.parallel.sequence import refuse_unsplittable_rows
from trainers.run.gpus import gpu_count
from trainers.strategy.expert_plan import expert_refusals
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.pipeline_schedules import balance
from trainers.strategy.tensor_plan import refusals
from trainers.strategy.traffic import PERSISTENT_BELOW, by_layer, head_size, key_heads
from trainers.tools.mesh_limits import basis_cases, mesh_limits
from trainers.tools.peak_memory import PeakMemoryMode, Peaks
from trainers.tools.preflight import check_model, machine_mistakes
from trainers.tools.token_shares import divide_tokens

_KERNEL = "tunesmith_weighed"
_FEW = 2
"""Fewest layers of a small model."""
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""Names under which families keep the number of layers before the first one with experts."""
_MEMORY = ("fixed", "layer", "later", "heap_fixed", "heap_layer")
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_TIMED = 0.3
"""Seconds for which to time matrix products."""
_TOP_K = 64
"""Tokens that `tunesmith record` keeps of each label by default."""
_NIBBLE, _SCALES = 0.5, 0.127 / 8
"""Bytes of a 4-bit weight, and of its share of the unsharded scales (see `trainers/model/quantization.py`)."""


class _Attention(torch.autograd.Function):
    """Stands in for a fused attention kernel: saves inputs, output and the log-sum-exp per query for the backward pass.

    Key heads are not repeated, as in the GPU kernels; sdpa on a CPU would repeat them.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)[..., : value.shape[-1]]
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> tuple[Any, None]:
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (states.to(torch.get_autocast_dtype("cpu")) for states in (query, key, value))
    return _Attention.apply(query, key, value).transpose(1, 2).contiguous(), None


def _of_each_kind(text: Any) -> int:
    """Number of the first layers that have a layer of every kind among them."""
    kinds = list(getattr(text, "layer_types", None) or [])
    firsts = [kinds.index(kind) + 1 for kind in set(kinds)]
    return max(_FEW, *firsts, *((getattr(text, name, None) or 0) + 1 for name in _DENSE_FIRST))


def _few(text: Any) -> list[int]:
    """Numbers of layers of two small models; the difference in memory gives the cost of a layer."""
    step = _of_each_kind(text)
    smaller = 2 * step if getattr(text, "num_kv_shared_layers", None) else step
    return [min(count, text.num_hidden_layers) for count in (smaller, smaller + step)]


def empty_model(config: TrainConfig, model_config: Any, tp: int = 1, layers: int | None = None) -> nn.Module:
    """Builds the model of `build_model` on the meta device, without quantization.

    Args:
        config: The training config.
        model_config: Transformers config of the base model.
        tp: Ranks that share each matrix; the result has the sizes of one rank.
        layers: Number of layers; None for all.
    """
    model_config = copy.deepcopy(model_config)
    text = model_config.get_text_config()
    if tp > 1:
        names = ["num_attention_heads", "intermediate_size", "vocab_size"]
        if len(by_layer(text, "num_key_value_heads")) == 1:  # they differ in Gemma 4
            # Fix the head size first: with fewer heads, it would otherwise be derived from the hidden size.
            text.head_dim = head_size(text)
            names.append("num_key_value_heads")
        for name in names:
            if getattr(text, name, None):
                setattr(text, name, -(-getattr(text, name) // tp))
        text.pad_token_id = None  # may be out of range in the smaller vocabulary
    if layers is not None:
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        if getattr(text, "num_kv_shared_layers", None):  # those after the first of each kind, whose keys they use
            text.num_kv_shared_layers = max(0, layers - _of_each_kind(text))
    AttentionInterface.register(_KERNEL, _attention)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    plain = config.attn_implementation == "eager" or (capped and config.attn_implementation == "auto")
    kernel = KERNELS["eager"] if plain else _KERNEL
    with torch.device("meta"):
        base = model_family(config).from_config(
            model_config,
            dtype=base_dtype(config),
            attn_implementation=kernel,
            trust_remote_code=config.trust_remote_code,
        )
        # Ids need the tokenizer, which may not be there yet: the last rows stand in for them.
        note_tokens(base, range(text.vocab_size - len(config.new_tokens), text.vocab_size))
        for weight in silent_weights(base):
            weight.requires_grad_(False)
        use_checkpointing(base, config)
        if config.method != "full":
            return add_adapters(base, config, complete=layers is None)
        if layers is None:  # in a small model, it would be other layers
            freeze(config, base)
        if config.qat != "none" and importlib.util.find_spec("torchao"):  # without it, it is refused at the start
            prepare(config, base)
        return base


def decoder_layers(base: Any) -> nn.ModuleList | None:
    """The layers of a model's decoder; None if they have another name."""
    return getattr(decoder_of(base), "layers", None)


def _small_teacher(config: TrainConfig, teacher: Any, tp: int) -> Teacher:
    """A teacher of few layers: each frees its activations, so the number of layers does not matter.

    Args:
        config: The training config.
        teacher: Transformers config of the teacher.
        tp: Ranks that share each matrix.
    """
    model = empty_model(teacher_config(config), teacher, tp, _few(teacher.get_text_config())[0])
    return Teacher(model, compute_dtype(config), Divergence.of(config.objective_options()))


def _top_tokens(labels: int, loss: LossModule) -> TopTokens:
    """Recorded predictions for some labels; a recording keeps about so many of each."""
    top_k = min(_TOP_K, loss.vocab_size - 1)
    return TopTokens(torch.zeros(labels, top_k, dtype=torch.int64), torch.zeros(labels, top_k + 1), loss.vocab_size)


def count_peaks(
    config: TrainConfig, model: nn.Module, rows: int, length: int, teacher: Any = None, tp: int = 1
) -> Peaks:
    """Returns the peak bytes of a micro-batch, forward and backward, in addition to weights and gradients.

    Args:
        config: The training config.
        model: Result of `empty_model`.
        rows: Rows of the micro-batch.
        length: Tokens per row.
        teacher: Transformers config of the model that it learns from, if any.
        tp: Ranks that share each matrix, of which `model` has the sizes of one.
    """
    beside = _small_teacher(config, teacher, tp) if teacher is not None and config.objective_spec.teacher else None
    if tp > 1:
        divide_tokens(LossModule(model, compute_dtype(config)), tp)
    with FakeTensorMode():
        as_fakes(model)
        loss = LossModule(model, compute_dtype(config))
        taught: bool | TopTokens = beside is not None
        if beside is not None:
            as_fakes(beside)
            loss.teacher = beside
        elif config.objective_spec.teacher and config.teacher_log_probs is not None:
            taught, loss.divergence = _top_tokens(rows * length, loss), Divergence.of(config.objective_options())
        for weight in loss.parameters():
            weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
        known = [tensor for weight in loss.parameters() for tensor in (weight, weight.grad) if tensor is not None]
        ids = torch.zeros(rows, length, dtype=torch.int64)
        live = PeakMemoryMode([*known, *loss.buffers(), ids])
        if layers := decoder_layers(loss.base):
            live.watch(layers[-1])
        loss.train()
        with live:
            every = ids.new_zeros(ids.numel())
            loss(ids, torch.zeros_like(ids), None, every, every, taught=taught)[0].backward()
    return live.peaks


def weights(config: TrainConfig, model: Any) -> dict[str, float]:
    """Counts weights.

    Returns:
        Numbers of weights: `parameters` (all), `parameters_outside` (the layers), `vectors` (in 1-d weights),
        `trained_inside` and `trained_outside`; `experts` that expert parallelism can divide, and `experts_trained`,
        parts of those; `persistent`, in the `persistent_weights` that ZeRO 3 always keeps gathered;
        `hidden_matrix_weights`, in the `hidden_matrices` that Muon updates, which holds `orthogonalized` elements to
        update the largest of them. Bytes,
        `experts_frozen` likewise: `frozen_inside` and `frozen_outside`, and `scales` of 4-bit weights, which no
        strategy shards.
    """
    names = ("parameters", "parameters_outside", "vectors", "trained_inside", "trained_outside", "frozen_inside",
             "frozen_outside", "scales", "experts", "experts_trained", "experts_frozen", "persistent",
             "persistent_weights", "hidden_matrices", "hidden_matrix_weights", "orthogonalized")  # fmt: skip
    sizes = dict.fromkeys(names, 0.0)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    stacks = {id(decoder_of(base).get_parameter(name)) for name in expert_stacks(base)}
    quantised = {id(weight) for weight in _quantised(model)} if config.method == "qlora" else set()
    for name, weight in model.named_parameters():
        where = "inside" if ".layers." in name or ".h." in name else "outside"
        size = _NIBBLE if id(weight) in quantised else weight.element_size()
        sizes["parameters"] += weight.numel()
        sizes["parameters_outside"] += weight.numel() if where == "outside" else 0
        sizes["vectors"] += weight.numel() if weight.ndim == 1 else 0
        sizes[f"trained_{where}"] += weight.numel() if weight.requires_grad else 0
        sizes[f"frozen_{where}"] += 0 if weight.requires_grad else weight.numel() * size
        if weight.numel() <= PERSISTENT_BELOW:
            sizes["persistent"] += weight.numel()
            sizes["persistent_weights"] += 1
        if id(weight) in stacks:
            sizes["experts"] += weight.numel()
            sizes["experts_trained"] += weight.numel() if weight.requires_grad else 0
            sizes["experts_frozen"] += 0 if weight.requires_grad else weight.numel() * size
        if weight.requires_grad and is_hidden_matrix(name, weight.shape):
            sizes["hidden_matrices"] += 1
            sizes["hidden_matrix_weights"] += weight.numel()
            sizes["orthogonalized"] = max(sizes["orthogonalized"], held_elements(weight.shape))
        sizes["scales"] += weight.numel() * _SCALES if id(weight) in quantised else 0
    return sizes


def _quantised(model: Any) -> list[torch.Tensor]:
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    linear = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    return [part.weight for part in linear if not part.weight.requires_grad]


def refused(model_config: Any, sizes: MeshSizes, stages: int, teacher: Any = None) -> str | None:
    """Returns why a model, or its teacher, cannot be split in this way; None if it can."""
    text = model_config.get_text_config()
    if lines := refusals(text, sizes.tp) + expert_refusals(text, sizes.ep):
        return "; ".join(lines)
    try:
        refuse_unsplittable_rows(text, sizes)
        if stages > 1:
            refuse_unsplittable_family(text.model_type)
            balance(text.num_hidden_layers, stages, 1.0, 0.0)
    except ValueError as error:  # as ConfigError is
        return str(error).replace("\n", "; ")
    reason = None if teacher is None else refused(teacher, replace(sizes, ep=1), 1)  # of which no pipeline has one
    return reason and f"teacher: {reason}"


def case(
    config: TrainConfig, model_config: Any, name: str, counted: dict[int, dict[str, float]] | None = None,
    teacher: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Estimates one case for one rank.

    Args:
        config: The training config.
        model_config: Transformers config of the model.
        name: The case, in the format described above.
        counted: Counts of `weights` by tp, to which those of this case are added.
        teacher: Transformers config of the model that it learns from, if any.

    Returns:
        The counts of `weights`, and bytes of a micro-batch: `fixed` and per `layer` while the activations of all layers
        are held, `later` once they are not; `heap_fixed` and `heap_layer` are those of tensors smaller than `MAPPED`.
        All are None if they cannot be determined, with `why`. Or just `refused`, why the model cannot be split so.
    """
    tp, cp, sp, stages, rows = map(int, name.split(":"))
    if why := refused(model_config, MeshSizes(cp=cp, sp=sp, tp=tp), stages, teacher):
        return {"refused": why}
    length = -(-config.example_tokens // (cp * sp))
    counted = {} if counted is None else counted
    if tp not in counted:
        counted[tp] = weights(config, empty_model(config, model_config, tp))
    facts: dict[str, Any] = dict(counted[tp])
    # While all activations are held, memory is linear in the number of layers: measure two small models, and split it
    # into a fixed part and a slope. What is needed later does not grow with them, but may be more in so small a model.
    few = _few(model_config.get_text_config())
    try:
        small = [
            count_peaks(config, empty_model(config, model_config, tp, count), rows, length, teacher, tp)
            for count in few
        ]
    except (RuntimeError, ValueError) as error:
        # Some mixture-of-experts operators have no fake implementation; attention rejects unknown variants.
        return {**facts, **dict.fromkeys(_MEMORY), "why": str(error).partition("\n")[0][:200]}
    fixed, layer = _line(few, [peaks.full for peaks in small])
    heap_fixed, heap_layer = _line(few, [peaks.heap for peaks in small])
    return {**facts, **dict(zip(_MEMORY, (fixed, layer, small[0].later, heap_fixed, heap_layer), strict=True))}


def _line(layers: list[int], sizes: list[int]) -> tuple[float, float]:
    """The fixed part of two sizes, and the part of each layer."""
    slope = (sizes[1] - sizes[0]) / (layers[1] - layers[0]) if layers[1] > layers[0] else sizes[0] / layers[0]
    return sizes[0] - slope * layers[0], slope


def speed(hidden: int, config: TrainConfig) -> float:
    """Measures FLOP/s of matrix products of the model's width on this device, with as many threads as a rank has."""
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", compute_dtype(config)
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    rows, matrix = (torch.ones(size, hidden, dtype=dtype, device=device) for size in (2048, hidden))
    done, began = 0, 0.0
    while not began or time.perf_counter() - began < _TIMED:
        rows @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        done, began = (done + 1, began) if began else (0, time.perf_counter())  # the first one is warm-up
    return done * 2 * 2048 * hidden * hidden / (time.perf_counter() - began)


def teacher_sizes(config: TrainConfig, teacher: Any) -> dict[str, float]:
    """The sizes of a teacher, or of a copy of the initial model: all of it is frozen and in the compute dtype.

    Args:
        config: `frozen_config` of the training config.
        teacher: Its transformers config.

    Returns:
        Numbers of `parameters`, of `layers`, and of parameters in matrix products (`matmul`); bytes `inside` the layers
        and `outside` them.
    """
    model: Any = empty_model(config, teacher).requires_grad_(False)
    sizes = weights(config, model)
    return {
        "parameters": sizes["parameters"], "layers": teacher.get_text_config().num_hidden_layers,
        "matmul": sum(used_matmul_parameters(model)),
        "inside": sizes["frozen_inside"], "outside": sizes["frozen_outside"],
    }  # fmt: skip


def _divides_tokens(config: TrainConfig, model_config: Any) -> bool:
    """Whether tensor parallelism, over any number of ranks, divides the tokens between the blocks of a model."""
    few = empty_model(config, model_config, layers=_few(model_config.get_text_config())[0])
    return divide_tokens(LossModule(few, compute_dtype(config)), 1)


def estimate_memory(
    config: TrainConfig, model_config: Any, cases: list[str], time_here: bool, teacher: Any = None
) -> dict[str, Any]:
    """Returns everything that `tunesmith plan` needs to know about a model.

    Args:
        config: The training config.
        model_config: Transformers config of the model.
        cases: Cases in the format described above.
        time_here: Whether to time matrix products on this machine.
        teacher: Transformers config of the model that it learns from, if any.

    Raises:
        ConfigError: If it is not a causal language model with attention layers.
    """
    resting = psutil.Process().memory_info().rss
    text = model_config.get_text_config()
    cannot = f"model_name_or_path={config.model_name_or_path}: {model_config.model_type} models cannot be planned"
    if missing := [name for name in _NEEDED if getattr(text, name, None) is None]:
        raise ConfigError(f"{cannot}: they have no {', '.join(missing)}; use one with attention, or `tunesmith bench`")
    try:
        model: Any = empty_model(config, model_config)
    except (ValueError, KeyError) as error:  # it is no causal model, or does not support custom attention functions
        why = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise ConfigError(f"{cannot} ({why}); use another model, or `tunesmith bench`") from None
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    share = expert_share(text)
    trained, frozen = used_matmul_parameters(base)
    layers = decoder_layers(base)
    by_tp = {1: weights(config, model)}
    matrices = sum(
        weight.numel()
        for module in decoder_of(base).modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
        if weight.ndim > 1
    )
    heads = text.num_attention_heads
    return {
        "layers": text.num_hidden_layers, "hidden": text.hidden_size, "heads": heads, "words": text.vocab_size,
        "key_heads": key_heads(text),
        "head_size": head_size(text),
        "expert_layers": len({name.rpartition(".")[0] for name in expert_stacks(base)}), "chosen": chosen_count(text),
        "tied": bool(text.tie_word_embeddings), "matmul_trained": trained, "matmul_frozen": frozen,
        # False if matrices are not linear layers (GPT-2).
        "all_linear": sum(matmul_parameters(model)) > 0.9 * matrices,
        "layer_matmul": sum(sum(matmul_parameters(layer, share)) for layer in layers) / len(layers) if layers else 0,
        "flops_per_second": speed(text.hidden_size, config) if time_here and config.mixed_precision != "fp8" else None,
        "divides_tokens": _divides_tokens(config, model_config),
        "load_balancing": LoadBalancing.of(text) is not None, "process_bytes": resting, "whole": by_tp[1],
        "stored_dtype": str(getattr(model_config, "dtype", None) or torch.float32).removeprefix("torch."),
        "teacher": None if teacher is None else teacher_sizes(frozen_config(config) or config, teacher),
        "cases": {name: case(config, model_config, name, by_tp, teacher) for name in cases},
    }  # fmt: skip


def read_config(config: TrainConfig) -> Any:
    """The transformers config of a model, whose weights need not be there.

    Raises:
        ConfigError: If it cannot be read.
    """
    published = published_config(config.model_name_or_path) if config.model_revision is None else None
    if published is None and (mistakes := check_model(config.model_copy(update={"random_init": True}))):
        raise ConfigError(mistakes)
    model_config = load_model_config(config, published)
    text = model_config.get_text_config()
    if config.new_tokens or config.pad_vocab_to_multiple_of:
        size = int(text.vocab_size) + len(config.new_tokens)  # at most: a base may have rows to spare
        text.vocab_size = grown_size(size, (), config.pad_vocab_to_multiple_of)
    return model_config


def _read_teacher(config: TrainConfig) -> Any:
    """The transformers config of the frozen model beside the one that is trained; None without one."""
    frozen = frozen_config(config)
    if frozen is None:
        return None
    if not config.objective_spec.teacher:
        return read_config(frozen)
    with errors_about("model_name_or_path", "teacher"):
        return read_config(frozen)


def main(argv: list[str]) -> int:
    """Prints the estimate as JSON; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--basis", type=int, metavar="TP")
    parser.add_argument("--here", action="store_true")
    args = parser.parse_args(argv)
    config = build(read_yaml(args.config))
    try:
        mistakes = Mistakes(machine_mistakes(config, gpu_count() > 0) if args.here else [])
        model_config, teacher, cases, limits = None, None, args.cases, {}
        with mistakes:
            model_config = read_config(config)
        with mistakes:
            teacher = _read_teacher(config)
        mistakes.refuse()
        if args.basis:
            limits = mesh_limits(model_config, partial(refused, teacher=teacher))
            cases = list(dict.fromkeys([*cases, *basis_cases(limits, config, args.basis)]))
        estimate = estimate_memory(config, model_config, cases, args.here, teacher)
        print(json.dumps(estimate | {"limits": limits}), flush=True)
    except ConfigError as error:
        print(json.dumps({"mistakes": error.as_json()}), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
