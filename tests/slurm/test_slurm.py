"""Runs that a real SLURM starts on two nodes: time limits, a node that goes down, what is cancelled or refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.detached import SMALL, TUNESMITH
from tests.launching import ROOT, flags
from tests.slurm.cluster import Cluster, missing
from trainers.run.folder import END_STATES, RunFolder

STEPS = 30
OPTIONS: dict[str, Any] = {**SMALL, "max_train_samples": 120, "max_steps": STEPS, "save_steps": 0, "logging_steps": 1}


class Site:
    """A cluster, and the folder that its machines share."""

    def __init__(self, cluster: Cluster, home: Path):
        self.cluster, self.home = cluster, home

    def tunesmith(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs the command on the head node."""
        variables = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.home / "state"), "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "XDG_CONFIG_HOME": str(self.home / "config")}
        return self.cluster.run(*TUNESMITH, *words, check=check, **variables)

    def submit(self, name: str, *words: str, **options: Any) -> RunFolder:
        run = RunFolder(self.home / name)
        line = ["train", "tiny-lora", "--on", "slurm", "--nodes", "2", "--gpus_per_node", "0", "--num_processes", "2"]
        self.tunesmith(*line, *words, "--json", *flags({**OPTIONS, "output_dir": run.path, **options}))
        return run

    def show(self, run: RunFolder) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.tunesmith("runs", "show", "--json", str(run.path)).stdout)
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
    try:
        with Cluster(home / "cluster") as cluster:
            yield Site(cluster, home)
    finally:
        shutil.rmtree(home)


@pytest.fixture(scope="session")
def uncut(site: Site) -> RunFolder:
    """A run that nothing interrupted."""
    run = site.submit("uncut")
    ended = site.until(run, lambda row: row["state"] in END_STATES)
    assert (ended["state"], ended["step"]) == ("done", STEPS), run.log.read_text()[-3000:]
    return run


def losses(run: RunFolder) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; of a step that was trained twice, the last."""
    rows = map(json.loads, run.metrics.read_text().splitlines())
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


def weights(run: RunFolder) -> bytes:
    return (run.model / "adapter_model.safetensors").read_bytes()


def test_two_nodes_train_one_run(site: Site, uncut: RunFolder) -> None:
    assert "machine 1: joining attempt 0" in uncut.log.read_text()
    site.job_ends(site.job(uncut), "COMPLETED")
    script = (uncut.path / "slurm.sh").read_text().splitlines()
    assert "#SBATCH --nodes=2" in script
    assert not [line for line in script if "gpus-per-node" in line]


def test_a_run_cut_by_the_limit_of_its_job_is_bit_for_bit_the_same(site: Site, uncut: RunFolder) -> None:
    """The signal that SLURM sends before the limit, twice."""
    run = site.submit("cut")
    for step in (8, 19):
        site.begun(run, step)
        site.cluster.run("scancel", "--batch", "--signal=USR2", site.job(run))
        row = site.until(run, lambda row: row["state"] == "queued" and "BeginTime" in str(row["cause"]))
        waits = rf"SLURM job {site.job(run)} is to start a little later \(BeginTime\)"
        assert re.fullmatch(rf"stopped at step \d+ by its time limit; {waits}", row["cause"])
        site.at_once(run)
    assert (
        site.until(run, lambda row: row["state"] not in ("queued", "starting", "running", "stopping"))["step"] == STEPS
    )
    assert site.cluster.job(site.job(run))["Restarts"] == "2"
    assert losses(run) == losses(uncut)
    assert weights(run) == weights(uncut)


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
    assert (site.show(run)["state"], site.show(run)["cause"]) == ("stopped", "cancelled before it started")
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
