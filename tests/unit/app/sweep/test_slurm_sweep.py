"""Sweeps in SLURM, with stand-ins for its programs and for what trains; tests/slurm has a real cluster."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.launch import slurm
from app.runs.runs import true_state as run_state
from app.schedulers import slurm as programs
from app.schedulers.slurm import SCRIPT, forget_jobs
from app.sweep import runner
from app.sweep.plan import SWEEP, make_plan
from app.sweep.record import SweepFolder, SweepRecord
from app.sweep.report import document_of
from app.sweep.runner import Runner, StopAsked
from app.sweep.trial_runs import TrialRuns
from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import RunFolder

STEPS = 9
PROGRAMS = {
    "sbatch": '[ $(ls jobs | wc -l) -lt "${MOST_JOBS:-99}" ] || { echo "over the limit" >&2; exit 1; }\n'
              'for word; do script="$word"; done\nnumber=$(($(ls scripts | wc -l) + 1))\n'
              'echo "$script" > scripts/$number\necho PENDING > jobs/$number\necho $number',
    "squeue": 'for job in $(ls jobs); do echo "$job|$(cat jobs/$job)|0|Resources|"; done',
    "scontrol": 'echo "JobId=$3"; echo "   Command=$(cat scripts/$3)"',
    "scancel": 'rm jobs/"$1"; echo "$1" >> cancelled',
}  # fmt: skip


class MadeUpCluster:
    """Starts the jobs that wait, one step of a job's life at each look; a run's loss is its learning rate.

    Args:
        folder: folder of the stand-ins.
        preempts: number of a job that SLURM preempts, and starts again.
        starts: whether jobs are ever started.
    """

    def __init__(self, folder: Path):
        self.folder, self.preempts, self.starts = folder, "", True
        self.most, self.causes, self.seen = 0, set[str](), set[str]()

    def jobs(self) -> dict[str, str]:
        return {path.name: path.read_text().strip() for path in (self.folder / "jobs").iterdir()}

    def submitted(self) -> list[RunFolder]:
        scripts = sorted((self.folder / "scripts").iterdir(), key=lambda path: int(path.name))
        return [RunFolder(path.read_text().strip().removesuffix(f"/{SCRIPT}")) for path in scripts]

    def look(self, record: SweepRecord) -> None:
        self.causes |= {str(run.cause) for trial in record.trials for run in trial.runs if run.state == "running"}
        self.most = max(self.most, len(self.jobs()))
        for job, state in self.jobs().items() if self.starts else ():
            run, file = self.submitted()[int(job) - 1], self.folder / "jobs" / job
            if job not in self.seen:
                self.seen.add(job)
            elif state == "PENDING":
                file.write_text("RUNNING")
            elif job == self.preempts:
                run.write_state(
                    state="stopped", cause="stopped by a stop request", scheduler={"kind": "slurm", "job": job}
                )
                file.write_text("PENDING" if state == "COMPLETING" else "COMPLETING")
                self.preempts = self.preempts if state == "RUNNING" else ""
            else:
                self.train(run, job)
                file.unlink()

    def train(self, run: RunFolder, job: str) -> None:
        values = read_yaml(run.config)
        step = values.get("stop_at_step") or STEPS
        rows = [{"step": number, "loss": float(values["learning_rate"])} for number in range(1, step + 1)]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        scheduler = {"kind": "slurm", "job": job, "restarts": 0}
        run.write_state(state="done" if step == STEPS else "stopped", step=step, cause=None, scheduler=scheduler)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeUpCluster:
    folder = tmp_path / "cluster"
    for name in ("bin", "jobs", "scripts"):
        (folder / name).mkdir(parents=True)
    for name, lines in PROGRAMS.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\ncd {folder}\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(runner, "CLUSTER_POLL", 0.0)
    monkeypatch.setattr(programs, "_FRESH", 0.0)
    monkeypatch.setattr(slurm, "preflight", lambda job, quiet, elsewhere: None)
    forget_jobs()
    return MadeUpCluster(folder)


def begun(tmp_path: Path, *words: str) -> SweepFolder:
    line = ["tiny-lora", "--on", "slurm", "--gpus_per_node", "0", "--eval_dataset_name", "none", *words]
    args = SWEEP.read([*line, "--max_steps", str(STEPS), "--runs_dir", str(tmp_path / "runs")])
    assert args is not None
    plan = make_plan(args)
    plan.folder.path.mkdir(parents=True)
    plan.folder.write(plan.record)
    return plan.folder


def runner_of(folder: SweepFolder, show: Callable[[SweepRecord], None]) -> Runner:
    return Runner(folder, folder.read(), TrialRuns(folder), lambda line: None, show)


def finished(folder: SweepFolder, cluster: MadeUpCluster) -> dict[str, Any]:
    runner_of(folder, cluster.look).go()
    return document_of(folder, folder.read())


def test_each_run_is_a_job_and_no_more_wait_than_asked(tmp_path: Path, cluster: MadeUpCluster) -> None:
    rates = "1e-4,1e-3,1e-2"
    words = ["--learning_rate", rates, "--parallel", "2", "--partition", "gpu", "--time", "30", "--nodes", "2"]
    folder = begun(tmp_path, *words)
    document = finished(folder, cluster)
    assert [(run["state"], run["metric"], run["step"]) for run in document["runs"]] == [
        ("done", float(rate), STEPS) for rate in rates.split(",")
    ]
    assert (document["leader"], len(cluster.submitted()), cluster.most) == (1, 3, 2)
    script = (folder.run(folder.read().trials[2].runs[0]).path / SCRIPT).read_text()
    assert {"#SBATCH --partition=gpu", "#SBATCH --time=30", "#SBATCH --nodes=2"} <= set(script.splitlines())
    assert any("waits for free nodes (Resources)" in cause for cause in cluster.causes)


def test_halving_stops_jobs_and_goes_on_in_new_ones(tmp_path: Path, cluster: MadeUpCluster) -> None:
    folder = begun(tmp_path, "--learning_rate", "1e-3,1e-4,1e-2", "--halving", "3", "--time", "30")
    document = finished(folder, cluster)
    assert [(run["state"], run["step"]) for run in document["runs"]] == [("paused", 3), ("done", STEPS), ("paused", 3)]
    ids = [run["id"] for run in document["runs"]]
    assert [run.id for run in cluster.submitted()] == [*ids, ids[1]]
    assert "#SBATCH --time=30\n" in (folder.path.parent / ids[1] / SCRIPT).read_text()


def test_what_slurm_does_not_take_is_submitted_when_another_has_ended(
    tmp_path: Path, cluster: MadeUpCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOST_JOBS", "2")
    folder = begun(tmp_path, "--lora_r", "2,4,8", "--halving", "3")
    assert [run["state"] for run in finished(folder, cluster)["runs"]] == ["done", "paused", "paused"]
    assert cluster.most == 2
    monkeypatch.setenv("MOST_JOBS", "0")
    document = finished(begun(tmp_path / "none", "--lora_r", "4,8"), cluster)
    assert {(run["state"], run["cause"]) for run in document["runs"]} == {
        ("failed", "SLURM did not take the job: over the limit")
    }


def test_a_preempted_run_is_waited_for(tmp_path: Path, cluster: MadeUpCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has stopped, and its job is about to be queued again."""
    cluster.preempts = "1"
    assert finished(begun(tmp_path, "--lora_r", "4,8"), cluster)["runs"][0]["state"] == "done"
    monkeypatch.setattr("app.sweep.trial_runs.may_come_back", lambda state: False)
    cluster.preempts = "3"
    document = finished(begun(tmp_path / "control", "--lora_r", "4,16"), cluster)
    assert document["runs"][0]["state"] == "stopped"  # control


