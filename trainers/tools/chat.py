"""The chat program: loads a base model and a run's fine-tuned model once, and streams their answers token by token.

Run by `app/services/chat.py` through `app/services/rpc_client.py`.
Reads safetensors only, no pickle, and runs no model code unless allowed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from safetensors import SafetensorError
from transformers import StoppingCriteria

from trainers.checkpoint.weights import load_weights, refuse_other_base
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import Request
from trainers.model.load import compute_dtype, load_base, model_path
from trainers.model.lora import add_adapters
from trainers.run.folder import RunFolder
from trainers.run.from_run import resolve_request
from trainers.run.lineage import read_export
from trainers.run.manifest import verify
from trainers.tools.answer_format import InTime, PlainParser
from trainers.tools.chat_memory import check_memory
from trainers.tools.chat_models import Models
from trainers.tools.partial_text import PartialText
from trainers.tools.rpc_server import serve

_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_BAD = (ValueError, KeyError, OSError, RuntimeError, SafetensorError)

# -- loading ---------------------------------------------------------------------------------------------------------


def read_models(
    config: TrainConfig, request: dict[str, Any], with_base: bool = True
) -> Generator[dict[str, Any], None, tuple[Any, Any]]:
    """Reads the models on the CPU, yielding each stage; returns `base` and `tuned` as `Models` takes them.

    Args:
        config: of `request_config`.
        request: see `Chat.load`; or `adapter`, a folder of one.
        with_base: whether the base of a fully fine-tuned model is read too.

    Raises:
        ConfigError: if files are missing, damaged or of another model.
    """
    run_dir = request.get("run_dir")
    weights = _weights(RunFolder(run_dir), str(request["weights"])) if run_dir else None
    yield {"loading": f"reading {config.model_name_or_path}"}
    if request.get("adapter"):
        return None, _exported_adapter(config, Path(request["adapter"]))
    if weights is None:
        return load_base(_frozen(config)), None
    if not _is_checkpoint(weights) and any((weights / name).exists() for name in _ADAPTER):
        return None, _exported_adapter(config, weights)
    if _is_checkpoint(weights) and config.method != "full":
        if config.init_lora_weights == "pissa":
            problem = ": its adapters fit a base from which their first weights are subtracted"
            raise ConfigError.about("weights", weights.name, problem, "export the checkpoint with `tunesmith export`")
        tuned = add_adapters(load_base(config), config)
        yield {"loading": f"reading the adapter of {weights.name}"}
        _fill(tuned, weights)
        return None, tuned
    base = load_base(_frozen(config)).to(compute_dtype(config)) if with_base else None
    yield {"loading": f"reading {weights.name}"}
    return base, _full_model(config, weights)


def request_config(request: dict[str, Any]) -> TrainConfig:
    """The run's config, or one for a model alone; model code runs only if both config and request allow it.

    Raises:
        ConfigError: if the request names what cannot answer.
    """
    if request.get("run_dir"):
        config = Request(config=str(RunFolder(request["run_dir"]).config)).resolve()
        if config.objective_spec.scalar_head:
            raise ConfigError(
                "this run trained a reward model, which gives text a score and writes none; its export's README.md "
                "says how to load it"
            )
        remote_code = config.trust_remote_code and bool(request.get("remote_code"))
        weights = _weights(RunFolder(request["run_dir"]), str(request["weights"]))
        if config.from_run and (weights / "tokenizer.json").is_file():  # the run that it started from may be deleted
            config = config.model_copy(update={"from_run": str(weights)})
    else:
        bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        alone: dict[str, Any] = {
            "dataset_name": EMBEDDED,
            "packing": False,
            "mixed_precision": "bf16" if bf16 else "no",
        }
        if adapter := request.get("adapter"):
            method = read_export(Path(adapter))[0].get("method", "lora")
            config = resolve_request(Request(options={**alone, "from_run": adapter, "method": method}))
        else:
            model: dict[str, Any] = {"model_name_or_path": request["model"], "model_revision": request.get("revision")}
            config = TrainConfig(**alone, **model)
        remote_code = bool(request.get("remote_code"))
    # fp16 matrix products are slow on a CPU, or unsupported.
    slow = config.mixed_precision == "fp16" and not torch.cuda.is_available()
    precision = "no" if slow else config.mixed_precision
    changes = {"trust_remote_code": remote_code, "mixed_precision": precision, "gradient_checkpointing": False}
    return config.model_copy(update={**changes, "merge_adapter": False})


def _frozen(config: TrainConfig) -> TrainConfig:
    """The config with the base kept in the compute dtype, as if frozen; random weights keep their initial dtype."""
    return config if config.random_init else config.model_copy(update={"method": "lora"})


def _weights(run: RunFolder, name: str) -> Path:
    """The folder of a checkpoint or an export; checks its name again."""
    folder = (run.checkpoints if name.startswith("step-") else run.path) / name
    if (
        not name
        or Path(name).name != name
        or not folder.is_dir()
        or not folder.resolve().is_relative_to(run.path.resolve())
    ):
        raise ConfigError(f"checkpoint {name[:80]!r} does not exist in run {run.id}; choose another")
    return folder


def _is_checkpoint(weights: Path) -> bool:
    return weights.name.startswith("step-")


def _exported_adapter(config: TrainConfig, weights: Path) -> Any:
    """The base with an exported adapter, which is checked before the base is read."""
    from trainers.model.adapter import Adapter

    with _refusing_damage(weights):
        return Adapter.read(weights, model_path(config)).attach(load_base(config))


def _fill(model: Any, weights: Path) -> None:
    """Loads the trained weights of a checkpoint into adapters on their base."""
    with _refusing_damage(weights):
        refuse_other_base(verify(weights), model)
        load_weights(weights, model)


def _full_model(config: TrainConfig, weights: Path) -> Any:
    """A fully fine-tuned model in the compute dtype, from a checkpoint or an export."""
    if not _is_checkpoint(weights):
        own: dict[str, Any] = {"model_name_or_path": str(weights), "model_revision": None, "random_init": False}
        own |= {"num_hidden_layers": None, "rope_scaling": "none"}  # its config.json has both
        own |= {"new_tokens": [], "pad_vocab_to_multiple_of": None}
        return load_base(_frozen(config.model_copy(update=own)))
    model = load_base(_frozen(config)).to(compute_dtype(config))
    with _refusing_damage(weights):
        verify(weights)
        load_weights(weights, model)
    return model


@contextmanager
def _refusing_damage(weights: Path) -> Iterator[None]:
    """Turns the errors of damaged files into a ConfigError that names them."""
    try:
        yield
    except ConfigError:  # a subclass of ValueError
        raise
    except _BAD as error:
        reason = str(error).partition("\n")[0][:300]
        raise ConfigError(f"{weights.name} cannot be loaded: {reason}; choose another one") from None


# -- answering -------------------------------------------------------------------------------------------------------


class _Stop(StoppingCriteria):
    """Stops the generation once its answer is no longer wanted."""

    def __init__(self) -> None:
        self.requested = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.requested.is_set(), device=input_ids.device, dtype=torch.bool)


def sampling_options(sampling: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`. Temperature 0 is greedy decoding; `top_k` 0 considers every token."""
    shared = {"repetition_penalty": float(sampling["repetition_penalty"]), "use_cache": True}
    if not sampling["temperature"]:
        return {**shared, "do_sample": False}
    chances = {name: sampling[name] for name in ("temperature", "top_p", "top_k")}
    return {**shared, "do_sample": True, **chances}


