"""The pods of a Kubernetes manifest, as two processes here: one is killed and, as the Job would, started again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests import forked
from tests.detached import TUNESMITH, inside, saved, state_of, step_of, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, exact
from tests.forked import Popen
from tests.launching import flags, free_port
from trainers.run.folder import RunFolder

DEADLINE = 300.0


def manifest(home: Path) -> dict[str, dict[str, Any]]:
    """The objects by kind, for two nodes without GPUs."""
    asked = {"on": "kubernetes", "nodes": 2, "gpus_per_node": 0, "image": "tunesmith", "volume_claim": "data"}
    options = {**asked, "strategy": "ddp", "output_dir": "/shared/runs/mine", **OPTIONS}
    line = [*TUNESMITH, "train", "tiny-lora", *flags(options), "--dry_run", "--json"]
    done = forked.run(line, cwd=home, env=inside(home), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {document["kind"]: document for document in yaml.safe_load_all(json.loads(done.stdout)["script"])}


class Pods:
    """The pods of a Job, started in the folder `home`, which stands for the volume."""

    def __init__(self, home: Path):
        objects = manifest(home)
        for name, text in objects["ConfigMap"]["data"].items():
            (home / name).write_text(text)
        command = objects["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
        head = command[command.index("--main_process_ip") + 1]
        port = command[command.index("--main_process_port") + 1]
        changes = {"/etc/tunesmith": str(home), "/shared": str(home), head: "127.0.0.1", port: str(free_port())}
        self.words = command[1:]
        for ours, here in changes.items():
            self.words = [word.replace(ours, here) for word in self.words]
        self.home = home
        self.pods = [self.start(0), self.start(1)]

    def start(self, index: int) -> Popen:
        words = [word.replace("$(MACHINE_RANK)", str(index)) for word in self.words]
        env = inside(self.home, XDG_STATE_HOME=str(self.home / f"pod-{index}"))
        (self.home / f"pod-{index}").mkdir(exist_ok=True)
        with open(self.home / f"pod-{index}.txt", "ab") as out:
            return Popen([*TUNESMITH, *words], cwd=self.home, env=env, stdout=out, stderr=out)

    def kill(self, index: int) -> None:
        """Kills every process of a pod."""
        tree = psutil.Process(self.pods[index].pid)
        for process in [*tree.children(recursive=True), tree]:
            process.send_signal(signal.SIGKILL)

    def to_end(self) -> int:
        """Starts each failed pod again, as the Job does, until all have succeeded; returns how many failed."""
        failed, deadline = 0, time.monotonic() + DEADLINE
        while any(pod.poll() != 0 for pod in self.pods):
            assert time.monotonic() < deadline, [path.read_text() for path in self.home.glob("pod-?.txt")]
            for index, pod in enumerate(self.pods):
                if pod.poll() not in (None, 0):
                    assert pod.poll() not in (2, 130), "the Job would have ended"
                    failed += 1
                    self.pods[index] = self.start(index)
            time.sleep(0.2)
        return failed


def test_a_pod_in_place_of_a_killed_one_goes_on(home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    expected, fault = undisturbed("ddp"), noted("the first of two pods is killed", "ddp")
    pods, run = Pods(home), RunFolder(home / "runs" / "mine")
    until(lambda: state_of(run) == "running" and saved(run) >= INTERVAL and step_of(run) > saved(run))
    pods.kill(0)
    fault.at()
    assert pods.to_end() >= 1
    exact(run, expected, replays=INTERVAL)
    fault.harmless(run)
