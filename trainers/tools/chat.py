"""The chat's program: a base model and what a run made of it, loaded once, that answer conversations token by token.

Run by `app/services/chat.py` through `app/services/rpc_client.py`.
Safetensors only; no pickle is read and no model code runs unless told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import GenerationConfig, StoppingCriteria, TextIteratorStreamer

from trainers.checkpoint.checkpoint import base_digest, load_weights
from trainers.config.options import ConfigError, TrainConfig
from trainers.config.parse import Request
from trainers.data.formats import RowError
from trainers.data.template import Encoder
from trainers.data.tokenizer import load_tokenizer
from trainers.model.attention import avoid_cudnn
from trainers.model.load import add_adapters, compute_dtype, load_base
from trainers.run.folder import RunFolder
from trainers.run.manifest import verify
from trainers.tools.rpc_server import serve

_ADAPTER = "adapter_model.safetensors"


class Models:
    """A base and maybe a tuned model on one device; they share the base's weights where the tuned one is an adapter.

    Args:
        config: of the run, or of the base model alone.
        base: the base model; None where `tuned` is an adapter on it.
        tuned: what a run made of it; None for the base alone.
    """

    def __init__(self, config: TrainConfig, base: Any | None, tuned: Any | None):
        avoid_cudnn()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(config)
        self.encoder = Encoder.of(self.tokenizer, assistant_only=False, today=date.today().isoformat())
        self.base, self.tuned = base, tuned
        self.ends: set[int] = set()
        for model in (base, tuned):
            if model is not None:
                self._ready(model)
        text = (base if base is not None else tuned).config.get_text_config()  # type: ignore[union-attr]
        self.context: int | None = getattr(text, "max_position_embeddings", None)

    def _ready(self, model: Any) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Only transformers' own kernels know a cache of keys and values; its fused one knows no softcap.
        capped = getattr(inner.config.get_text_config(), "attn_logit_softcapping", None) is not None
        inner.set_attn_implementation("eager" if capped else "sdpa")
        inner.config.use_cache = True
        ends = inner.generation_config.eos_token_id if inner.generation_config is not None else None
        self.ends |= {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
        # What else the files say (beams, penalties) is not what was asked for.
        inner.generation_config = GenerationConfig(
            eos_token_id=sorted(self.ends), pad_token_id=self.tokenizer.pad_token_id
        )
        model.eval()
        model.to(self.device)

    def sides(self) -> list[str]:
        """What can be asked: `base`, `tuned` or both."""
        return ["base", "tuned"] if self.tuned is not None else ["base"]

    def side(self, name: str) -> tuple[Any, AbstractContextManager[Any]]:
        """The model of a side, and what must be entered while it answers."""
        if name == "base" and self.base is None:
            assert self.tuned is not None
            return self.tuned, self.tuned.disable_adapter()
        return (self.base if name == "base" else self.tuned), nullcontext()

    def prompt(self, messages: list[dict[str, str]], plain: bool) -> list[int]:
        """Tokens of a conversation that waits for an answer.

        Args:
            messages: with `role` and `content`.
            plain: join the messages as plain text; so it is too where the tokenizer has no chat template.

        Raises:
            ConfigError: when the chat template refuses them or does not end, or they do not fit the context.
        """
        if plain or self.encoder.options.chat_template is None:
            text = "\n".join(message["content"] for message in messages)
            ids = [*self.encoder.options.prefix, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]
        else:
            ids = self.tokenizer(self._rendered(messages), add_special_tokens=False)["input_ids"]
        if self.context is not None and len(ids) >= self.context:
            raise ConfigError(
                f"the conversation has {len(ids):,} tokens and the model's context holds {self.context:,}; "
                "clear it, or write less"
            )
        if not ids:
            raise ConfigError("there is nothing to answer; write a message")
        return ids

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        try:
            return self.encoder.render(messages, prompt=True)
        except RowError as error:
            reason = error.bad.detail.removeprefix("it refuses this row: ")
            raise ConfigError(
                f"the chat template refuses this conversation: {reason}; leave out the system prompt, or complete "
                "plain text"
            ) from None


# -- loading ---------------------------------------------------------------------------------------------------------


def _read(config: TrainConfig, request: dict[str, Any]) -> Generator[dict[str, Any], None, tuple[Any, Any]]:
    """Reads the models on the CPU, telling each stage; returns the base and the tuned one, as `Models` takes them."""
    run_dir = request.get("run_dir")
    weights = _weights(RunFolder(run_dir), str(request["weights"])) if run_dir else None
    yield {"loading": f"reading {config.model_name_or_path}"}
    if weights is None:
        return load_base(_frozen(config)), None
    if _is_adapter(config, weights):
        tuned = add_adapters(load_base(config), config)
        yield {"loading": f"reading the adapter of {weights.name}"}
        _fill(tuned, weights)
        return None, tuned
    base = load_base(_frozen(config)).to(compute_dtype(config))
    yield {"loading": f"reading {weights.name}"}
    return base, _whole(config, weights)


def _config(request: dict[str, Any]) -> TrainConfig:
    """The run's config, or one that names a base model alone; model code runs only where both say so."""
    if request.get("run_dir"):
        config = Request(config=str(RunFolder(request["run_dir"]).config)).resolve()
        remote_code = config.trust_remote_code and bool(request.get("remote_code"))
    else:
        bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        config = TrainConfig(
            model_name_or_path=request["model"],
            model_revision=request.get("revision"),
            dataset_name="none",
            packing=False,
            mixed_precision="bf16" if bf16 else "no",
        )
        remote_code = bool(request.get("remote_code"))
    # Such products are slow on a CPU, or missing.
    slow = config.mixed_precision == "fp16" and not torch.cuda.is_available()
    precision = "no" if slow else config.mixed_precision
    changes = {"trust_remote_code": remote_code, "mixed_precision": precision, "gradient_checkpointing": False}
    return config.model_copy(update={**changes, "merge_adapter": False})