def test_a_stop_cancels_what_waits_and_going_on_submits_it_again(tmp_path: Path, cluster: MadeUpCluster) -> None:
    folder, cluster.starts = begun(tmp_path, "--lora_r", "4,8,16", "--parallel", "2"), False
    stopped = runner_of(folder, lambda record: folder.stop_request.touch())
    with pytest.raises(StopAsked):
        stopped.go()
    first, second = cluster.submitted()
    cluster_job = cluster.folder / "jobs" / "2"
    cluster_job.write_text("RUNNING")
    second.write_state(state="running", step=4)

    def saves(record: SweepRecord) -> None:
        if second.stop_request.exists() and cluster_job.exists():
            second.write_state(state="stopped", cause="stopped by a stop request")
            cluster_job.unlink()

    stopped.show = saves
    stopped.stop()
    assert (cluster.folder / "cancelled").read_text() == "1\n"
    assert run_state(first)["cause"] == "cancelled before it started"
    assert [trial.state for trial in folder.read().trials] == ["stopped", "stopped", "waiting"]
    folder.stop_request.unlink()
    cluster.starts = True
    assert [run["state"] for run in finished(folder, cluster)["runs"]] == ["done"] * 3
    assert len(cluster.submitted()) == 5


def test_a_stop_that_a_starting_job_has_missed_is_asked_again(tmp_path: Path, cluster: MadeUpCluster) -> None:
    """Its first node takes an old request away before it trains."""
    folder, cluster.starts = begun(tmp_path, "--seeds", "1"), False
    stopped = runner_of(folder, lambda record: folder.stop_request.touch())
    with pytest.raises(StopAsked):
        stopped.go()
    (run,) = cluster.submitted()
    job, asked = cluster.folder / "jobs" / "1", 0
    job.write_text("RUNNING")

    def takes_over(record: SweepRecord) -> None:
        nonlocal asked
        asked += run.stop_request.exists()
        run.stop_request.unlink(missing_ok=True)
        if asked == 2:
            run.write_state(state="stopped", cause=None)
            job.unlink(missing_ok=True)

    stopped.show = takes_over
    stopped.stop()
    assert asked == 2


