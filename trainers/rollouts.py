"""The batch of a step whose answers are sampled: prompts -> answers -> rewards -> advantages -> packed rows.

Answers are a pure function of (weights, data, seed, step), so with `steps_per_generation=1` there is nothing to save
for a resume: each step samples its own. Otherwise the first of several steps samples for all of them, and checkpoints
hold the answers of those that are to come. The run folder keeps the newest, on which another run can train, under any
strategy, instead of sampling (`recorded_answers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.config.objectives import ANSWER
from trainers.config.options import TrainConfig
from trainers.config.reward_file import columns_of_rewards
from trainers.data.batches import TrainPlan
from trainers.data.cache import TokenSet
from trainers.data.micro_batch import MicroBatch, StepBatch
from trainers.data.prepare import load_tokenizer
from trainers.data.rollouts import Prompt, RecordedStep, Rollouts, prompt_of, prompts_digest, refuse_other_columns
from trainers.data.rows import Rows
from trainers.generation import Generation, generate, stop_ids
from trainers.monitor.heartbeat import LONG_LIMIT
from trainers.objectives.sampling import Sampled, uniforms
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.rewards.process import RewardProcess
from trainers.run.errors import TrainingError
from trainers.run.folder import RunFolder, write_atomic
from trainers.run.record import KEPT_STEPS
from trainers.strategy.mesh import Mesh

if TYPE_CHECKING:  # only runs with a server need it
    from trainers.served import ServedSampling

_STABLE = 1e-4
"""Added to the standard deviation of a group's rewards, as in TRL."""
_PENDING = "answers."
"""With the number of a step: what checkpoints call its answers."""

Beat = Callable[..., None]


def advantages(rewards: np.ndarray, group: int, kind: str) -> np.ndarray:
    """`[answers]` how much better each answer is than the others of its prompt.

    Args:
        rewards: `[answers]`, those of a prompt side by side.
        group: answers of a prompt.
        kind: `loss_type` of the objective: `rloo` compares with the mean of the others, `dr_grpo` with that of all,
            and the others divide that by the standard deviation.
    """
    of_prompt = rewards.reshape(-1, group).astype(np.float64)
    centred = of_prompt - of_prompt.mean(1, keepdims=True)
    if kind == "rloo":
        centred *= group / (group - 1)
    elif kind != "dr_grpo":
        centred /= of_prompt.std(1, ddof=1, keepdims=True) + _STABLE
    return centred.reshape(-1)


