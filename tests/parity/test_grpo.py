"""GRPO keeps the promises: on recorded answers against plain PyTorch and TRL, and with its own sampler.

Under another strategy a rounding can flip a sampled token, so parity between strategies is held on recorded answers.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import HALF, STEPS, config, curve, mostly_long, options, run
from tests.parity.test_objectives import STRATEGIES, plain_curve
from tests.shared import once
from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import load_strategy

GROUP, MOST_TOKENS, EPSILON, BETA, LORA_RATE = 4, 40, 0.05, 0.05, 4e-4
KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
REWARD = '''
from difflib import SequenceMatcher

def likeness(completions, answer):
    """Answers are seldom right at first: how much of the right one they have differs between any two."""
    return [SequenceMatcher(None, text, wanted).ratio() for text, wanted in zip(completions, answer)]
'''


def grpo_options(**changes: Any) -> dict[str, Any]:
    """What these runs change in those of the other parity tests."""
    reward = once("grpo-reward", lambda folder: (folder / "reward.py").write_text(REWARD) and None) / "reward.py"
    return {
        "objective": "grpo", "reward_funcs": f"{reward}:likeness", "num_generations": GROUP,
        "max_completion_length": MOST_TOKENS, "global_batch_size": 4, "per_device_train_batch_size": 1,
        "learning_rate": 1e-4, "max_train_samples": 61, "max_eval_samples": 9, "epsilon": EPSILON,
        **changes,
    }  # fmt: skip


def grpo(name: str, method: str = "full", packing: bool = True, again: int = 0, **changes: Any) -> Finished:
    """A run under a strategy, with as many processes as its file says."""
    processes = load_strategy(name).num_processes
    return run(processes, method, packing, name, again, **grpo_options(**changes))


def recorded(**changes: Any) -> Path:
    """The answers of a run with one process."""
    return grpo("single", **changes).run.rollouts


def replayed(**changes: Any) -> dict[str, Any]:
    """Options of a run on recorded answers; its rate is higher, so that its ratios leave 1 and some are clipped."""
    sampling = {name: value for name, value in changes.items() if name in ("temperature",)}
    recording = {"recorded_answers": str(recorded(**sampling)), "eval_dataset_name": "none"}
    return {**recording, "learning_rate": 1.5e-4, **changes}


def read(step: int, folder: Path | None = None) -> dict[str, Any]:
    """The recorded answers of a step, from 0."""
    values: dict[str, Any] = json.loads(((folder or recorded()) / f"step-{step + 1}.json").read_text())
    return values


# -- against plain PyTorch ---------------------------------------------------------------------------------------------


def advantages(rewards: list[float], kind: str) -> torch.Tensor:
    """By the papers' formulas."""
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, GROUP)
    if kind == "rloo":
        others = (groups.sum(1, keepdim=True) - groups) / (GROUP - 1)
        return (groups - others).flatten().float()
    centred = groups - groups.mean(1, keepdim=True)
    return (centred if kind == "dr_grpo" else centred / (groups.std(1, keepdim=True) + 1e-4)).flatten().float()


def plain_grpo(settings: TrainConfig, wrong: str = "", **instead: float) -> plain.Curve:
    """GRPO on recorded answers in a page, each answer alone.

    Args:
        settings: options of the run.
        wrong: control: `signs` of the advantages are reversed, nothing is clipped (`unclipped`), or ratios are 1
            (`current`).
        instead: control: `temperature` or `beta`, in place of those of the run.
    """
    own, steps_taken = {**settings.objective_options(), **instead}, iter(range(STEPS))
    kind = own["loss_type"]
    low, high = (0.0, 100.0) if wrong == "unclipped" else (1 - EPSILON, 1 + EPSILON)

    def mean_loss(plan: TrainPlan, model: nn.Module, initial: nn.Module, members: np.ndarray) -> torch.Tensor:
        step = read(next(steps_taken), Path(str(settings.recorded_answers)))
        assert step["prompts"] == members.repeat(GROUP).tolist()
        losses, total = [], sum(map(len, step["answers"]))
        old = step["old_log_probs"] or step["log_probs"]
        for number, answer, before, advantage in zip(
            step["prompts"], step["answers"], old, advantages(step["rewards"], kind), strict=True
        ):
            tokens, mask = plan.rows.documents.document(number)
            prompt = tokens[: int(mask.argmax())].tolist()
            ids = torch.tensor([prompt + answer])
            log_probs, unmoved = (
                -functional.cross_entropy(
                    part(input_ids=ids).logits[0, len(prompt) - 1 : -1] / own["temperature"],
                    ids[0, len(prompt) :], reduction="none",
                )
                for part in (model, initial)
            )  # fmt: skip
            change = log_probs - (log_probs.detach() if wrong == "current" else torch.tensor(before))
            if kind in ("gspo", "rloo"):
                change = change.sum() / (len(answer) if kind == "gspo" else 1)
            ratio, signed = change.exp(), -advantage if wrong == "signs" else advantage
            loss = -torch.minimum(ratio * signed, ratio.clamp(low, high) * signed)
            penalty = own["beta"] * ((unmoved - log_probs).exp() - (unmoved - log_probs) - 1)
            loss = loss + (penalty.mean() if kind == "gspo" else penalty)
            weights = {"grpo": 1 / len(answer), "dr_grpo": 1 / MOST_TOKENS, "dapo": len(step["answers"]) / total}
            losses.append(loss.sum() * weights.get(kind, 1.0))
        return torch.stack(losses).mean()

    return plain_curve(settings, mean_loss)