class _Generation(threading.Thread):
    """One call of `generate`; the text of each token comes out of `texts`, and None at the end, however it ends."""

    def __init__(self, models: Models, model: Any, prompt: list[int], sampling: dict[str, Any]):
        super().__init__(daemon=True)
        self.model = model
        self.stop = _Stop()
        self.texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ends = models.ends
        self._partial = PartialText(models.decode)
        self._is_prompt = True
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
            self.model.generate(**self.arguments, streamer=self, stopping_criteria=[self.stop])
        except Exception as error:  # raised again in the main thread
            self.error = error
        finally:
            self.texts.put(None)

    def put(self, value: torch.Tensor) -> None:
        """Takes the prompt, and then each token, from `generate`."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.tokens.append(int(value.reshape(-1)[-1]))
        if self.tokens[-1] not in self._ends:
            self.texts.put(self._partial.add(self.tokens[-1]))

    def end(self) -> None:
        """Sends what is left of the text."""
        self.texts.put(self._partial.end())


class Chat:
    """The request handlers, and the models that they share."""

    def __init__(self) -> None:
        self.models: Models | None = None

    def load(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Loads the models of a request, yielding each stage; the last document describes the loaded models.

        Args:
            request: `run_dir` with `weights` (`step-00000120`, or the name of an export such as `model`), or `model`
                with `revision`; `remote_code`.

        Raises:
            ConfigError: if files are missing, damaged or of another model, or memory is insufficient.
        """
        started, config = time.monotonic(), request_config(request)
        if memory := check_memory(config, request):
            yield {"loading": f"reading the weights: {memory}"}
        try:
            base, tuned = yield from read_models(config, request)
            yield {"loading": "moving to the GPU" if torch.cuda.is_available() else "getting ready"}
            self.models = models = Models(config, base, tuned)
        except torch.OutOfMemoryError:
            raise ConfigError("the model does not fit in GPU memory; choose another device, or the CPU") from None
        on_gpu = models.device.type == "cuda"
        yield {
            "ready": True,
            "sides": models.sides(),
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "dtype": str(compute_dtype(config)).removeprefix("torch."),
            "context": models.context,
            "chat_template": models.has_template,
            "takes_tools": models.takes_tools,
            "gpu_bytes": torch.cuda.memory_allocated() if on_gpu else None,
            "seconds": time.monotonic() - started,
        }

    def answer(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Generates one answer: yields its `text` token by token, with the `parts` that it adds to, then a summary.

        A part is its kind (`content`, `reasoning` or `tool_call`), text to append, and whether another one begins.

        Args:
            request: `side`, `messages`, `plain`, `tools` as chat templates read them, and `sampling` with every value.

        Raises:
            ConfigError: if nothing is loaded, or the conversation cannot be answered.
        """
        models, side, started = self.models, request["side"], time.monotonic()
        if models is None or side not in models.sides():
            raise ConfigError(f"side={side} is not loaded; load a run that has it")
        prompt, parser = self._prompt(models, request)
        model, entered = models.side(side)
        set_seed(request["sampling"]["seed"])
        generation = _Generation(models, model, prompt, request["sampling"])
        with entered:
            generation.start()
            try:
                if parser.initial:
                    yield {"text": "", "parts": parser.initial}
                for text in iter(generation.texts.get, None):
                    if text:
                        yield {"text": text, "parts": parser.feed(text)}
            finally:
                generation.stop.requested.set()
                generation.join()
        if isinstance(generation.error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            raise ConfigError(f"{len(prompt):,} tokens and an answer do not fit in GPU memory; clear the chat")
        if generation.error is not None:
            raise generation.error
        yield {"text": "", "parts": parser.finish()}
        summary = _summary(models, generation.tokens, len(prompt), time.monotonic() - started)
        message, calls = parser.message(), sum(len(each.get("tool_calls", ())) for each in request["messages"])
        for number, call in enumerate(message.get("tool_calls", ())):
            if "function" in call:
                call["id"] = f"call{calls + number:05}"  # Mistral's template takes nine letters and digits
        yield {**summary, "message": message}

    def _prompt(self, models: Models, request: dict[str, Any]) -> tuple[list[int], InTime | PlainParser]:
        """Tokens to go on from, and what takes the answer apart."""
        messages, tools = request["messages"], request.get("tools") or []
        if request.get("plain") or not models.has_template:
            if tools:
                raise ConfigError("tools need a chat template; remove them, or turn off plain text")
            return models.prompt(messages, plain=True), PlainParser()
        has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if (tools or has_calls) and not models.takes_tools:
            raise ConfigError("the chat template of this model does not know tools; remove them, or clear the chat")
        variables = {"tools": tools} if tools else {}
        text = models.text([models.for_template(message) for message in messages], False, variables)
        return models.tokens(text, plain=False), InTime(models.format.parser(text, tools))


def _summary(models: Models, tokens: list[int], prompt_tokens: int, seconds: float) -> dict[str, Any]:
    """The full answer and its statistics."""
    return {
        "answer": models.decode(tokens[:-1] if tokens and tokens[-1] in models.ends else tokens),
        "finish": "eos" if tokens and tokens[-1] in models.ends else "length",
        "prompt_tokens": prompt_tokens,
        "tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds if seconds else 0.0,
    }


if __name__ == "__main__":
    chat = Chat()
    serve({"load": chat.load, "answer": chat.answer})