class Sampler:
    """Samples and rewards the answers of steps and evaluations.

    Args:
        config: the run's config.
        plan: the prompts of each step.
        evaluation: the evaluation data; None without.
        backend: the wrapped model.
        mesh: this rank's position in the mesh.
        ranks: all ranks.
        run: the run folder, for the answers.
        checkpoints: hold the answers of steps that are to come.
        base: the transformers model, for the tokens that end its answers.
    """

    def __init__(
        self, config: TrainConfig, plan: TrainPlan, evaluation: TokenSet | None, backend: Backend, mesh: Mesh,
        ranks: Ranks, run: RunFolder, checkpoints: Checkpoints, base: Any,
    ):  # fmt: skip
        self.config, self.plan, self.evaluation = config, plan, evaluation
        self.backend, self.mesh, self.ranks, self.folder = backend, mesh, ranks, run.rollouts
        assert isinstance(plan.rows.documents, TokenSet)
        refuse_other_columns(config, plan.rows.documents, evaluation)
        self.tokenizer = load_tokenizer(config)
        self.stops = stop_ids(config, self.tokenizer, base)
        self.vocabulary = int(base.config.get_text_config().vocab_size)
        self.columns = tuple(columns_of_rewards(config) or ())
        self.rewards = RewardProcess(config.reward_funcs, config.reward_timeout, config.reward_schema)
        self.weights = np.array(config.reward_weights or [1.0] * len(config.reward_funcs))
        self.served: ServedSampling | None = None  # set with `sampler_url`
        self.checkpoints, self.pending = checkpoints, dict[int, RecordedStep]()

    def restore(self, folder: Path) -> None:
        """Takes up the answers that a checkpoint holds of steps after it. Collective.

        Raises:
            TrainingError: on every rank, if they cannot be read.
        """
        error = None
        try:
            for name, content in self.checkpoints.extra_tensors(folder).items():
                if name.startswith(_PENDING):
                    self.pending[int(name.removeprefix(_PENDING))] = RecordedStep.from_json(
                        bytes(content.numpy()).decode()
                    )
                    self.checkpoints.extra[name] = content
        except (ValueError, TypeError) as problem:
            error = problem
        self.ranks.agree(error, f"reading the sampled answers in {folder}")

    def step_batch(self, step: int, beat: Beat) -> StepBatch:
        """This rank's share of a step. Collective.

        Args:
            step: number of the step, from 0.
            beat: called with the section while it works.

        Raises:
            TrainingError: on every rank, if rewards fail or recorded answers are missing.
        """
        config, times = self.config, {"sampling_s": 0.0, "rewards_s": 0.0}
        if config.recorded_answers is not None:
            recorded = self._recorded(step, Path(config.recorded_answers))
        else:
            if not self._continues(step):
                times = self._generate(step, beat)
            recorded = self.pending[step]
            for over in [number for number in self.pending if number <= step]:  # some may have been skipped
                del self.pending[over]
                self.checkpoints.extra.pop(f"{_PENDING}{over}", None)
            self._record(step, recorded)
        return self._batch(step, recorded, _summary(recorded, config.num_generations) | times)

    def evaluate(self, beat: Beat) -> dict[str, float]:
        """Mean reward of the most likely answers to the evaluation data; `eval_loss` is its negative. Collective."""
        assert self.evaluation is not None
        numbers = np.arange(len(self.evaluation))
        prompts = [prompt_of(self.evaluation, int(number)) for number in numbers]
        answers = self._sample([prompt.tokens for prompt in prompts], None, beat)
        beat("rewards", allowed=2 * self.config.reward_timeout)
        recorded = self._rewarded(numbers, prompts, answers)
        reward = float(np.mean(recorded.rewards))
        summary = _summary(recorded, 1)
        return {"eval_loss": -reward, "eval_reward": reward,
                **{f"eval_{name}": summary[name] for name in ("answer_tokens", "truncated")}}  # fmt: skip

    def _continues(self, step: int) -> bool:
        """Whether the answers of a step were sampled before; those of a run with other data or options are dropped."""
        if (recorded := self.pending.get(step)) is None:
            return False
        numbers, prompts = self._prompts(step)
        digest = prompts_digest([prompt.tokens for prompt in prompts])
        misfit = recorded.misfit(self.config, numbers.tolist(), digest, self.vocabulary)
        if misfit is None and (
            recorded.columns != _read_columns(numbers, prompts)
            or [texts[2] for texts in recorded.texts] != [prompt.expected(self.tokenizer.decode) for prompt in prompts]
        ):
            misfit = "its rewards were computed from other columns or answers"
        if misfit is None:
            return True
        if self.ranks.is_main:
            print(f"warning: step {step + 1} is sampled anew: of what the checkpoint holds of it, {misfit}", flush=True)
        for number in self.pending:
            self.checkpoints.extra.pop(f"{_PENDING}{number}", None)
        self.pending.clear()
        return False

    def _prompts(self, step: int) -> tuple[np.ndarray, list[Prompt]]:
        """For each answer of a step: the number of the document that it answers, and its prompt."""
        rows, chosen = self.plan.chosen(step)
        members, documents = rows.members_of(chosen), self._documents(rows)
        prompts = [prompt_of(documents, int(number)) for number in members]
        count = self.config.num_generations
        return members.repeat(count), [prompt for prompt in prompts for _ in range(count)]

    @staticmethod
    def _documents(rows: Rows) -> TokenSet:
        assert isinstance(rows.documents, TokenSet)
        return rows.documents

    # -- answers -------------------------------------------------------------------------------------------------------

    def _generate(self, first: int, beat: Beat) -> dict[str, float]:
        """Samples and rewards the answers of the steps from `first` to the end of its generation. Collective.

        Returns:
            Seconds of each part.
        """
        config, began = self.config, time.perf_counter()
        end = first - first % config.steps_per_generation + config.steps_per_generation
        steps = range(first, min(end, self.plan.total_steps))
        self.plan.agree(steps[-1], self.ranks, lambda: beat("data", allowed=LONG_LIMIT))
        numbers, prompts = zip(*map(self._prompts, steps), strict=True)
        randoms = [uniforms(config.seed, step, np.arange(len(of_step)), config.max_completion_length)
                   for step, of_step in zip(steps, numbers, strict=True)]  # fmt: skip
        every_prompt = [prompt.tokens for of_step in prompts for prompt in of_step]
        answers = self._sample(every_prompt, np.concatenate(randoms), beat)
        rewards_s, at = 0.0, 0
        for step, of_step, prompts_of_step in zip(steps, numbers, prompts, strict=True):
            own = slice(at, at := at + len(of_step))
            beat("rewards", allowed=2 * config.reward_timeout)
            reward_began = time.perf_counter()
            recorded = self._rewarded(
                of_step, prompts_of_step, Sampled(answers.tokens[own], answers.log_probs[own], answers.ended[own])
            )
            rewards_s += time.perf_counter() - reward_began
            if config.steps_per_generation > 1:  # weights have changed when the later steps train
                recorded = replace(recorded, old_log_probs=self._old_log_probs(step, recorded, beat))
                content = bytearray(recorded.to_json().encode())
                self.checkpoints.extra[f"{_PENDING}{step}"] = torch.frombuffer(content, dtype=torch.uint8)
            self.pending[step] = recorded
        return {"sampling_s": time.perf_counter() - began - rewards_s, "rewards_s": rewards_s}

    def _old_log_probs(self, step: int, recorded: RecordedStep, beat: Beat) -> list[list[float]]:
        """Log-probabilities of the tokens of a step's answers as training computes them. Collective.

        Answers that are not trained keep those of the sampler.
        """
        old = list(recorded.log_probs)
        self.backend.model.eval()
        own = [
            (int(number), values.tolist())
            for numbers, of_documents in self.backend.label_log_probs(
                self._micro_batches(self._rows(step, recorded)), lambda section: beat(section, allowed=LONG_LIMIT)
            )
            for number, values in zip(numbers, of_documents, strict=True)
            if len(values)
        ]
        self.backend.model.train()
        for number, values in (entry for entries in self.ranks.gather(own) for entry in entries):
            old[number] = values
        return old

    def _sample(self, prompts: Sequence[np.ndarray], randoms: np.ndarray | None, beat: Beat) -> Sampled:
        """Answers to all prompts, equal on every rank; each rank samples its share in batches, unless a server does."""
        if self.served is not None:
            size = self.config.global_batch_size * self.config.num_generations  # the limits of time are for one step
            parts = [
                self.served.sample(prompts[at : at + size], None if randoms is None else randoms[at : at + size], beat)
                for at in range(0, len(prompts), size)
            ]
            return Sampled(
                [tokens for part in parts for tokens in part.tokens],
                [log_probs for part in parts for log_probs in part.log_probs],
                [ended for part in parts for ended in part.ended],
            )
        config = self.config
        settings = Generation(
            config.per_device_eval_batch_size, config.max_completion_length, self.stops, config.temperature
        )
        return generate(self.backend, self.mesh, self.ranks, prompts, settings, beat, randoms)

    def _rewarded(self, numbers: np.ndarray, prompts: Sequence[Prompt], answers: Sampled) -> RecordedStep:
        """The answers with their rewards, which the first rank computes."""
        outcome: tuple[RecordedStep | None, str] = (None, "")
        if self.ranks.is_main:
            decode = self.tokenizer.decode
            texts = [[decode(prompt.tokens), decode(tokens, skip_special_tokens=True), prompt.expected(decode)]
                     for prompt, tokens in zip(prompts, answers.tokens, strict=True)]  # fmt: skip
            of_texts = [[text[part] for text in texts] for part in range(3)]
            has = [column for column in self.columns if prompts[0].has(column)]  # all prompts do, or none
            columns = {column: [prompt.columns[column] for prompt in prompts] for column in has if column != ANSWER}
            columns |= {ANSWER: of_texts[2]} if ANSWER in has else {}
            try:
                by_function = self.rewards.compute(of_texts[0], of_texts[1], columns)
                total = self.weights @ np.array([by_function[name] for name in self.config.reward_funcs])
                step = RecordedStep(
                    numbers.tolist(), [tokens.tolist() for tokens in answers.tokens],
                    [values.tolist() for values in answers.log_probs], list(answers.ended), total.tolist(),
                    by_function, texts, prompts_digest([prompt.tokens for prompt in prompts]),
                    self.config.temperature, columns=_read_columns(numbers, prompts),
                )  # fmt: skip
                outcome = (step, "")
            except TrainingError as error:
                outcome = (None, str(error))
        step_or_none, problem = self.ranks.broadcast(outcome)
        if step_or_none is None:
            raise TrainingError(problem)
        recorded: RecordedStep = step_or_none
        return recorded

    def _rows(self, step: int, recorded: RecordedStep) -> Rows:
        """The answers of a step, packed."""
        config, documents = self.config, self._documents(self.plan.chosen(step)[0])
        prompts = [prompt_of(documents, number).tokens for number in recorded.prompts]
        kind = config.objective_options()["loss_type"]
        counts = np.array([ended or not config.mask_truncated_completions for ended in recorded.ended])
        answers = Rollouts(
            prompts, [np.array(tokens, dtype=np.int32) for tokens in recorded.answers],
            recorded.log_probs, recorded.old_log_probs,
            advantages(np.array(recorded.rewards), config.num_generations, kind), counts,
            config.recorded_answers is None,
        )  # fmt: skip
        return Rows(answers, config.row_tokens, config.packing, config.torch_compile and config.packing,
                    self.plan.rows.shard, config.objective_spec)  # fmt: skip

    def _micro_batches(self, rows: Rows) -> list[MicroBatch]:
        """This rank's share of rows."""
        size, rank, world = self.config.per_device_train_batch_size, self.mesh.data_rank, self.mesh.sizes.data
        everything = np.arange(len(rows))
        shares = [everything[start + rank * size : start + (rank + 1) * size]
                  for start in range(0, len(rows), size * world)]  # fmt: skip
        return rows.collate_each(shares, rows.scales())

    def _batch(self, step: int, recorded: RecordedStep, metrics: dict[str, float]) -> StepBatch:
        """This rank's share of a step."""
        rows = self._rows(step, recorded)
        return StepBatch(
            self._micro_batches(rows), int(rows.trained.sum()), int(rows.lengths.sum()),
            int(rows.squared_lengths.sum()), rows.divisor(), [], metrics,
        )  # fmt: skip

    # -- on disk -------------------------------------------------------------------------------------------------------

    def _record(self, step: int, recorded: RecordedStep) -> None:
        """Writes the answers of a step into the run folder, and removes the oldest."""
        if not self.ranks.is_main:
            return
        self.folder.mkdir(exist_ok=True)
        write_atomic(_path(self.folder, step), recorded.to_json(step=step + 1))
        _path(self.folder, step - KEPT_STEPS).unlink(missing_ok=True)

    def _recorded(self, step: int, folder: Path) -> RecordedStep:
        """The answers of a step that another run sampled.

        Raises:
            TrainingError: on every rank, if they cannot be read or are those of other prompts.
        """
        path, problem, recorded = _path(folder, step), None, None
        numbers, prompts = self._prompts(step)
        try:
            recorded = RecordedStep.from_json(path.read_text(encoding="utf-8"))
            digest = prompts_digest([prompt.tokens for prompt in prompts])
            if misfit := recorded.misfit(self.config, numbers.tolist(), digest, self.vocabulary):
                problem = ValueError(misfit)
        except (OSError, ValueError, TypeError) as error:
            problem = ValueError(str(error))
        self.ranks.agree(problem, f"reading the answers of step {step + 1}, {path},")
        assert recorded is not None
        return recorded


def _read_columns(numbers: np.ndarray, prompts: Sequence[Prompt]) -> dict[str, dict[str, Any]]:
    """The columns of each prompt, by the number of its document."""
    return {str(number): dict(prompt.columns) for number, prompt in zip(numbers, prompts, strict=True)}


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step + 1}.json"


def _summary(recorded: RecordedStep, group: int) -> dict[str, float]:
    """Metrics of the answers of a step."""
    rewards = np.array(recorded.rewards).reshape(-1, group)
    spread = rewards.std(1, ddof=1) if group > 1 else np.zeros(len(rewards))
    several = {f"reward_{name.rpartition(':')[2]}": float(np.mean(values))
               for name, values in recorded.by_function.items()} if len(recorded.by_function) > 1 else {}  # fmt: skip
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(spread.mean()),
        "equal_groups": float((rewards.max(1) == rewards.min(1)).mean()),
        **several,
        "answer_tokens": float(np.mean([len(tokens) for tokens in recorded.answers])),
        "truncated": float(np.mean([not ended for ended in recorded.ended])),
    }