def test_a_start_that_was_cut_off_leaves_no_trace(tmp_path: Path, cluster: MadeUpCluster) -> None:
    """Killed between writing the script and submitting it."""
    folder = begun(tmp_path, "--lora_r", "4,8")
    record = folder.read()
    run = folder.run(record.trials[0].runs[0])
    runs = TrialRuns(folder)

    def killed(run: RunFolder) -> str:
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slurm, "submit", killed)
        patch.setattr(slurm, "take_back_submission", lambda run: None)
        with pytest.raises(SystemExit):
            runs.start(record, record.trials[0], record.trials[0].runs[0], 0, {})
    assert (run.path / SCRIPT).exists()
    record.trials[0].runs[0].state = "running"
    folder.write(record)
    assert [entry["state"] for entry in finished(folder, cluster)["runs"]] == ["done"] * 2


def test_code_is_not_taken_from_the_folder_of_a_sweep(tmp_path: Path, cluster: MadeUpCluster) -> None:
    folder = begun(tmp_path, "--lora_r", "4,8")
    record = folder.read()
    assert not {"slurm_extra", "container"} & set(record.cluster)
    record.cluster |= {"slurm_extra": "--prolog=/tmp/x", "container": "/tmp/x"}
    folder.write(record)
    finished(folder, cluster)
    assert all("/tmp/x" not in (run.path / SCRIPT).read_text() for run in cluster.submitted())
    record.cluster = {"partition": "a\n#SBATCH --prolog=/tmp/x"}
    with pytest.raises(ConfigError, match="partition"):
        TrialRuns(folder).start(record, record.add_trial({"lora_r": "2"}), record.trials[-1].runs[0], 0, {})


def test_the_site_file_holds_for_each_run(tmp_path: Path, cluster: MadeUpCluster) -> None:
    site = tmp_path / "config" / "tunesmith" / "site.yaml"
    site.parent.mkdir(parents=True)
    site.write_text('slurm:\n  partition: gpu\n  time: "8:00:00"\n  slurm_extra: exclusive\n')
    finished(begun(tmp_path, "--lora_r", "4,8", "--time", "30"), cluster)
    for run in cluster.submitted():
        lines = set((run.path / SCRIPT).read_text().splitlines())
        assert {"#SBATCH --partition=gpu", "#SBATCH --time=30", "#SBATCH --exclusive"} <= lines
