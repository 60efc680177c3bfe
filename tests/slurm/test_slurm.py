"""Runs that a real SLURM starts on two nodes: time limits, preemption, lost nodes, full disks, what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.sweep.record import SweepFolder
from app.sweep.report import document_of
from tests import shared
from tests.detached import SMALL, TUNESMITH
from tests.faults.disk import SmallDisk, unmount
from tests.launching import ROOT, flags
from tests.slurm.cluster import Cluster, missing
from trainers.run.folder import END_STATES, RunFolder

STEPS, LONG = 60, 500
OPTIONS: dict[str, Any] = {
    **SMALL,
    "max_train_samples": 4 * STEPS,
    "max_steps": STEPS,
    "save_steps": 0,
    "logging_steps": 1,
}


class Site:
    """A cluster, and the folders that its machines share; `disk` is small."""

    def __init__(self, cluster: Cluster, home: Path, disk: SmallDisk):
        self.cluster, self.home, self.disk = cluster, home, disk
        self.variables = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home / "state"), "CUDA_VISIBLE_DEVICES": ""}
        self.variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CONFIG_HOME": str(home / "config")}
        self.watcher = subprocess.Popen(
            cluster.inside("head", sys.executable, "-m", "tests.slurm.watch"), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**cluster.environment, **self.variables},
        )  # fmt: skip

    def tunesmith(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs the command on the head node."""
        return self.cluster.run(*TUNESMITH, *words, check=check, **self.variables)

    def submit(self, folder: str | Path, *words: str, gpus: int = 0, **options: Any) -> RunFolder:
        run = RunFolder(self.home / folder)
        line = ["train", "tiny-lora", "--on", "slurm", "--nodes", "2", "--gpus_per_node", str(gpus)]
        self.tunesmith(*line, *words, "--json", *flags({**OPTIONS, "output_dir": run.path, **options}))
        return run

    def show(self, run: RunFolder) -> dict[str, Any]:
        """What the head node shows of a run."""
        assert self.watcher.stdin
        assert self.watcher.stdout
        self.watcher.stdin.write(f"{run.path}\n")
        self.watcher.stdin.flush()
        shown: dict[str, Any] = json.loads(self.watcher.stdout.readline())
        return shown

    def job(self, run: RunFolder) -> str:
        return str((run.read_state() or {})["scheduler"]["job"])

    def until(self, run: RunFolder, condition: Any, seconds: float = 240) -> dict[str, Any]:
        """Waits until what is shown of a run meets a condition."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            seen.update(self.show(run))
            return bool(condition(seen))

        self.cluster.wait(holds, seconds, lambda: f"{run.id} stays {seen}\n{run.log.read_text()[-3000:]}")
        return seen

    def begun(self, run: RunFolder, step: int) -> None:
        """Waits until a step of a run is logged."""
        self.cluster.wait(lambda: run.metrics.exists() and f'"step": {step},' in run.metrics.read_text(), 240,
                          f"step {step} of {run.id} was not reached")  # fmt: skip

    def job_ends(self, job: str, state: str) -> None:
        """Waits until SLURM has ended a job in a state; its last processes end after the run."""
        self.cluster.wait(lambda: self.cluster.job(job).get("JobState") == state, 60, f"it is not {state}")

    def at_once(self, run: RunFolder) -> None:
        """Starts a job that was queued again in some seconds, rather than after SLURM's two minutes.

        A node refuses it in the second in which its last start was revoked.
        """
        self.cluster.run("scontrol", "update", f"JobId={self.job(run)}", "StartTime=now+3seconds")


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    if absent := missing():
        pytest.fail(f"a cluster needs {', '.join(absent)}: `make test-slurm` installs it")
    home = Path(tempfile.mkdtemp(prefix="slurm-"))  # pytest's folders are too long for the path of a socket
    disk = SmallDisk(home / "disk")  # before the nodes, which see no later mounts
    try:
        with Cluster(home / "cluster") as cluster:
            site = Site(cluster, home, disk)
            yield site
            site.watcher.kill()
    finally:
        unmount(disk.folder)
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def uncut(site: Site) -> RunFolder:
    """A run that nothing interrupted."""

    def make(folder: Path) -> None:
        run = site.submit(folder / "run")
        ended = site.until(run, lambda row: row["state"] in END_STATES)
        assert (ended["state"], ended["step"]) == ("done", STEPS), run.log.read_text()[-3000:]
        site.job_ends(site.job(run), "COMPLETED")

    return RunFolder(shared.once("slurm-uncut", make) / "run")


def losses(run: RunFolder) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; of a step that was trained twice, the last."""
    rows = map(json.loads, run.metrics.read_text().splitlines())
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def weights(run: RunFolder) -> bytes:
    return (run.model / "adapter_model.safetensors").read_bytes()