@functools.cache
def wanted(method: str, kind: str, **changes: Any) -> plain.Curve:
    """The curve of the plain page."""

    def train(folder: Path) -> None:
        settings = config(method, True, **grpo_options(**replayed(loss_type=kind, **changes)))
        (folder / "curve.json").write_text(json.dumps(asdict(plain_grpo(settings))))

    folder = once("-".join(["plain-grpo", method, kind, *(f"{name}{value}" for name, value in changes.items())]), train)
    return plain.Curve(**json.loads((folder / "curve.json").read_text()))


@pytest.mark.parametrize("name", mostly_long(["single", *STRATEGIES], ["single"]))
def test_p2_on_recorded_answers(name: str) -> None:
    finished = grpo(name, **replayed())
    assert curve(finished).agrees(wanted("full", "grpo"))
    assert sum(share > 0.01 for share in finished.series("clip_ratio")) > STEPS / 4  # clipping is not idle


@pytest.mark.parametrize("kind", mostly_long(KINDS[1:], []))
def test_each_form_of_the_loss(kind: str) -> None:
    assert curve(grpo("single", **replayed(loss_type=kind))).agrees(wanted("full", kind))


@pytest.mark.long
@pytest.mark.parametrize(("name", "kind"), [("cp", "gspo"), ("sp", "rloo"), ("zero3", "dapo"), ("hsdp", "dr_grpo")])
def test_forms_of_the_loss_under_strategies(name: str, kind: str) -> None:
    assert curve(grpo(name, **replayed(loss_type=kind))).agrees(wanted("full", kind))


@pytest.mark.long
@pytest.mark.parametrize("name", ["single", "ddp", "zero3"])
def test_p2_with_adapters(name: str) -> None:
    assert curve(grpo(name, "lora", **replayed())).agrees(wanted("lora", "grpo"))


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 4])
def test_micro_batches_change_nothing(size: int) -> None:
    assert curve(grpo("single", **replayed(per_device_train_batch_size=size))).agrees(wanted("full", "grpo"))


@pytest.mark.parametrize("wrong", mostly_long(["signs", "unclipped"], ["unclipped"]))
def test_what_is_wrong_does_not_agree(wrong: str) -> None:
    settings = config("full", True, **grpo_options(**replayed()))
    assert not plain_grpo(settings, wrong).agrees(wanted("full", "grpo"))


@pytest.mark.long
def test_at_another_temperature() -> None:
    changes = {"temperature": 0.8}
    agreed = wanted("full", "grpo", **changes)
    assert curve(grpo("single", **replayed(**changes))).agrees(agreed)
    assert max(grpo("single", **changes).series("sampler_difference")) < 1e-4  # sampled as it is trained
    settings = config("full", True, **grpo_options(**replayed(**changes)))
    assert not plain_grpo(settings, temperature=1.0).agrees(agreed)


