"""Runs that a real Ray trains on two nodes: one that is lost, one that waits, what is stopped, and where secrets go."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.runs.runs import true_state
from tests.detached import SMALL, TUNESMITH
from tests.launching import ROOT, environment, flags
from tests.ray.cluster import RayCluster
from trainers.run.folder import END_STATES, RunFolder, read_json

STEPS = 40
OPTIONS: dict[str, Any] = {**SMALL, "max_train_samples": 160, "max_steps": STEPS, "logging_steps": 1}
SECRET = "hf_planted-in-the-environment-0042"  # noqa: S105


def wait(condition: Callable[[], object], run: RunFolder, seconds: float = 200) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            log = run.log.read_text()[-3000:] if run.log.exists() else ""
            raise AssertionError(f"{run.id} stays {true_state(run)}, driver {read_json(run.ray)}\n{log}")
        time.sleep(0.1)


def ends(run: RunFolder) -> dict[str, Any]:
    """Waits until a run has ended and its driver is gone; returns its state."""

    def is_over() -> bool:
        return true_state(run)["state"] in END_STATES and not psutil.pid_exists(pid)

    pid = (read_json(run.ray) or {})["process"]["pid"]
    wait(is_over, run)
    return true_state(run)


def begun(run: RunFolder, step: int) -> None:
    """Waits until a step of a run is logged."""
    wait(lambda: run.metrics.exists() and f'"step": {step},' in run.metrics.read_text(), run)


def result(run: RunFolder) -> tuple[dict[int, tuple[float, float]], bytes]:
    """Loss and gradient norm by step (of a step that was trained twice, the last), and the trained weights."""
    rows = map(json.loads, run.metrics.read_text().splitlines())
    losses = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
    return losses, (run.model / "adapter_model.safetensors").read_bytes()


class Site:
    """A cluster, and the folder that its nodes share."""

    def __init__(self, cluster: RayCluster | None, home: Path):
        self.cluster, self.home = cluster, home

    def tunesmith(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs the command on the head."""
        address = {"RAY_ADDRESS": self.cluster.address} if self.cluster else {}
        env = environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", HF_TOKEN=SECRET, **address)
        return subprocess.run([*TUNESMITH, *words], env=env, cwd=self.home, check=check, capture_output=True, text=True)

    def train(self, name: str, *words: str, **options: Any) -> RunFolder:
        run = RunFolder(self.home / name)
        self.tunesmith("train", "tiny-lora", *words, "--json", *flags({**OPTIONS, "output_dir": run.path, **options}))
        return run

    def submit(self, name: str, nodes: int = 2, **options: Any) -> RunFolder:
        return self.train(name, "--on", "ray", "--nodes", str(nodes), "--gpus_per_node", "0", **options)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_TOKEN": SECRET}
    with RayCluster(2, variables) as cluster:
        yield Site(cluster, tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def here(site: Site) -> RunFolder:
    """The same run as two processes of this machine."""
    return site.train("here", "--num_processes", "2")


@pytest.fixture(scope="module")
def on_ray(site: Site, here: RunFolder) -> RunFolder:
    """A run on two nodes that has made some steps."""
    run = site.submit("on-ray")
    begun(run, 5)
    return run


def files_with(folder: str, text: str) -> set[str]:
    """The files below a folder that contain a text."""
    return {str(path) for path in Path(folder).rglob("*") if path.is_file() and text.encode() in path.read_bytes()}


def test_secrets_reach_the_ranks_and_nothing_that_ray_keeps(site: Site, on_ray: RunFolder) -> None:
    assert site.cluster
    ranks = [entry["pid"] for entry in (on_ray.read_state() or {})["processes"] if entry["role"] == "rank"]
    assert ranks
    assert all(psutil.Process(pid).environ()["HF_TOKEN"] == SECRET for pid in ranks)
    assert not [name for pid in ranks for name in psutil.Process(pid).environ() if name.startswith("RAY_")]
    assert files_with(site.cluster.session, SECRET) == set()
    code = "import sys, ray; ray.init(sys.argv[1], log_to_driver=False)\nimport ray._private.state as s\n"
    code += "print(s.state.job_table() if hasattr(s.state, 'job_table') else s.jobs())"
    jobs = subprocess.run(
        [sys.executable, "-c", code, site.cluster.address], capture_output=True, text=True, check=True
    )
    assert SECRET not in jobs.stdout
    # Control: what goes through Ray would be seen in both.
    assert str(on_ray.path) in jobs.stdout
    assert files_with(site.cluster.session, str(site.cluster.nodes[0].node_ip_address))


def test_a_run_stopped_and_resumed_on_two_nodes_is_that_of_two_processes_here(
    site: Site, on_ray: RunFolder, here: RunFolder
) -> None:
    on_ray.ask_stop()
    stopped = ends(on_ray)
    assert stopped["state"] == "stopped"
    assert stopped["cause"].startswith(f"stopped by a stop request at step {stopped['step']} of {STEPS}")
    assert 5 <= stopped["step"] < STEPS
    assert (on_ray.checkpoints / f"step-{stopped['step']:08d}").is_dir()
    site.tunesmith("resume", str(on_ray.path), "--json")
    assert ends(on_ray)["state"] == "done"
    assert "machine 1: joining attempt 1" in on_ray.log.read_text()
    assert result(on_ray) == result(here)


def test_other_data_would_end_with_other_weights(site: Site, here: RunFolder) -> None:
    """Control of the comparison."""
    other = site.train("other", "--num_processes", "2", seed=7)
    losses, weights = result(other)
    assert losses != result(here)[0]
    assert weights != result(here)[1]


def test_a_lost_node_is_replaced_when_the_cluster_has_another(site: Site, here: RunFolder) -> None:
    """The first node, whose supervisor writes the state; the spare one comes later."""
    assert site.cluster
    run = site.submit("node-lost")
    begun(run, 8)
    lost = next(
        node for node in site.cluster.nodes
        if any({str(run.path), "0"} <= set(process.cmdline()) for process in site.cluster.processes_on(node))
    )  # fmt: skip
    site.cluster.power_off(lost)
    pattern = rf"node {lost.node_ip_address} was lost; goes on from step \d+; needs 2 nodes with 1 CPU each; .*has 1"
    wait(lambda: re.fullmatch(pattern, str(true_state(run)["cause"])), run)
    assert true_state(run)["state"] == "queued"
    site.cluster.add_node()
    assert ends(run)["state"] == "done"
    assert (run.read_state() or {})["scheduler"]["restarts"] == 1
    assert result(run) == result(here)


def test_a_run_that_waits_says_why_and_is_cancelled(site: Site) -> None:
    run = site.submit("waits", nodes=9, num_processes=9, global_batch_size=18)
    wait(lambda: true_state(run)["cause"], run)
    assert true_state(run)["state"] == "queued"
    assert true_state(run)["cause"] == "needs 9 nodes with 1 CPU each; the cluster has 2"
    site.tunesmith("stop", str(run.path))
    ended = ends(run)
    assert (ended["state"], ended["cause"]) == ("stopped", "cancelled before it started")


def test_a_run_whose_driver_is_killed_saves_and_stops(site: Site) -> None:
    run = site.submit("driver-killed", save_steps=0, max_steps=2000)
    begun(run, 4)
    psutil.Process((read_json(run.ray) or {})["process"]["pid"]).kill()
    stopped = ends(run)
    assert stopped["state"] == "stopped"
    assert stopped["cause"].startswith(f"stopped by the death of its Ray driver at step {stopped['step']} of 2000; ")
    assert (run.checkpoints / f"step-{stopped['step']:08d}").is_dir()
    assert "the Ray driver is gone: the run saves and stops" in run.log.read_text()


def test_a_run_is_killed(site: Site) -> None:
    run = site.submit("killed", max_steps=2000)
    begun(run, 3)
    site.tunesmith("stop", str(run.path), "--timeout", "0", "--force", check=False)
    assert ends(run)["cause"] == "ended by force; the last checkpoint remains"
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(run.path) in (process.info["cmdline"] or [])
    ]


