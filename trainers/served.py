"""Answers from a server that samples with the adapter as it is: exported, loaded, request, unloaded.

An adapter is loaded under the name of the run and its weights, `RUN-FOLDER-DIGEST`, so that no server can answer with
those of another step or run, and the same weights are not loaded twice. Only the first rank talks to the server.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraModel
from safetensors.torch import save_file

from trainers.config.options import TrainConfig
from trainers.model.load import model_path
from trainers.monitor.heartbeat import LONG_LIMIT
from trainers.objectives.sampling import Sampled
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import gather_full_tensors
from trainers.run.errors import Interrupted, TrainingError
from trainers.run.folder import RunFolder
from trainers.run.from_run import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainers.run.manifest import sha256, sync
from trainers.sampling_server import SHORT_LIMIT, SamplingServer, ServerRequest

OTHER_WEIGHTS = 0.25
"""Mean |difference| of log-probabilities per token above which a server does not have the weights of the run.

A server in half precision differs by some hundredths. Up to this limit the loss weighs each token by the difference;
beyond, most weights would be at their cap, and the run would learn from answers that are not its own.
"""
_SLACK = 4 * SHORT_LIMIT
"""Seconds that a rank may wait longer than the answers may take: for the adapter, and for the error of rank 0."""
_BITS = 53


class ServedSampling:
    """Samples through a server, in place of the ranks.

    Args:
        config: the run's config.
        model: the peft model inside the wrapper.
        backend: the wrapped model.
        ranks: all ranks.
        run: the run folder, where the server reads the adapter.
        vocabulary: number of token ids.
        stops: token ids that end an answer.

    Raises:
        TrainingError: on every rank, if the server cannot sample for this run.
    """

    def __init__(
        self, config: TrainConfig, model: Any, backend: Backend, ranks: Ranks, run: RunFolder, vocabulary: int,
        stops: Sequence[int],
    ):  # fmt: skip
        assert config.sampler_url is not None
        self.config, self.model, self.backend, self.ranks, self.run = config, model, backend, ranks, run
        self.vocabulary, self.stops, self.loaded = vocabulary, stops, ""
        self._server: SamplingServer | None = None
        # Other runs of the same name may use the same server.
        self.prefix = f"{run.id}-{hashlib.sha256(str(run.path.absolute()).encode()).hexdigest()[:8]}"
        self._on_main(lambda weights: self._begin(str(config.sampler_url), weights))

    def sample(self, prompts: Sequence[np.ndarray], randoms: np.ndarray | None, beat: Callable[..., None]) -> Sampled:
        """Answers to all prompts, equal on every rank. Collective.

        Args:
            prompts: token ids of each prompt.
            randoms: `[prompts, tokens]` random numbers in [0, 1), of which the first seeds the answer; None for the
                most likely tokens.
            beat: called with the section while it works.

        Raises:
            Interrupted: on every rank, if the server is gone, fails or takes too long.
            TrainingError: on every rank, if it refuses, or an answer is not what was asked for.
        """
        beat("sampling", allowed=LONG_LIMIT + _SLACK)
        temperature = 0.0 if randoms is None else self.config.temperature
        firsts = np.zeros(len(prompts)) if randoms is None else randoms[:, 0]
        seeds = (firsts * 2**_BITS).astype(np.int64).tolist()
        answers: Sampled = self._on_main(
            lambda weights: self._ready(weights).answers(self._request(prompts, seeds, temperature))
        )
        return answers

    def refuse_other_weights(self, difference: float) -> None:
        """Refuses answers of other weights, before the step learns from them.

        Args:
            difference: the step's metric `sampler_difference`, equal on every rank.

        Raises:
            TrainingError: if it is above `OTHER_WEIGHTS`.
        """
        if difference > OTHER_WEIGHTS:
            raise TrainingError(
                f"sampler_url={self.config.sampler_url}: the log-probabilities of its answers differ from the model's "
                f"by {difference:.3g} in the mean, more than {OTHER_WEIGHTS:g}: it has other weights (of the base, or "
                "an adapter of another step), or rounds them too much; restart it with the base model of this run"
            )

    def close(self) -> None:
        """Unloads the adapter and removes its files. What the server does by now cannot fail the run."""
        if self._server is None or not self.loaded:
            return
        try:
            self._server.unload(self.loaded)
        except TrainingError as error:
            print(f"warning: the adapter {self.loaded} is still loaded: {error}", flush=True)
        self.run.remove_served()
        self.loaded = ""

    def _request(self, prompts: Sequence[np.ndarray], seeds: Sequence[int], temperature: float) -> ServerRequest:
        return ServerRequest(self.loaded, prompts, seeds, temperature, self.config.max_completion_length, self.stops,
                     self.vocabulary)  # fmt: skip

    def _on_main(self, work: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
        """What rank 0 makes of the weights of the adapter, on every rank. Collective."""
        shards = self.backend.shards()
        weights = {name: full.detach().cpu() for name, _, _, full in gather_full_tensors(shards, {}, self.ranks, onto=0)
                   if full is not None and self.ranks.is_main}  # fmt: skip
        result, problem, again = None, None, False
        if self.ranks.is_main:
            try:
                result = work(weights)
            except Exception as error:  # whatever a server makes of it: the other ranks wait for the outcome
                again = isinstance(error, Interrupted)
                known = isinstance(error, TrainingError | OSError)
                problem = (
                    str(error) if known else f"sampler_url={self.config.sampler_url}: {type(error).__name__}: {error}"
                )
        result, problem, again = self.ranks.broadcast((result, problem, again))
        if problem is not None:
            raise (Interrupted if again else TrainingError)(problem)
        return result

    def _begin(self, url: str, weights: dict[str, torch.Tensor]) -> None:
        """Checks the server, and frees it of what an earlier attempt of this run has left."""
        config, server = self.config, SamplingServer(url, LONG_LIMIT)
        names = list(dict.fromkeys([config.model_name_or_path, model_path(config)]))
        for name in server.check(names, config.max_length):
            if re.fullmatch(rf"{re.escape(self.prefix)}-[0-9a-f]{{16}}", name):
                server.unload(name)
        self.run.remove_served()
        self._server = server
        self._ready(weights)
        if config.temperature != 1.0:
            server.refuse_raw(self._request([np.array(self.stops[:1])], [0], config.temperature))
        print(f"{url} samples the answers", flush=True)

    def _ready(self, weights: dict[str, torch.Tensor]) -> SamplingServer:
        """The server with these weights loaded in place of the last ones."""
        assert self._server is not None
        folder = self._written(weights)
        name = f"{self.prefix}-{folder.name}"
        if name != self.loaded:
            if self.loaded:
                self._server.unload(self.loaded)
                shutil.rmtree(self.run.sampler / self.loaded.removeprefix(f"{self.prefix}-"), ignore_errors=True)
                self.loaded = ""
            self._server.load(name, folder)
            self.loaded = name
        return self._server

    def _written(self, weights: dict[str, torch.Tensor]) -> Path:
        """The folder of an adapter as peft saves it, named by the digest of its weights."""
        self.run.refuse_lost()
        temporary = self.run.sampler / f"{'0' * 16}.tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        # Not by the model's own method: under FSDP 1 it finds none of these names among the wrapped modules.
        rename = partial(LoraModel._remove_adapter_name_from_key, adapter_name="default")
        tensors = {rename(name): tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, temporary / ADAPTER_WEIGHTS, {"format": "pt"})
        settings = copy(self.model.peft_config["default"])
        settings.inference_mode = True
        settings.save_pretrained(temporary)
        for path in temporary.iterdir():
            sync(path)  # the server may read it on another machine
        digests = [sha256(temporary / name) for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)]
        folder = self.run.sampler / hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
        if folder.exists():
            shutil.rmtree(temporary)
        else:
            temporary.rename(folder)
        return folder
