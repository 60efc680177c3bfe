"""Evidence, remedies and numbers of a diagnosis; what is plain to see in curves, and what is not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.command_line import Args
from app.diagnosis.advice import Diagnosis, advice, diagnose
from app.diagnosis.facts import Metrics
from app.diagnosis.plan import plan_of
from app.diagnosis.rules import RULES
from app.runs.metrics import Curves
from app.services.diagnosis import Diagnoses, apply_remedy, remedied
from tests.made_runs import add_sealed_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, log_line, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")
BAD_STEP = "step 9: loss nan, gradient norm nan, on rank 1, in the batch from data.jsonl:7; no weight was updated; x"
CHECKED = "checking that the run is set up as requested"
"""What all ranks of a start do together, in the message of the ranks that fail in it."""


def failed(tmp_path: Path, cause: str, **more: Any) -> RunFolder:
    config = {"per_device_train_batch_size": 8, "learning_rate": 3e-3, **more.pop("config", {})}
    return made_run(tmp_path / "runs", "mine", "failed", steps=8, cause=cause, config=config, **more)


def only(run: RunFolder, **more: Any) -> Diagnosis:
    (found,) = diagnose(run, **more)
    return found


# -- evidence ----------------------------------------------------------------------------------------------------------


def test_a_cause_names_rank_step_and_rows(tmp_path: Path) -> None:
    found = only(failed(tmp_path, BAD_STEP))
    assert "at step 9, on rank 1, in the batch from data.jsonl:7" in found.cause
    assert (found.evidence[0].text, found.evidence[0].step) == (BAD_STEP, 9)


def test_memory_names_rank_and_section(tmp_path: Path) -> None:
    run = failed(tmp_path, "rank 1: OutOfMemoryError: CUDA out of memory")
    write_json(run.heartbeats / "rank-1.json", {"rank": 1, "step": 8, "section": "backward"})
    write_json(run.out_of_memory, {"rank": 1, "section": "backward"})
    assert only(run).cause == "Rank 1 ran out of memory in backward of step 9."


def test_what_the_user_wrote_is_no_cause(tmp_path: Path) -> None:
    """A mistake or error may quote data; the words in it decide nothing."""
    quotes = ["CUDA out of memory", "OutOfMemoryError: x", "rank 1 was killed by SIGKILL", "[Errno 28] No space left",
              "Connection refused", "No module named 'torch'"]  # fmt: skip
    for quote in quotes:
        found = only(failed(tmp_path / quote[:3], f"ValueError: row 3 says: {quote}"))
        assert found.rule == "", quote
        assert found.cause.startswith("ValueError: row 3 says")


def test_a_hostile_log_is_quoted_harmlessly(tmp_path: Path) -> None:
    run = failed(tmp_path, "RuntimeError: a thing that no rule knows", launched_at="2026-11-20T08:00:00")
    with open(run.log, "a", encoding="utf-8") as log:
        log.write(log_line("rank 0", "ValueError: \x1b[31m<img src=x onerror=alert(1)>\u202e" + "x" * 10_000))
    (entry,) = only(run).evidence
    assert "\x1b" not in entry.text
    assert "\u202e" not in entry.text
    assert len(entry.text) <= 300


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(["cause", "step", "heartbeats", "out_of_memory", "state", "launched_at"]),
                       st.one_of(st.none(), st.integers(), st.text(), st.lists(st.integers()),
                                 st.dictionaries(st.text(), st.text()))))  # fmt: skip
def test_a_damaged_state_has_a_diagnosis_or_none(state: dict[str, Any]) -> None:
    json.dumps([found.as_json() for found in advice({"state": "failed", **state}, Metrics(), [], None)])


def test_every_rule_has_a_name_of_its_own_and_a_way_to_match() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.pattern or rule.log or rule.trend for rule in RULES)


def test_causes_of_a_start_that_are_not_provoked_elsewhere(tmp_path: Path) -> None:
    """As our own code words them; each is raised there."""
    model = "model_name_or_path=owner/x"
    sentences = {
        "gated_model": f"{model} is gated; accept its terms at https://huggingface.co/owner/x, then set HF_TOKEN",
        "refused_token": f"{model}: the Hub refuses your token (status 401); set HF_TOKEN",
        "wrong_tokenizer": f"{model}: its tokenizer produces token 700 but the model has embeddings for 512 tokens",
        "past_the_end": "/runs/a/checkpoints/step-00000040 is at step 40, past the 20 of this run; raise max_steps",
        "other_launch": "the run is not set up as requested: processes: requested 4, got 1",
        "other_backend": f"{CHECKED} failed: rank 1: communication: requested nccl, got gloo",
        "other_kernel": "the run is not set up as requested: attention: requested flex, got sdpa",
        "other_dtype": f"{CHECKED} failed: trained weights: requested float32, got bfloat16, float32",
        "other_layers": "the run is not set up as requested: 4-bit layers: requested 28, got 27",
        "other_layout": f"{CHECKED} failed: rank 0: weights held: requested 1/2, got 1.000",
        "not_as_requested": "the run is not set up as requested: a thing: requested 4, got 1",
        "launcher_failed": "the launcher could not be started: No such file or directory",
        "never_started": "it never started: there is no state file",
        "vanished": "its processes ended without reporting a cause",
        "folder_gone": "the run folder /runs/a was removed while it trained",
    }
    for rule, sentence in sentences.items():
        assert only(failed(tmp_path / rule, sentence)).rule == rule
    (changed,) = only(failed(tmp_path / "end", sentences["past_the_end"], config={"max_steps": 20})).remedies
    assert changed.options == {"max_steps": "40"}


# -- remedies ----------------------------------------------------------------------------------------------------------


def test_remedies_are_numbered_and_applied_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    found = only(failed(tmp_path, BAD_STEP))
    assert [change.number for change in found.remedies] == [1, 2]
    assert found.remedies[0].options == {"non_finite": "skip"}
    args = Args(own={"apply": "2"})
    args.request.options = {"learning_rate": "0.5"}
    apply_remedy([found], args)
    assert args.request.options == {"learning_rate": "0.5"}
    for number in ("0", "3", "x", "-1", ""):
        with pytest.raises(ConfigError, match="is not the number of a remedy; use 1 to 2"):
            apply_remedy([found], Args(own={"apply": number}))
    with pytest.raises(ConfigError, match="there is no remedy for this run"):
        apply_remedy([], Args(own={"apply": "1"}))


def test_a_change_of_what_was_saved_is_forced_and_nothing_else_is(tmp_path: Path) -> None:
    run = failed(tmp_path, BAD_STEP)
    add_sealed_checkpoint(run, 5)
    assert [change.force for change in only(run).remedies] == [False, True], "a skipped step is allowed; a rate is not"
    manifest = run.checkpoints / "step-00000005" / "manifest.json"
    (run.checkpoints / "step-00000005").rename(run.checkpoints / "old")
    add_sealed_checkpoint(run, 6, versions={"torch": "0.1"})
    assert not manifest.exists()
    assert [change.force for change in only(run).remedies] == [False, False], "another torch is the user's to allow"


def test_an_option_that_changes_nothing_is_no_remedy(tmp_path: Path) -> None:
    options = {"non_finite": "skip"}
    assert [change.options for change in only(failed(tmp_path, BAD_STEP, config=options)).remedies] == [
        {"learning_rate": "0.0003"}
    ]


@pytest.mark.parametrize(
    ("fitting", "size"), [(None, "4"), ({1, 2, 4, 8}, "4"), ({1, 2}, "2"), ({1}, "1"), (set(), "1")]
)
def test_the_planner_chooses_the_micro_batch(fitting: set[int] | None, size: str, tmp_path: Path) -> None:
    """Unless it does not know, or expects to fit what has just run out of memory."""
    run = failed(tmp_path, "rank 1: OutOfMemoryError: CUDA out of memory", world=2)

    def fits(configs: Any, strategy: Any) -> list[bool | None]:
        sizes = [config.per_device_train_batch_size for config in configs]
        assert sizes == [8, 4, 2, 1], "all at once, as each count of the model takes seconds"
        return [None if fitting is None else size in fitting for size in sizes]

    assert only(run, fits=fits).remedies[0].options == {"per_device_train_batch_size": size}


def test_a_page_applies_what_it_showed(tmp_path: Path) -> None:
    run = failed(tmp_path, BAD_STEP)
    shown = Diagnoses(Curves()).of(run, 0)
    job = remedied(run, shown, "--non_finite=skip")
    assert (job.config.non_finite, job.run.path, job.resume_from) == ("skip", run.path, "auto")
    for other in ("", "--learning_rate=9", "--output_dir=/tmp", "x" * 10_000):
        with pytest.raises(ConfigError, match="no longer among those of the run"):
            remedied(run, shown, other)


# -- curves ------------------------------------------------------------------------------------------------------------


def trend(tmp_path: Path, losses: list[float], evals: dict[int, float] | None = None, **more: Any) -> list[str]:
    run = made_run(tmp_path / "runs", f"mine-{random.getrandbits(60)}", "done", **more)
    rows: list[dict[str, Any]] = [
        {"step": step, "attempt": 0, "loss": loss, "learning_rate": 1e-4, "elapsed_s": step * 1.0, "data_wait": 0.01}
        for step, loss in enumerate(losses, 1)
    ]
    rows += [{"step": step, "attempt": 0, "eval_loss": loss} for step, loss in (evals or {}).items()]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [found.rule for found in diagnose(run)]


def test_flat_curves_are_told_from_noisy_ones(tmp_path: Path) -> None:
    dice = random.Random(1)
    assert trend(tmp_path, [2 + dice.gauss(0, 0.01) for _ in range(200)]) == ["flat_loss"]
    assert trend(tmp_path, [2 - step / 1000 + dice.gauss(0, 0.01) for step in range(200)]) == []
    assert trend(tmp_path, [0.2 + dice.gauss(0, 0.002) for _ in range(200)]) == [], "nothing left to learn"
    for _ in range(30):  # a little learned below much noise: no verdict
        assert trend(tmp_path, [2 - step / 2000 + dice.gauss(0, 0.4) for step in range(100)]) == []
    assert trend(tmp_path, [2.0] * 20) == [], "too short to say"


def test_a_loss_that_rises_and_one_that_comes_back(tmp_path: Path) -> None:
    falls = [3 - step / 100 for step in range(100)]
    assert trend(tmp_path, [*falls, *[2 + step / 20 for step in range(100)]]) == ["rising_loss"]
    assert trend(tmp_path, [*falls, 9.0, 9.0, *[2 - step / 200 for step in range(100)]]) == []


def test_an_evaluation_that_rises_and_one_that_wavers(tmp_path: Path) -> None:
    falls = [2 - step / 60 for step in range(100)]
    assert trend(tmp_path, falls, {20: 1.5, 40: 1.2, 60: 1.3, 80: 1.5, 100: 1.9}) == ["overfit"]
    assert trend(tmp_path, falls, {20: 1.5, 40: 1.2, 60: 1.21, 80: 1.19, 100: 1.2}) == []
    assert trend(tmp_path, falls, {20: 1.5, 40: 1.2, 60: 1.3, 80: 1.25, 100: 1.4}) == [], "it comes and goes"
    best = {"load_best_model_at_end": True, "eval_dataset_name": "embedded"}
    assert trend(tmp_path, falls, {20: 1.2, 60: 1.3, 80: 1.5, 100: 1.9}, config=best) == [], "the best is exported"


@pytest.mark.parametrize(("slow", "is_said"), [({1: 3}, True), ({1: 2}, False), ({1: 5, 0: 1}, False), ({}, False)])
def test_a_rank_is_slow_only_if_it_is_always_the_same(slow: dict[int, int], is_said: bool, tmp_path: Path) -> None:
    plan = plan_of(made_run(tmp_path, "mine", "done"), {"state": "done"})
    found = advice({"state": "done"}, Metrics(30, {}, {}, {"elapsed_s": 20.0}, slow), [], plan)
    assert [entry.rule for entry in found] == ["slow_rank"] * is_said


def test_low_use_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, "mine", "done")
    plan = plan_of(run, {"state": "done"})
    assert plan is not None
    object.__setattr__(plan, "gpu_gib", 80.0)
    object.__setattr__(plan, "config", plan.config.model_copy(update={"per_device_train_batch_size": 2}))
    points = {"step": [float(step) for step in range(30)], "mfu": [0.04] * 30}
    (found,) = advice({"state": "done"}, Metrics(30, points, {}, {"memory_gib": 9.0}), [], plan)
    assert found.rule == "small_batch"
    assert found.remedies[0].options == {"per_device_train_batch_size": "4"}
    assert advice({"state": "done"}, Metrics(30, points, {}, {"memory_gib": 60.0}), [], plan) == []


def test_a_page_looks_again_only_when_something_changes(tmp_path: Path) -> None:
    run, known = failed(tmp_path, BAD_STEP), Diagnoses(Curves())
    first = known.of(run, "failed")
    assert known.of(run, "failed") is first
    run.write_state(cause=None, state="running", host="elsewhere")
    assert known.of(run, "failed") is first
    assert known.of(run, "running") == []


def test_metrics_that_are_not_read_to_the_end_give_no_verdict(tmp_path: Path) -> None:
    run = made_run(tmp_path, "mine", "done", steps=20_000)
    run.metrics.write_text("".join(json.dumps({"step": step, "loss": 2.0, "learning_rate": 1e-9}) + "\n" for step in
                                   range(1, 20_000)))  # fmt: skip
    assert [found.rule for found in diagnose(run)] == ["flat_loss"]
    assert diagnose(run, Curves(), seconds=0.0) == []


def test_live_and_healthy_runs_have_none(tmp_path: Path) -> None:
    for state in ("queued", "starting", "running", "stopping", "stopped", "done"):
        assert diagnose(made_run(tmp_path, state, state, host="elsewhere")) == []