# -- a local cluster -------------------------------------------------------------------------------------------------


def test_a_local_cluster_listens_on_loopback_and_refuses_strangers(tmp_path: Path) -> None:
    site = Site(None, tmp_path)
    run = site.submit("local", nodes=1, num_processes=2, max_steps=2000)
    driver = psutil.Process((read_json(run.ray) or {})["process"]["pid"])
    family = [driver, *driver.children(recursive=True)]
    listening = {
        process.name(): link.laddr
        for process in family
        for link in process.net_connections()
        if link.status == "LISTEN"
    }
    assert {"gcs_server", "raylet"} <= set(listening)
    addresses = {link.ip.removeprefix("::ffff:") for link in listening.values()}
    assert addresses == {"127.0.0.1"}
    raylet = next(process for process in family if process.name() == "raylet")
    session = Path(re.findall(r"/tmp/ray/session_[^/ ]+", " ".join(raylet.cmdline()))[0])
    assert files_with(str(session), raylet.environ()["RAY_AUTH_TOKEN"]) == set()
    code = "import sys, ray; from ray._private import services; services.resolve_ip_for_localhost = lambda host: host\n"
    code += "ray.init(sys.argv[1]); print(ray.nodes())"
    address = f"127.0.0.1:{listening['gcs_server'].port}"
    argv = [sys.executable, "-c", code, address]
    stranger = subprocess.run(argv, capture_output=True, text=True, timeout=100)
    assert stranger.returncode != 0
    assert "NodeID" not in stranger.stdout
    run.ask_stop()
    assert ends(run)["state"] == "stopped"
    assert not [process for process in family if process.is_running()]
    assert not session.exists()


def test_what_a_local_cluster_could_never_hold_leaves_no_folder(tmp_path: Path) -> None:
    site = Site(None, tmp_path)
    line = ["train", "tiny-lora", "--on", "ray", "--nodes", "2", "--gpus_per_node", "0"]
    done = site.tunesmith(*line, *flags({**OPTIONS, "output_dir": tmp_path / "large"}), check=False)
    assert done.returncode == 2
    problem = "Ray did not take the job: it needs 2 nodes with 1 CPU each, and this machine makes 1"
    assert problem in done.stderr
    assert not (tmp_path / "large").exists()
