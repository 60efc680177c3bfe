"""What can go wrong before any process is launched: model, data, arithmetic, precision, trackers.

It tokenises the data too, so that the ranks find it in the cache. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from trainers.config import EMBEDDED, ConfigError, TrainConfig
from trainers.data.batches import Rows, TrainPlan
from trainers.data.layout import WHOLE, RowPart
from trainers.data.prepare import TokenSet, prepare
from trainers.embedded import BASE_DIR
from trainers.gpus import LEAST_CAPABILITY, capability
from trainers.parallel.mesh import MeshSizes, heads_mistake
from trainers.parallel.tensor_rules import refusals


def check(config: TrainConfig, sizes: MeshSizes, has_gpu: bool) -> list[str]:
    """The lines that tell what would be trained.

    Args:
        config: the validated config.
        sizes: of the mesh.
        has_gpu: whether the run will be on GPUs.

    Raises:
        ConfigError: with every mistake that can be found without loading weights.
    """
    mistakes = machine_mistakes(config, has_gpu) + _arithmetic(config, sizes.data) + check_model(config)
    mistakes = mistakes or _cut_mistakes(config, sizes)  # which reads the model's config
    if mistakes:
        raise ConfigError(mistakes)
    train = prepare(config, "train")
    _check_positions(config, train.report.longest)
    plan = plan_training(config, train, sizes.data, pad_token_id=0)
    lines = [*train.report.lines(), describe_plan(plan)]
    if config.has_evaluation():
        lines += prepare(config, "eval").report.lines()
    return lines


def plan_training(
    config: TrainConfig, train: TokenSet, data_parallel_size: int, pad_token_id: int, part: RowPart = WHOLE
) -> TrainPlan:
    """The batches of a run.

    Args:
        part: of each row, that this rank has.

    Raises:
        ConfigError: when the global batch does not divide, or is larger than the data.
    """
    return TrainPlan(make_rows(config, train, pad_token_id, part), config, data_parallel_size)


def make_rows(config: TrainConfig, documents: TokenSet, pad_token_id: int, part: RowPart = WHOLE) -> Rows:
    """Rows of the data as the config wants them: packed or one document each."""
    fixed = config.torch_compile and config.packing  # one shape, one compiled graph
    return Rows(documents, config.max_length, config.packing, pad_token_id, fixed, part)


def describe_plan(plan: TrainPlan) -> str:
    """One line: rows, steps, accumulation, tokens per step."""
    rows, config = plan.rows, plan.config
    kind = f"packed rows of {config.max_length}" if config.packing else "rows"
    tokens = int(rows.lengths.sum())
    fill = f" ({tokens / (len(rows) * config.max_length):.1%} full)" if config.packing else ""
    return (
        f"{len(rows)} {kind}{fill}; {plan.total_steps} steps of {config.global_batch_size} rows = {plan.accumulation} "
        f"micro-batches x {config.per_device_train_batch_size} rows x {plan.world} ranks; "
        f"about {tokens * config.global_batch_size // len(rows)} tokens per step"
    )


def machine_mistakes(config: TrainConfig, has_gpu: bool) -> list[str]:
    """What this machine cannot do: precisions and hooks that need a GPU, packages that are not installed."""
    needs_gpu = {
        "mixed_precision=fp16 needs a GPU and there is none; use bf16 or no": config.mixed_precision == "fp16",
        f"ddp_comm_hook={config.ddp_comm_hook} needs GPUs with NCCL and there are none; use fp16 or none": (
            config.ddp_comm_hook in ("bf16", "power_sgd")  # under gloo, PowerSGD aborts the process
        ),
        "tf32=true needs a GPU and there is none; leave it out": config.tf32,
        "activation_offloading=true needs a GPU, whose memory it spares, and there is none; leave it out": (
            config.activation_offloading
        ),
    }
    mistakes = [line for line, asked in needs_gpu.items() if asked and not has_gpu]
    if config.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        mistakes.append(
            'method=qlora needs bitsandbytes, which is not installed; `pip install "tunesmith[quant]"`, '
            "or use method=lora"
        )
    if config.mixed_precision == "fp8":
        mistakes += _float8_mistakes()
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    return mistakes + [f"report_to={name} is not installed; `pip install {name}`, or leave it out" for name in missing]


def _float8_mistakes() -> list[str]:
    least, here = ".".join(map(str, LEAST_CAPABILITY)), ".".join(map(str, capability()))
    mistakes = {
        f"mixed_precision=fp8 needs GPUs of compute capability {least}, here it is {here}; use bf16": (
            capability() < LEAST_CAPABILITY
        ),
        'mixed_precision=fp8 needs torchao, which is not installed; `pip install "tunesmith[fp8]"`, or use bf16': (
            importlib.util.find_spec("torchao") is None
        ),
    }
    return [line for line, applies in mistakes.items() if applies]


def _arithmetic(config: TrainConfig, data_parallel_size: int) -> list[str]:
    try:
        config.accumulation_steps(data_parallel_size)
    except ConfigError as error:
        return error.mistakes
    return []


def check_model(config: TrainConfig) -> list[str]:
    """Mistakes in the base model's name, folder or files, without loading it."""
    name = config.model_name_or_path
    folder = BASE_DIR if name == EMBEDDED else Path(name).expanduser()
    if folder.is_dir():
        files, named = {path.name for path in folder.iterdir()}, f"model_name_or_path={name}"
        problem = _check_config_file(folder / "config.json", named) or _check_files(files, named, config)
        weights = [] if config.random_init else sorted(folder.glob("*.safetensors"))
        return problem or [line for path in weights for line in _check_header(path, named)]
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return [f"model_name_or_path={name} is no model folder; name a folder with config.json, or a Hub id"]
    return _check_hub(config)


