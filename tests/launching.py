"""Runs the real training script through the real launcher, and reads what it left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import forked
from trainers.run.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "trainers" / "train.py"


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    run: RunFolder
    status: int
    output: str

    @property
    def state(self) -> dict[str, Any]:
        return self.run.read_state() or {}

    def rows(self, key: str = "loss") -> list[dict[str, Any]]:
        """Metrics rows that have `key`, in order of step."""
        lines = self.run.metrics.read_text().splitlines()
        return sorted((row for row in map(json.loads, lines) if key in row), key=lambda row: row["step"])

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.rows(key)]

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(self.run.checkpoints.glob("step-" + "[0-9]" * 8))


def flags(options: dict[str, Any]) -> list[str]:
    """`--name value` for every option; booleans as YAML writes them."""
    return [
        word
        for name, value in options.items()
        for word in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: one thread each, nothing inherited that would change a run."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "TUNESMITH_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **extra}


def shadow_modules(folder: Path) -> None:
    """Files with the names of modules, as a user may have beside the data; a process that imports one of them ends."""
    names = ("yaml", "types", "queue", "json", "torch", "numpy", "accelerate", "transformers", "trainers", "psutil")
    for name in names:
        (folder / f"{name}.py").write_text(f"import os\nprint('{name}.py of the working folder')\nos._exit(99)\n")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(
    output_dir: Path,
    processes: int,
    options: dict[str, Any],
    strategy: str | None = None,
    launcher_flags: tuple[str, ...] = (),
    timeout: float = 500,
    by_hand: bool = False,
    **extra: str,
) -> Finished:
    """`accelerate launch` of the training script; waits for its end; `by_hand` as a user starts it, imports and all."""
    name = strategy or ("single" if processes == 1 else "ddp")
    config_file = ROOT / "accelerate_configs" / f"{name}.yaml" if not name.endswith(".yaml") else Path(name)
    args = ["--config_file", str(config_file), "--num_processes", str(processes)]
    args += ["--main_process_port", "0"] if processes > 1 else []
    args += [*launcher_flags, str(SCRIPT), *flags({**options, "output_dir": output_dir})]
    command = [sys.executable, "-m", "accelerate.commands.launch", *args]
    start = subprocess.run if by_hand else forked.run
    done = start(
        command, env=environment(**extra), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return Finished(RunFolder(output_dir), done.returncode, done.stdout)


def launch_well(output_dir: Path, processes: int, options: dict[str, Any], **more: Any) -> Finished:
    """`launch` of a run that must end well."""
    finished = launch(output_dir, processes, options, **more)
    assert finished.state.get("state") == "done", finished.output[-4000:]
    return finished