def test_two_nodes_train_one_run(uncut: RunFolder) -> None:
    assert "machine 1: joining attempt 0" in uncut.log.read_text()
    script = (uncut.path / "slurm.sh").read_text().splitlines()
    assert "#SBATCH --nodes=2" in script
    assert not [line for line in script if "gpus-per-node" in line]


@pytest.mark.long
def test_a_run_cut_five_times_by_the_limit_of_its_job_is_bit_for_bit_the_same(site: Site, uncut: RunFolder) -> None:
    """By the signal that SLURM sends before the limit."""
    run, cuts, reached = site.submit("cut"), 5, 0
    for _ in range(cuts):
        site.begun(run, reached + 2)
        site.cluster.run("scancel", "--batch", "--signal=USR2", site.job(run))
        row = site.until(run, lambda row: row["state"] == "queued" and "BeginTime" in str(row["cause"]))
        waits = rf"SLURM job {site.job(run)} is to start a little later \(BeginTime\)"
        assert re.fullmatch(rf"stopped at step \d+ by its time limit; {waits}", row["cause"])
        reached = row["step"]
        site.at_once(run)
    assert site.until(run, lambda row: row["state"] in END_STATES)["step"] == STEPS
    assert site.cluster.job(site.job(run))["Restarts"] == str(cuts)
    assert (losses(run), weights(run)) == (losses(uncut), weights(uncut))


@pytest.mark.long
def test_a_run_cut_by_two_limits_of_a_minute_is_bit_for_bit_the_same(site: Site) -> None:
    """By SLURM's own clock; then the limit is lifted."""
    options = {"max_steps": LONG, "max_train_samples": 4 * LONG}
    run, reached = site.submit("limits", "--time", "1", "--signal_before", "15", **options), [0]
    for cut in (1, 2):
        site.begun(run, reached[-1] + 1)
        row = site.until(run, lambda row: row["state"] in END_STATES or "BeginTime" in str(row["cause"]))
        assert re.match(r"stopped at step \d+ by its time limit; ", row["cause"]), row
        reached.append(row["step"])
        site.cluster.run("scontrol", "update", f"JobId={site.job(run)}", f"TimeLimit={1 if cut == 1 else 60}")
        site.at_once(run)
    assert reached == sorted({*reached}), "each start went on"
    ended = site.until(run, lambda row: row["state"] in END_STATES, 600)
    assert (ended["state"], ended["step"]) == ("done", LONG), ended
    assert site.cluster.job(site.job(run))["Restarts"] == "2"
    other = site.submit("no-limits", **options)
    assert site.until(other, lambda row: row["state"] in END_STATES, 600)["state"] == "done"
    assert (losses(run), weights(run)) == (losses(other), weights(other))


def test_a_preempted_run_says_so_and_comes_back_bit_for_bit(site: Site, uncut: RunFolder) -> None:
    run = site.submit("preempted")
    site.begun(run, 6)
    batch = site.home / "urgent.sh"
    batch.write_text(f"#!/bin/bash\nuntil [ -e {site.home}/seen ]; do sleep 0.1; done\n")
    line = ["--parsable", "--nodes=2", "--exclusive", "--partition=urgent", f"--output={site.home}/urgent.out"]
    urgent = site.cluster.run("sbatch", *line, str(batch)).stdout.strip()
    row = site.until(run, lambda row: row["state"] == "queued" and site.cluster.job(urgent)["JobState"] == "RUNNING")
    waits = r"is to start a little later \(BeginTime\)|waits for free nodes \(Resources\)"
    assert re.fullmatch(rf"SLURM job {site.job(run)} was preempted and queued again, and ({waits})", row["cause"])
    assert 6 <= row["step"] < STEPS
    (site.home / "seen").touch()
    site.job_ends(urgent, "COMPLETED")
    site.at_once(run)
    assert site.until(run, lambda row: row["state"] in END_STATES)["state"] == "done"
    assert (losses(run), weights(run)) == (losses(uncut), weights(uncut))