@pytest.mark.parametrize(
    "name", mostly_long(["single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "sp", "tp", "fsdp2_tp"], [])
)
def test_kl_to_a_copy_of_the_initial_model(name: str) -> None:
    finished, agreed = grpo(name, **replayed(beta=BETA)), wanted("full", "grpo", beta=BETA)
    assert curve(finished).agrees(agreed)
    divergences = finished.series("kl")
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[-1] > 1e-3


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp1", "fsdp2", "zero3", "tp", "cp"], []))
def test_kl_to_the_model_without_its_adapters(name: str) -> None:
    finished = grpo(name, "lora", **replayed(beta=BETA, learning_rate=LORA_RATE))
    assert curve(finished).agrees(wanted("lora", "grpo", beta=BETA, learning_rate=LORA_RATE))
    assert finished.series("kl")[-1] > 1e-4


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dr_grpo", "dapo", "gspo"])
def test_kl_in_each_form_of_the_loss(kind: str) -> None:
    assert curve(grpo("single", **replayed(loss_type=kind, beta=BETA))).agrees(wanted("full", kind, beta=BETA))


@pytest.mark.long
def test_another_weight_of_the_kl_does_not_agree() -> None:
    settings = config("full", True, **grpo_options(**replayed(beta=BETA)))
    assert not plain_grpo(settings, beta=0.9 * BETA).agrees(wanted("full", "grpo", beta=BETA))


@pytest.mark.parametrize("method", mostly_long(["full", "lora"], []))
def test_p1_a_resumed_run_compares_with_the_initial_model(method: str, tmp_path: Path) -> None:
    """Control: compared with the checkpoint's model, its first divergence would be 0."""
    name = "fsdp2" if method == "full" else "single"
    changes = replayed(beta=BETA) if method == "full" else replayed(beta=BETA, learning_rate=LORA_RATE)
    undisturbed = grpo(name, method, **changes)
    again = {**options(method, True, **grpo_options(**changes)), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    resumed = launch_well(tmp_path / "again", load_strategy(name).num_processes, again, strategy=name)
    assert equal_after_resume(undisturbed, resumed)
    assert resumed.series("kl") == undisturbed.series("kl")[HALF:]
    assert resumed.series("kl")[0] > 1e-5


# -- with the sampler --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(["ddp", "fsdp1", "fsdp2", "hsdp", "zero2", "zero3"], ["ddp"]))
def test_every_data_parallel_strategy_samples_the_same(name: str) -> None:
    """The initial weights are equal, and so are the random numbers; a rounding may flip a token."""
    single, sharded = read(0), read(0, grpo(name).run.rollouts)
    pairs = list(zip(single["answers"], sharded["answers"], strict=True))
    assert sum(a == b for a, b in pairs) >= 0.9 * len(pairs)
    assert len({tuple(answer) for answer in single["answers"]}) > len(pairs) / 2  # control: not all alike
    assert max(grpo(name).series("sampler_difference")) < 1e-4


def test_p1_a_resumed_run_samples_the_same_answers_bit_for_bit(tmp_path: Path) -> None:
    undisturbed = grpo("single")
    again = {**options("full", True, **grpo_options()), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    resumed = launch_well(tmp_path / "again", 1, again, strategy="single")
    assert equal_after_resume(undisturbed, resumed)
    assert read(STEPS - 1) == read(STEPS - 1, resumed.run.rollouts)
    assert read(STEPS - 1)["answers"] != read(STEPS - 2)["answers"]


AHEAD: dict[str, Any] = {"steps_per_generation": 3, "learning_rate": 3e-4, "eval_dataset_name": "none"}
"""Each third step samples for three; the rate is high enough for clipping."""


def ahead(name: str, **changes: Any) -> Finished:
    """A run whose steps mostly train on answers of earlier weights."""
    return grpo(name, **{**AHEAD, **changes})


@functools.cache
def plain_ahead(name: str, wrong: str = "") -> plain.Curve:
    """Plain PyTorch on the answers of such a run."""
    settings = config("full", True, **grpo_options(**AHEAD, recorded_answers=str(ahead(name).run.rollouts)))
    return plain_grpo(settings, wrong)


@pytest.mark.parametrize("name", mostly_long(["single", "ddp", "fsdp1", "fsdp2", "zero3"], ["single"]))
def test_steps_on_answers_of_earlier_weights_compare_with_those_weights(name: str) -> None:
    finished = ahead(name)
    assert curve(finished).agrees(plain_ahead(name))
    clipped, seconds = finished.series("clip_ratio"), finished.series("sampling_s")
    assert max(clipped[0::3]) == 0  # these sampled
    assert max(clipped[2::3]) > 0
    assert [number for number, taken in enumerate(seconds) if taken > 0] == list(range(0, STEPS, 3))
    assert max(finished.series("sampler_difference")) < 1e-4


def test_taken_for_answers_of_the_current_weights_they_do_not_agree() -> None:
    assert not plain_ahead("single", "current").agrees(plain_ahead("single"))


@pytest.mark.long
def test_another_run_trains_the_same_on_their_records() -> None:
    finished = ahead("fsdp2")
    replay = grpo("single", **{**AHEAD, "recorded_answers": str(finished.run.rollouts)})
    assert curve(replay).agrees(curve(finished))


@pytest.mark.parametrize("name", mostly_long(["single", "fsdp2"], ["single"]))
def test_p1_a_run_resumed_within_a_generation_goes_on_with_its_answers(name: str, tmp_path: Path) -> None:
    undisturbed = ahead(name)
    again = {**options("full", True, **grpo_options(**AHEAD)), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    resumed = launch_well(tmp_path / "again", load_strategy(name).num_processes, again, strategy=name)
    assert equal_after_resume(undisturbed, resumed)
    taken = resumed.series("sampling_s")
    assert taken[:2] == [0, 0] < taken[2:3]  # the step before the checkpoint sampled for two more
    for step in (HALF, HALF + 1, STEPS - 1):
        assert read(step, undisturbed.run.rollouts) == read(step, resumed.run.rollouts)


@pytest.mark.long
def test_answers_of_other_options_are_sampled_anew(tmp_path: Path) -> None:
    """Forced to go on with other options within a generation: what the checkpoint holds is of another run then."""
    changes = {**AHEAD, "num_generations": 2, "force_resume": True}
    again = {
        **options("full", True, **grpo_options(**changes)),
        "resume_from_checkpoint": ahead("single").checkpoints[0],
    }
    resumed = launch_well(tmp_path / "again", 1, again, strategy="single")
    assert (
        f"step {HALF + 1} is sampled anew: of what the checkpoint holds of it, its answers are to other prompts"
        in resumed.output
    )
    assert len(read(10, resumed.run.rollouts)["answers"]) == 4 * 2


@pytest.mark.long
def test_p0_rerun_is_the_same_bit_for_bit() -> None:
    assert same_bits(grpo("fsdp2"), grpo("fsdp2", again=1))


# -- against TRL -------------------------------------------------------------------------------------------------------


class Recorded(GRPOTrainer):
    """Trains on recorded answers."""

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        step = read(self.state.global_step, self.folder)
        prompts = [self.documents[number] for number in step["prompts"]]
        width, most = max(map(len, prompts)), max(map(len, step["answers"]))
        left = [[0] * (width - len(prompt)) for prompt in prompts]
        right = [[0] * (most - len(answer)) for answer in step["answers"]]

        def padded(rows: list[list[Any]], ends: list[list[int]], before: bool) -> torch.Tensor:
            return torch.tensor([end + row if before else row + end for row, end in zip(rows, ends, strict=True)])

        batch = {
            "prompt_ids": padded(prompts, left, True),
            "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], left, True),
            "completion_ids": padded(step["answers"], right, False),
            "completion_mask": padded([[1] * len(answer) for answer in step["answers"]], right, False),
            "old_per_token_logps": padded(step["log_probs"], right, False),
            "advantages": advantages(step["rewards"], self.kind),
            "num_items_in_batch": torch.tensor(sum(map(len, step["answers"]))),
        }
        if self.beta:
            ids, mask = (
                torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1) for part in ("ids", "mask")
            )
            with torch.no_grad():
                unmoved, *_ = self._get_per_token_logps_and_entropies(self.ref_model, ids, mask, most)
            batch["ref_per_token_logps"] = unmoved
        return batch


def trl_curve(folder: Path, kind: str, **changes: Any) -> plain.Curve:
    """Loss and gradient norm of TRL's trainer, whose micro-batch is the global batch."""
    settings = config("full", True, **grpo_options(**replayed(**changes)))
    count = settings.global_batch_size * GROUP
    arguments = GRPOConfig(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=count, num_generations=GROUP,
        learning_rate=settings.learning_rate, lr_scheduler_type="cosine", weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm, logging_steps=1, logging_nan_inf_filter=False, save_strategy="no",
        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, dataloader_pin_memory=False,
        epsilon=EPSILON, max_completion_length=MOST_TOKENS, loss_type="grpo" if kind == "gspo" else kind,
        importance_sampling_level="sequence" if kind == "gspo" else "token", disable_dropout=True,
        temperature=settings.temperature, beta=settings.beta or 0.0, use_bias_correction_kl=False,
    )  # fmt: skip
    trainer = Recorded(
        AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32), lambda **more: [0.0], arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * count),
        processing_class=AutoTokenizer.from_pretrained(BASE_DIR),
    )  # fmt: skip
    from trainers.data.prepare import prepare
    from trainers.data.rollouts import prompt_of

    data = prepare(settings, "train")
    trainer.documents = [prompt_of(data, number).tokens.tolist() for number in range(len(data))]
    trainer.kind, trainer.folder = kind, Path(str(settings.recorded_answers))
    trainer.train()
    logged = [row for row in trainer.state.log_history if "grad_norm" in row]
    return plain.Curve([row["loss"] for row in logged], [row["grad_norm"] for row in logged])


KINDS_OF_TRL = ("grpo", "dr_grpo", "dapo", "gspo")
AGAINST_TRL = [(kind, {}) for kind in KINDS_OF_TRL] + [
    (kind, {"temperature": 0.8, "beta": BETA}) for kind in KINDS_OF_TRL
]


@pytest.mark.parametrize(("kind", "changes"), mostly_long(AGAINST_TRL, [AGAINST_TRL[4]]))
def test_losses_and_gradient_norms_equal_those_of_trl(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert curve(grpo("single", **replayed(loss_type=kind, **changes))).agrees(trl_curve(tmp_path, kind, **changes))
