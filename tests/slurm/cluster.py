"""A real SLURM on this machine: a controller, and compute nodes with host names and addresses of their own.

Each daemon runs in a network namespace, joined by a bridge, with its own host name and `/etc/hosts`. Needs root, and
Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

PROGRAMS = ("slurmctld", "slurmd", "munged", "mungekey", "ip", "nsenter", "unshare")
_CONFIG = """ClusterName=tunesmith
SlurmctldHost=head(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdTimeout=20
KillWait=25
UnkillableStepTimeout=120
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=NO PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP OverSubscribe=NO PriorityTier=10
PartitionName=closed Nodes=ALL MaxTime=60 State=DOWN
"""


def missing() -> list[str]:
    """The programs that a cluster needs and that are not installed; also `root`."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ.get('PATH')}:/usr/sbin:/sbin") is None]
    return [*absent, *(["root"] if os.geteuid() else [])]


class Cluster:
    """A running cluster.

    Args:
        folder: folder for its files; its path must be short, as sockets are in it.
        nodes: number of compute nodes, `node1` and so on.
    """

    def __init__(self, folder: Path, nodes: int = 2):
        self.folder, self.names = folder, [f"node{number}" for number in range(1, nodes + 1)]
        self.mark = f"sl{os.getpid()}"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.log: IO[bytes] | None = None

    def address(self, name: str) -> str:
        """The address of `head` or of a node."""
        return "10.77.0.1" if name == "head" else f"10.77.0.{10 + self.names.index(name) + 1}"

    def namespace(self, name: str) -> str:
        """The network namespace of `head` or of a node."""
        return f"{self.mark}-{name}"

    def __enter__(self) -> Cluster:
        try:
            self._write_files()
            self.make_network()
            self._start_munge()
            self.start("head", "slurmctld", "-D")
            for name in self.names:
                self.start_node(name)
            self.wait(lambda: self.run("sinfo", "--noheader", "--states=idle", "--format=%D", check=False)
                      .stdout.split()[:1] == [str(len(self.names))], 120, "the nodes did not become idle")  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        names = ["head", *self.names]
        for process in [pid for name in names for pid in self.processes_on(name)]:
            _kill(process)
        for daemon in self.daemons.values():
            daemon.kill()
            daemon.wait()
        self.remove_network()
        if self.log:
            self.log.close()

    def _write_files(self) -> None:
        for name in ("munge", "state", "spool", *(f"spool/{node}" for node in self.names)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        lines = [f"NodeName={name} NodeAddr={self.address(name)} CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN"
                 for name in self.names]  # fmt: skip
        for number in range(2):  # SLURM counts and hands out files that are no GPUs
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        (self.folder / "slurm.conf").write_text(_CONFIG.format(folder=self.folder, nodes="\n".join(lines)))
        # The default refuses a machine on which both versions of cgroups are mounted.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        self.log = open(self.folder / "daemons.log", "ab")  # noqa: SIM115 - the daemons write to it until the end

    def make_network(self) -> None:
        """Makes the namespaces, their addresses and the hosts file.

        Raises:
            CalledProcessError: where that is not permitted.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        hosts = [f"{self.address(name)} {name}" for name in ("head", *self.names)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))

        def ip(*words: str) -> None:
            subprocess.run(["ip", *words], check=True, capture_output=True, env=self.environment)

        head = self.namespace("head")
        for name in ("head", *self.names):
            ip("netns", "add", self.namespace(name))
            ip("-n", self.namespace(name), "link", "set", "lo", "up")
        ip("-n", head, "link", "add", "bridge0", "type", "bridge")
        ip("-n", head, "address", "add", "10.77.0.1/24", "dev", "bridge0")
        ip("-n", head, "link", "set", "bridge0", "up")
        for name in self.names:
            space = self.namespace(name)
            ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"port-{name}", "netns", head)
            ip("-n", head, "link", "set", f"port-{name}", "master", "bridge0", "up")
            ip("-n", space, "address", "add", f"{self.address(name)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")

    def remove_network(self) -> None:
        """Removes the namespaces with all that is in them."""
        for name in ("head", *self.names):
            subprocess.run(["ip", "netns", "delete", self.namespace(name)], capture_output=True, env=self.environment)

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        subprocess.run(
            ["mungekey", "--create", f"--keyfile={munge}/key"], check=True, capture_output=True, env=self.environment
        )
        argv = ["munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key"]
        argv += [f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        self.daemons["munged"] = subprocess.Popen(argv, stdout=self.log, stderr=self.log, env=self.environment)
        self.wait((munge / "socket").exists, 20, "munged made no socket")

    def inside(self, name: str, *argv: str) -> list[str]:
        """The command that runs `argv` on `head` or on a node."""
        # `ip netns exec` would mount /sys anew, without the cgroups.
        shell = f'hostname {name} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        return ["nsenter", f"--net=/var/run/netns/{self.namespace(name)}", "unshare", "--uts", "--mount",
                "--propagation", "private", "bash", "-c", shell, "bash", *argv]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with the cluster's configuration."""
        path = f"{os.environ.get('PATH')}:/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def start(self, name: str, *argv: str) -> None:
        """Starts a daemon on `head` or on a node."""
        self.daemons[name] = subprocess.Popen(
            self.inside(name, *argv), env=self.environment, stdin=subprocess.DEVNULL, stdout=self.log,
            stderr=self.log, start_new_session=True,
        )  # fmt: skip

    def start_node(self, name: str) -> None:
        """Starts a compute node."""
        self.start(name, "slurmd", "-D", "-N", name)

    def power_off(self, name: str) -> None:
        """Kills a compute node with everything that runs on it."""
        daemon = self.daemons.pop(name)
        for process in [daemon.pid, *self.processes_on(name)]:
            _kill(process)
        daemon.wait()

    def processes_on(self, name: str) -> list[int]:
        """The processes in a node's network namespace."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True, env=self.environment
        )
        return [int(word) for word in done.stdout.split()]

    def run(
        self, *argv: str, on: str = "head", check: bool = True, timeout: float = 120, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on `head` or on a node, and waits for it; `more` is added to its environment."""
        env = {**self.environment, **more}
        return subprocess.run(self.inside(on, *argv), env=env, check=check, capture_output=True, text=True,
                              timeout=timeout)  # fmt: skip

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol` says about a job; empty if it has forgotten it."""
        words = self.run("scontrol", "--oneliner", "show", "job", job, check=False).stdout.split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, condition: Callable[[], object], seconds: float, otherwise: Callable[[], str] | str) -> None:
        """Waits until a condition holds.

        Raises:
            AssertionError: with the end of the daemons' logs.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            gone = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if gone or time.monotonic() > deadline:
                otherwise = f"the daemon of {', '.join(gone)} has ended" if gone else otherwise
                problem = otherwise if isinstance(otherwise, str) else otherwise()
                raise AssertionError(f"{problem}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self, lines: int = 15) -> str:
        """The last lines of each daemon's log."""
        texts = []
        for path in [*sorted(self.folder.glob("*.log")), self.folder / "munge" / "log"]:
            if path.is_file():
                texts += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(texts)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