def _frozen(config: TrainConfig) -> TrainConfig:
    """The same base kept in the compute dtype, as a frozen one is; random weights keep the dtype they are drawn in."""
    return config if config.random_init else config.model_copy(update={"method": "lora"})


def _weights(run: RunFolder, name: str) -> Path:
    """The folder of a checkpoint or an export, its name checked again."""
    folder = (run.checkpoints if name.startswith("step-") else run.path) / name
    if (
        not name
        or Path(name).name != name
        or not folder.is_dir()
        or not folder.resolve().is_relative_to(run.path.resolve())
    ):
        raise ConfigError(f"checkpoint {name[:80]!r} is not there in run {run.id}; choose another")
    return folder


def _is_checkpoint(weights: Path) -> bool:
    return weights.name.startswith("step-")


def _is_adapter(config: TrainConfig, weights: Path) -> bool:
    return config.method != "full" if _is_checkpoint(weights) else (weights / "adapter_config.json").is_file()


def _fill(model: Any, weights: Path) -> None:
    """Gives adapters their trained weights."""
    from peft import set_peft_model_state_dict

    try:
        if _is_checkpoint(weights):
            manifest = verify(weights)
            if manifest["base"] != base_digest(model):
                raise ValueError("the base model's weights are not those that its adapters were trained on")
            load_weights(weights, model)
            return
        result = set_peft_model_state_dict(model, load_file(weights / _ADAPTER))
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise _bad(weights, error) from None
    missing = [name for name in result.missing_keys if "lora_" in name] + list(result.unexpected_keys)
    if missing:
        raise _bad(weights, f"{missing[0]} is not in both the adapter and the model")


def _whole(config: TrainConfig, weights: Path) -> Any:
    """A model of whole weights in the compute dtype, from a checkpoint or an export."""
    if not _is_checkpoint(weights):
        own: dict[str, Any] = {"model_name_or_path": str(weights), "model_revision": None, "random_init": False}
        return load_base(_frozen(config.model_copy(update={**own, "num_hidden_layers": None})))
    model = load_base(_frozen(config)).to(compute_dtype(config))
    try:
        verify(weights)
        load_weights(weights, model)
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise _bad(weights, error) from None
    return model


def _bad(weights: Path, why: object) -> ConfigError:
    return ConfigError(f"{weights.name} cannot be loaded: {str(why).partition(chr(10))[0][:300]}; choose another one")


# -- answering -------------------------------------------------------------------------------------------------------


