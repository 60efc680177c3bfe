"""Runs that are handed to Ray, as far as that needs no cluster; tests/ray has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.command_line import RESUME, TRAIN, Args
from app.commands.scheduled import scheduler_of
from app.launch import ray_job
from app.launch.job import resume_job
from app.launch.ray_driver import Driver
from app.launch.ray_node import leave_ray
from app.launch.supervisor import RunSignals
from app.runs.ray_driver import read_driver
from app.schedulers.ray_cluster import Cluster, ClusterError
from app.schedulers.ray_options import RayOptions
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, write_json
from trainers.strategy.strategy import Machines, load_strategy, over_machines

TOKEN = "hf_0123456789"  # noqa: S105


@pytest.fixture(autouse=True)
def _own_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def args(verb: Any, *argv: str) -> Args:
    parsed = verb.read(argv)
    assert parsed is not None
    return parsed


def submitted(folder: Path, state: str = "stopped", kind: str = "ray", world: int = 4, **options: Any) -> RunFolder:
    run = made_run(folder, "run", state, world=world)
    write_json(run.scheduler, {"kind": kind, "options": {"gpus_per_node": 0, **options}, "resume_from": None})
    return run


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "flags", "title"), [
    (None, [], None), (None, ["--on", "ray", "--nodes", "2"], "Ray"), (None, ["--on", "slurm", "--qos", "a"], "SLURM"),
    ("ray", [], "Ray"), ("slurm", [], "SLURM"), ("ray", ["--on", "local"], None), ("slurm", ["--on", "ray"], "Ray"),
])  # fmt: skip
def test_the_command_or_the_run_names_the_scheduler(
    tmp_path: Path, kind: str | None, flags: list[str], title: str | None
) -> None:
    run = submitted(tmp_path, kind=kind) if kind else None
    scheduler = scheduler_of(args(RESUME if run else TRAIN, "run", *flags), run)
    assert (scheduler.title if scheduler else None) == title


@pytest.mark.parametrize(("flags", "problem"), [
    (["--on", "moon"], "on=moon is no place to train; use one of local, slurm, ray"),
    (["--on", "ray", "--partition", "a"], "--partition is for jobs of SLURM; add --on slurm"),
    (["--nodes", "2"], "--nodes is for jobs of SLURM, Ray, Kubernetes; add --on slurm.ray.kubernetes"),
    (["--dry_run"], "--dry_run is for jobs of SLURM, Ray, Kubernetes; add --on slurm.ray.kubernetes"),
])  # fmt: skip
def test_what_a_scheduler_does_not_take_is_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        scheduler_of(args(TRAIN, "tiny-lora", *flags))


@pytest.mark.parametrize("name", ["gpus", "num_machines", "machine_rank", "main_process_ip", "main_process_port"])
def test_what_ray_decides_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=1 is decided by Ray; leave --{name} out"):
        ray_job.ray_job(args(TRAIN, "tiny-lora", f"--{name}", "1"))


@pytest.mark.parametrize("value", ["0", "129", "x", ""])
def test_a_wrong_number_of_nodes_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="nodes=" if value else "--nodes has no value"):
        ray_job.ray_job(args(TRAIN, "tiny-lora", "--gpus_per_node", "0", f"--nodes={value}"))


@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_a_resumed_run_keeps_its_nodes_unless_told_otherwise(tmp_path: Path, kind: str) -> None:
    """Also one that SLURM had; what only SLURM knows is left behind."""
    run = submitted(tmp_path, kind=kind, nodes=2, **({"partition": "a"} if kind == "slurm" else {}))
    job, options = ray_job.ray_job(args(RESUME, "run"), run)
    assert (options.nodes, job.devices.num_processes) == (2, 4)
    assert ray_job.ray_job(args(RESUME, "run", "--nodes", "1"), run)[1].nodes == 1


def test_no_way_resumes_a_run_here_unless_told_to(tmp_path: Path) -> None:
    run = submitted(tmp_path)
    with pytest.raises(ConfigError, match=r"was submitted to Ray; `tunesmith resume .*`, .*--on local"):
        resume_job(run, Args())
    assert resume_job(run, args(RESUME, str(run.path), "--on", "local")).run.path == run.path


def test_a_run_of_several_nodes_is_resumed_on_one_machine(tmp_path: Path) -> None:
    run = submitted(tmp_path, nodes=2)
    strategy = over_machines(load_strategy(str(run.accelerate)), Machines(2, 0, "10.0.0.1", 29500))
    run.accelerate.write_text(strategy.dump())
    job = resume_job(run, args(RESUME, str(run.path), "--on", "local"))
    assert (job.devices.machines, job.devices.num_processes) == (None, 4)


def test_the_preview_has_one_line_for_each_node(tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--gpus_per_node", "1", "--cpus_per_node", "3", "--output_dir", str(tmp_path / "run")]
    job, options = ray_job.ray_job(args(TRAIN, "tiny-lora", *flags))
    lines = ray_job.preview(job, options).splitlines()
    assert lines[:2] == [
        "cluster: a local one, started for this run", "placement group: STRICT_SPREAD of 2 x {'CPU': 3, 'GPU': 1}",
    ]  # fmt: skip
    assert [line.partition(":")[0] for line in lines[2:]] == ["node 0", "node 1"]


@pytest.mark.parametrize("address", ["http://head:8265", "https://head", "ray://head:10001"])
def test_an_address_of_another_api_is_refused(address: str) -> None:
    with pytest.raises(ClusterError, match="is no address of a cluster: run this on one of its machines"):
        Cluster(address, {"CPU": 1})


def test_ray_is_imported_by_nothing_but_the_driver_at_work() -> None:
    code = "import sys, app.cli, app.commands.runs, app.launch.actions, app.launch.ray_driver, app.launch.ray_node\n"
    code += "print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- the driver ------------------------------------------------------------------------------------------------------


class FakeCluster:
    """Nodes that answer as a test says.

    Args:
        run: the run whose supervisors it starts.
        starts: for each start of the job, the outcomes by rank and the state that the supervisors leave behind.
        missing: a path that the nodes do not see.
    """

    is_local, job = False, "01000000"

    def __init__(self, run: RunFolder, starts: list[tuple[dict[int, int | ClusterError], str]], missing: str = ""):
        self.folder, self.starts, self.missing, self.number = run, starts, missing, -1
        self.calls: dict[int, list[str]] = {}

    def reserve(self, nodes: int) -> None:
        pass

    def addresses(self) -> list[str]:
        return ["10.0.0.1", "10.0.0.2"]

    def fitting_nodes(self) -> int:
        return 2

    def run(self, rank: int, argv: list[str], seconds: float = 0) -> int:
        return int(bool(self.missing) and argv[-1].endswith(self.missing))

    def start(self, rank: int, argv: list[str]) -> None:
        self.calls[rank] = argv
        self.number += rank == 0

    def outcomes(self, seconds: float) -> dict[int, int | ClusterError]:
        outcomes, state = self.starts[self.number]
        if (self.folder.read_state() or {})["state"] == "queued":
            self.folder.write_state(state=state, cause="as its supervisor wrote")
        return outcomes

    def cancel(self) -> None:
        pass


LOST = ClusterError("the node is dead")


def driven(run: RunFolder, cluster: FakeCluster) -> dict[str, Any]:
    """The state of a run that a driver has taken to its end."""
    with RunSignals() as signals:
        Driver(run, run.hold(), RayOptions(nodes=2, gpus_per_node=0), cluster, signals).to_end()  # type: ignore[arg-type]
    assert read_driver(run)["phase"] == "ended"
    run.hold().close()  # nobody holds it any more, or only this process
    return run.read_state() or {}


def test_a_lost_node_starts_all_again(tmp_path: Path) -> None:
    run = submitted(tmp_path, "queued", world=2)
    cluster = FakeCluster(run, [({0: 1, 1: LOST}, "failed"), ({0: 0, 1: 0}, "done")])
    assert driven(run, cluster)["state"] == "done"
    assert cluster.calls[1][cluster.calls[1].index("--restarts") + 1] == "1"


def test_a_run_that_loses_its_nodes_again_and_again_fails(tmp_path: Path) -> None:
    run = submitted(tmp_path, "queued", world=2)
    state = driven(run, FakeCluster(run, [({0: 1, 1: LOST}, "running")] * 9))
    assert (state["state"], state["cause"]) == (
        "failed", "node 10.0.0.2 was lost, for the 3rd time in a row without a new checkpoint",
    )  # fmt: skip


@pytest.mark.parametrize("end", ["done", "stopped", "failed"])
def test_the_end_that_a_supervisor_wrote_stays(tmp_path: Path, end: str) -> None:
    """Control: nothing was lost."""
    run = submitted(tmp_path, "queued", world=2)
    state = driven(run, FakeCluster(run, [({0: 1, 1: 0}, end)]))
    assert (state["state"], state["cause"]) == (end, "as its supervisor wrote")


def test_supervisors_that_end_without_a_word_fail_the_run(tmp_path: Path) -> None:
    run = submitted(tmp_path, "queued", world=2)
    state = driven(run, FakeCluster(run, [({0: 137, 1: 0}, "running")]))
    assert state["state"] == "failed"
    assert "10.0.0.1 (exit status 137)" in state["cause"]


@pytest.mark.parametrize("missing", ["config.yaml", sys.executable, "ray_node.py"])
def test_a_node_that_does_not_see_the_files_is_named(tmp_path: Path, missing: str) -> None:
    run = submitted(tmp_path, "queued", world=2)
    cluster = FakeCluster(run, [], missing)
    state = driven(run, cluster)
    assert state["state"] == "failed"
    assert state["cause"].startswith("node 10.0.0.1 has no /")
    assert "all nodes need the run folder, Python and Tunesmith under the same paths" in state["cause"]
    assert not cluster.calls


def test_a_run_that_is_to_stop_is_not_started(tmp_path: Path) -> None:
    run = submitted(tmp_path, "queued", world=2)
    run.ask_stop()
    cluster = FakeCluster(run, [])
    assert driven(run, cluster)["cause"].startswith("cancelled")
    assert not cluster.calls


def test_no_word_that_goes_through_ray_is_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run = submitted(tmp_path, "queued", world=2)
    cluster = FakeCluster(run, [({0: 0, 1: 0}, "done")])
    driven(run, cluster)
    words = [word for argv in cluster.calls.values() for word in argv]
    assert all(type(word) is str for word in words)
    assert not [word for word in words if TOKEN in word]


# -- the node --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("threads", "expected"), [("8", "2"), ("3", "3"), (None, None)])
def test_what_ray_put_into_the_environment_is_taken_out(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, expected: str | None
) -> None:
    """But for a number of threads that is not Ray's."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    values = {"RAY_AUTH_TOKEN": "secret", "RAY_JOB_ID": "1", "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace"}
    for name, value in {**values, "HF_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    leave_ray(RayOptions(nodes=2, gpus_per_node=0, cpus_per_node=8), processes=8)
    assert not set(values) & set(os.environ)
    assert os.environ["HF_TOKEN"] == TOKEN
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ.get("OMP_NUM_THREADS") == expected