@pytest.mark.long
def test_a_full_disk_ends_a_run_that_goes_on_once_there_is_room(site: Site, uncut: RunFolder) -> None:
    run = site.submit(site.disk.folder / "full", save_steps=10)
    site.begun(run, 3)
    site.disk.fill(run, left=100_000)
    row = site.until(run, lambda row: row["state"] in END_STATES)
    assert (row["state"], "bytes free, a checkpoint needs" in row["cause"]) == ("failed", True), row
    site.job_ends(site.job(run), "FAILED")
    site.disk.make_room()
    site.tunesmith("resume", str(run.path))
    assert site.until(run, lambda row: row["state"] in END_STATES)["state"] == "done"
    assert (losses(run), weights(run)) == (losses(uncut), weights(uncut))


def test_slurm_grants_gpus_and_nodes_without_them_end_at_once(site: Site) -> None:
    """SLURM counts files that are no GPUs, so the nodes find none: all refuse, and none waits for another."""
    run = site.submit("gpus", gpus=2, global_batch_size=8)
    row = site.until(run, lambda row: row["state"] in END_STATES, 60)
    problem = "node node1 shows 0 GPUs to the job, which needs 2; submit it with other --gpus_per_node"
    assert (row["state"], row["cause"].startswith(problem)) == ("failed", True), row
    site.job_ends(site.job(run), "FAILED")
    assert site.cluster.job(site.job(run))["TresPerNode"] == "gres:gpu:2"
    with pytest.raises(subprocess.CalledProcessError):  # control: a node has two
        site.submit("more-gpus", gpus=3, global_batch_size=12)


def test_other_data_would_end_with_other_weights(site: Site, uncut: RunFolder) -> None:
    """Control of the comparison."""
    other = site.submit("other", seed=7)
    site.until(other, lambda row: row["state"] == "done")
    assert losses(other) != losses(uncut)
    assert weights(other) != weights(uncut)


def test_a_cancelled_job_saves_and_is_resumed_in_slurm(site: Site, uncut: RunFolder) -> None:
    run = site.submit("cancelled")
    site.begun(run, 5)
    first = site.job(run)
    site.cluster.run("scancel", first)
    row = site.until(run, lambda row: row["state"] == "stopped")
    assert 5 <= row["step"] < STEPS
    assert row["last_checkpoint"] == f"step-{row['step']:08d}"
    site.job_ends(first, "CANCELLED")
    site.tunesmith("resume", str(run.path), "--json")
    assert site.job(run) != first
    site.until(run, lambda row: row["state"] == "done")
    assert (losses(run), weights(run)) == (losses(uncut), weights(uncut))


@pytest.mark.long
def test_a_node_that_goes_down_brings_the_run_back_to_the_queue(site: Site, uncut: RunFolder) -> None:
    run = site.submit("node-down", save_steps=5)
    site.begun(run, 8)
    site.cluster.power_off("node2")
    try:
        row = site.until(run, lambda row: row["state"] == "queued")
        assert f"SLURM job {site.job(run)} was interrupted and queued again" in row["cause"]
    finally:
        site.cluster.start_node("node2")
    site.at_once(run)
    assert site.until(run, lambda row: row["state"] in ("done", "failed"), 400)["state"] == "done"
    assert (losses(run), weights(run)) == (losses(uncut), weights(uncut))


def test_a_job_that_waits_says_why_and_is_cancelled(site: Site) -> None:
    run = site.submit("waits", "--partition", "closed")
    row = site.until(run, lambda row: row["cause"])
    assert (row["state"], row["cause"]) == (
        "queued", f"SLURM job {site.job(run)} waits for its partition, which is down (PartitionDown)",
    )  # fmt: skip
    job = site.job(run)
    site.tunesmith("stop", str(run.path))
    shown = json.loads(site.tunesmith("runs", "show", "--json", str(run.path)).stdout)
    assert (shown["state"], shown["cause"]) == ("stopped", "cancelled before it started")
    site.job_ends(job, "CANCELLED")