class _Stop(StoppingCriteria):
    """Ends the generation when nobody waits for it any more."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> Any:
        return torch.full((len(input_ids),), self.asked.is_set(), device=input_ids.device, dtype=torch.bool)


def sampling_options(sampling: dict[str, Any]) -> dict[str, Any]:
    """What `generate` takes; temperature 0 is greedy. `top_k` 0 takes every token into account."""
    shared = {"repetition_penalty": float(sampling["repetition_penalty"]), "use_cache": True}
    if not sampling["temperature"]:
        return {**shared, "do_sample": False}
    chances = {name: sampling[name] for name in ("temperature", "top_p", "top_k")}
    return {**shared, "do_sample": True, **chances}


class _Generation(threading.Thread):
    """One call of `generate`; its pieces come out of `streamer`, which ends even when it fails."""

    def __init__(self, models: Models, model: Any, prompt: list[int], sampling: dict[str, Any]):
        super().__init__(daemon=True)
        self.model, self.stop = model, _Stop()
        self.streamer = TextIteratorStreamer(models.tokenizer, skip_prompt=True, skip_special_tokens=True)
        ids = torch.tensor([prompt], device=models.device)
        room = (models.context or 2**31) - len(prompt)
        self.arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": min(sampling["max_new_tokens"], room),
            **sampling_options(sampling),
        }
        self.tokens: list[int] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            result = self.model.generate(**self.arguments, streamer=self.streamer, stopping_criteria=[self.stop])
            self.tokens = result[0, self.arguments["input_ids"].shape[1] :].tolist()
        except Exception as error:  # it is raised again in the main thread
            self.error = error
            self.streamer.on_finalized_text("", stream_end=True)


class Chat:
    """The program's handlers, and the models that they share."""

    def __init__(self) -> None:
        self.models: Models | None = None

    def load(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Loads what the request names, telling each stage; the last document describes what is there.

        Args:
            request: `run_dir` with `weights` (`step-00000120`, or the name of an export such as `model`), or `model`
                with `revision`; `remote_code`.

        Raises:
            ConfigError: when files are missing, damaged, or of another model, or the memory does not suffice.
        """
        started, config = time.monotonic(), _config(request)
        try:
            base, tuned = yield from _read(config, request)
            yield {"loading": "moving to the GPU" if torch.cuda.is_available() else "getting ready"}
            self.models = models = Models(config, base, tuned)
        except torch.OutOfMemoryError:
            raise ConfigError("the model does not fit the GPU's memory; choose another device, or the CPU") from None
        on_gpu = models.device.type == "cuda"
        yield {
            "ready": True,
            "sides": models.sides(),
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "dtype": str(compute_dtype(config)).removeprefix("torch."),
            "context": models.context,
            "chat_template": models.encoder.options.chat_template is not None,
            "gpu_bytes": torch.cuda.memory_allocated() if on_gpu else None,
            "seconds": time.monotonic() - started,
        }

    def answer(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """One answer: documents with its pieces in `text`, and a last one with the whole and its numbers.

        Args:
            request: `side`, `messages`, `plain`, and `sampling` with every value.

        Raises:
            ConfigError: when nothing is loaded, or the conversation cannot be answered.
        """
        models, side, started = self.models, request["side"], time.monotonic()
        if models is None or side not in models.sides():
            raise ConfigError(f"side={side} is not loaded; load a run that has it")
        prompt = models.prompt(request["messages"], bool(request.get("plain")))
        model, entered = models.side(side)
        set_seed(request["sampling"]["seed"])
        generation = _Generation(models, model, prompt, request["sampling"])
        with entered:
            generation.start()
            try:
                yield from ({"text": piece} for piece in generation.streamer if piece)
            finally:
                generation.stop.asked.set()
                generation.join()
        if isinstance(generation.error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            raise ConfigError(f"the GPU's memory does not hold {len(prompt):,} tokens and an answer; clear the chat")
        if generation.error is not None:
            raise generation.error
        yield _summary(models, generation.tokens, len(prompt), time.monotonic() - started)


def _summary(models: Models, tokens: list[int], prompt_tokens: int, seconds: float) -> dict[str, Any]:
    """The whole answer and its numbers."""
    return {
        "answer": models.tokenizer.decode(tokens, skip_special_tokens=True),
        "finish": "eos" if tokens and tokens[-1] in models.ends else "length",
        "prompt_tokens": prompt_tokens,
        "tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds if seconds else 0.0,
    }


if __name__ == "__main__":
    chat = Chat()
    serve({"load": chat.load, "answer": chat.answer})