def _check_config_file(path: Path, named: str) -> list[str]:
    try:
        if not isinstance(json.loads(path.read_text(encoding="utf-8")), dict):
            return [f"{named}: config.json holds no object; download or save the model again"]
    except FileNotFoundError:
        return [f"{named} has no config.json; name the folder that save_pretrained wrote"]
    except (OSError, ValueError) as error:
        return [f"{named}: config.json cannot be read: {error}; download or save the model again"]
    return []


def _check_files(files: set[str], named: str, config: TrainConfig) -> list[str]:
    mistakes = []
    if not config.random_init and not any(file.endswith(".safetensors") for file in files):
        pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth")))
        what = f"only {', '.join(pickles)}, which would run code when read" if pickles else "no weights"
        mistakes.append(f"{named} has {what}; it needs *.safetensors (`save_pretrained` of transformers writes them)")
    if any(file.startswith("modeling_") for file in files) and not config.trust_remote_code:
        mistakes.append(
            f"{named} brings its own code; read it, then pass --trust_remote_code true, or use another model"
        )
    return mistakes


def _check_header(path: Path, named: str) -> list[str]:
    """Mistakes in a safetensors file, from its header alone: a length, then JSON, then the tensors' bytes."""
    damaged = [f"{named}: {path.name} is damaged or cut short; download or save the model again"]
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size - 8:
                return damaged
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        whole = all(0 <= start <= end for start, end in ends)
        return [] if whole and max(end for _, end in ends) + 8 + length == path.stat().st_size else damaged
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return damaged


def _cut_mistakes(config: TrainConfig, sizes: MeshSizes) -> list[str]:
    """Why heads or matrices of the model cannot be shared out over the mesh, a line each."""
    if sizes.tp * sizes.sp == 1:
        return []
    from transformers import AutoConfig

    where = {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}
    name = str(BASE_DIR) if config.model_name_or_path == EMBEDDED else config.model_name_or_path
    shape = AutoConfig.from_pretrained(name, **where).get_text_config()
    heads = heads_mistake(sizes, int(shape.num_attention_heads), shape.model_type)
    return refusals(shape, sizes.tp) + ([heads] if heads else [])


def _check_positions(config: TrainConfig, longest: int) -> None:
    """Refuses documents longer than the model was made for, where its config is at hand.

    Raises:
        ConfigError: with the model's limit.
    """
    folder = BASE_DIR if config.model_name_or_path == EMBEDDED else Path(config.model_name_or_path).expanduser()
    if not (folder / "config.json").is_file():
        return
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    limit = shape.get("max_position_embeddings") or shape.get("n_positions")
    kept = min(longest, config.max_length)
    if isinstance(limit, int) and kept > limit:
        raise ConfigError(
            f"max_length={config.max_length}: the longest document has {kept} tokens, the model was made for {limit}; "
            f"use max_length={limit}"
        )


def _check_hub(config: TrainConfig) -> list[str]:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    name, revision = config.model_name_or_path, config.model_revision
    named = f"model_name_or_path={name}" + (f" at revision {revision}" if revision else "")
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return []  # downloaded before; works offline
        siblings = HfApi().model_info(name, revision=revision, timeout=20).siblings or []
        return _check_files({file.rfilename for file in siblings}, named, config)
    except HFValidationError:
        return [f"{named} is neither a folder nor a Hub id (owner/name); check the spelling"]
    except GatedRepoError:
        return [f"{named} is gated; accept its terms on its Hub page, then set HF_TOKEN or run `hf auth login`"]
    except RepositoryNotFoundError:
        return [f"{named} is not on the Hub, or is private; check the spelling, or set HF_TOKEN"]
    except Exception as error:  # no network shows itself in the exceptions of several libraries
        first = str(error).partition("\n")[0][:200]
        return [f"{named} is no folder here and the Hub cannot be reached ({first}); name a local folder, or go online"]