def test_what_slurm_refuses_leaves_no_folder(site: Site) -> None:
    line = ["train", "tiny-lora", "--on", "slurm", "--gpus_per_node", "0", "--partition", "none-such"]
    done = site.tunesmith(*line, *flags({**OPTIONS, "output_dir": site.home / "refused"}), check=False)
    assert done.returncode == 2
    assert "SLURM did not take the job: sbatch: error: Batch job submission failed: Invalid partition" in done.stderr
    assert not (site.home / "refused").exists()


def test_the_site_file_gives_defaults(site: Site) -> None:
    folder = site.home / "config" / "tunesmith"
    folder.mkdir(parents=True)
    (folder / "site.yaml").write_text('slurm:\n  partition: closed\n  time: "0:45:00"\n  slurm_extra: exclusive\n')
    try:
        line = ["train", "tiny-lora", "--on", "slurm", "--gpus_per_node", "0", "--dry_run", "--time", "30"]
        script = site.tunesmith(*line, *flags({**OPTIONS, "output_dir": site.home / "dry"})).stdout
    finally:
        shutil.rmtree(folder)
    assert {"#SBATCH --partition=closed", "#SBATCH --time=30", "#SBATCH --exclusive"} <= set(script.splitlines())
    assert not (site.home / "dry").exists()
    checked = site.cluster.folder / "dry.sh"
    checked.write_text(script.replace("--partition=closed", "--partition=normal"))
    assert "Job" in site.cluster.run("sbatch", "--test-only", str(checked)).stderr


@pytest.mark.long
def test_a_sweep_halves_in_slurm_and_its_survivor_trained_as_if_never_stopped(site: Site, uncut: RunFolder) -> None:
    """The second of two points is one on which nothing is learned."""
    line = ["sweep", "tiny-lora", "--on", "slurm", "--nodes", "2", "--gpus_per_node", "0", "--time", "30"]
    line += ["--detach", "--json"]
    words = {**OPTIONS, "runs_dir": site.home / "swept", "halving": 2, "eval_dataset_name": "none"}
    begun = json.loads(site.tunesmith(*line, "--learning_rate", "3e-3,1e-9", *flags(words)).stdout)
    folder = SweepFolder(Path(begun["sweep_dir"]))
    site.cluster.wait(lambda: folder.read().state == "done", 400, lambda: (folder.path / "log.txt").read_text())
    swept = document_of(folder, folder.read())
    expected = [("done", STEPS), ("paused", STEPS // 2)]
    assert [(run["state"], run["step"]) for run in swept["runs"]] == expected, swept
    best, cut = (RunFolder(run["run_dir"]) for run in swept["runs"])
    assert "#SBATCH --time=30" in (best.path / "slurm.sh").read_text().splitlines()
    assert (losses(best), weights(best)) == (losses(uncut), weights(uncut))
    assert (site.show(cut)["state"], len(losses(cut))) == ("stopped", STEPS // 2)
    assert swept["leader"] == 1


@pytest.mark.long
def test_a_stopped_sweep_leaves_no_job_behind(site: Site) -> None:
    """One run trains, and one waits for its partition's nodes."""
    line = ["sweep", "tiny-lora", "--on", "slurm", "--nodes", "2", "--gpus_per_node", "0"]
    line += ["--cpus_per_node", "2", "--detach", "--json"]  # all CPUs of both nodes
    words = {**OPTIONS, "max_steps": LONG, "max_train_samples": 4 * LONG, "runs_dir": site.home / "stopped"}
    begun = json.loads(site.tunesmith(*line, "--lora_r", "4,8", *flags(words)).stdout)
    first, second = (RunFolder(run["run_dir"]) for run in begun["runs"])
    site.begun(first, 3)
    site.until(second, lambda row: row["state"] == "queued" and "(Resources)" in str(row["cause"]))
    jobs = [site.job(run) for run in (first, second)]
    stopped = json.loads(site.tunesmith("sweep", "stop", begun["sweep_dir"], "--json").stdout)
    assert (stopped["state"], [run["state"] for run in stopped["runs"]]) == ("stopped", ["stopped", "stopped"])
    assert site.show(first)["last_checkpoint"] == f"step-{stopped['runs'][0]['step']:08d}"
    assert site.show(second)["cause"] == "cancelled before it started"
    site.job_ends(jobs[1], "CANCELLED")
    assert site.cluster.job(jobs[0])["JobState"] != "RUNNING"
