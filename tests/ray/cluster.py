"""A real Ray cluster on this machine: a head without CPUs to give, and nodes with loopback addresses of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

import psutil


class RayCluster:
    """A running cluster, as a context manager.

    Args:
        nodes: number of nodes, each with CPUs for one process.
        environment: variables of the head's and the nodes' processes.
    """

    def __init__(self, nodes: int, environment: Mapping[str, str]):
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        self.started, self.environment = 0, dict(environment)
        self.nodes: list[Any] = []
        self.cluster = Cluster(initialize_head=True, head_node_args=self._arguments(num_cpus=0))
        self.address = str(self.cluster.address)
        self.session = self.cluster.head_node.get_session_dir_path()
        for _ in range(nodes):
            self.add_node()

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *error: object) -> None:
        processes = [child for node in self.nodes for child in self.processes_on(node)]
        self.cluster.shutdown()
        for process in processes:  # what Ray started is in sessions of its own
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.session, ignore_errors=True)

    def _arguments(self, **more: Any) -> dict[str, Any]:
        fixed = {"num_gpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False}
        return {**fixed, "env_vars": self.environment, **more}

    def add_node(self) -> Any:
        """Adds a node with an address that no node had before."""
        self.started += 1
        node = self.cluster.add_node(**self._arguments(num_cpus=1, node_ip_address=f"127.0.0.{10 + self.started}"))
        self.nodes.append(node)
        return node

    def processes_on(self, node: Any) -> list[psutil.Process]:
        """All processes of a node."""
        found: set[psutil.Process] = set()
        for kind in node.all_processes.values():
            for info in kind:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(info.process.pid)
                    found |= {process, *process.children(recursive=True)}
        return list(found)

    def power_off(self, node: Any) -> None:
        """Kills a node with everything that runs on it."""
        processes = self.processes_on(node)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.suspend()  # so that none sees another die
        for process in [*processes, *self.processes_on(node)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        self.nodes.remove(node)
