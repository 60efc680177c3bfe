"""A Ray cluster, as the driver of a run sees it: reserves nodes, and calls one program on each.

Only strings and numbers go through Ray: what it calls on a node is `subprocess.call` of the standard library, named by
reference, with a list of arguments. Imported by the driver alone, as `ray` takes a while to import.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from app.console import clean, shortened
from app.hardware import cpu_count

LOOPBACK = "127.0.0.1"
_STORE_BYTES = 80_000_000
"""Of the object store of a local cluster, near the least that Ray takes: nothing is put into it."""
_NOT_AN_ADDRESS = ("http://", "https://", "ray://")


class ClusterError(RuntimeError):
    """The cluster cannot be reached or used; the message is one line that says how."""


class Cluster:
    """A connection to a cluster; one for each process.

    Args:
        address: address of the cluster, as `RAY_ADDRESS` names it; None starts a local one, which ends with this
            process.
        resources: what the run needs on each node.

    Raises:
        ClusterError: if there is no such cluster, or Ray is not installed.
    """

    def __init__(self, address: str | None, resources: Mapping[str, int]):
        self.resources, self.is_local = dict(resources), address in (None, "", "local")
        if address and address.startswith(_NOT_AN_ADDRESS):
            raise ClusterError(
                f"RAY_ADDRESS={shortened(address)} is no address of a cluster: run this on one of its machines, with "
                "RAY_ADDRESS=HOST:6379 or RAY_ADDRESS=auto"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if self.is_local:
            # Other users of this machine reach its ports too, and who reaches one may run code.
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        try:
            import ray
            from ray._private import services
        except ImportError:
            raise ClusterError("ray is not installed; `pip install 'tunesmith[ray]'` does it") from None
        quiet = {"log_to_driver": False, "configure_logging": False}
        try:
            if self.is_local:
                # Otherwise Ray replaces 127.0.0.1 by the address of a network interface, and listens on all of them.
                services.resolve_ip_for_localhost = lambda host: host
                ray.init(
                    address="local", include_dashboard=False, _node_ip_address=LOOPBACK,
                    object_store_memory=_STORE_BYTES, num_cpus=max(cpu_count(), self.resources["CPU"]), **quiet,
                )  # fmt: skip
            else:
                ray.init(address=address, **quiet)
        except Exception as error:
            raise ClusterError(_line(error)) from None
        self.ray = ray
        self.calls: dict[int, Any] = {}
        self.job = str(ray.get_runtime_context().get_job_id())
        self.group: Any = None

    def reserve(self, nodes: int) -> None:
        """Asks for a number of different nodes with the resources; returns at once."""
        from ray.util.placement_group import placement_group

        strategy = "STRICT_SPREAD" if nodes > 1 else "STRICT_PACK"
        self.group = placement_group([dict(self.resources)] * nodes, strategy=strategy)

    def addresses(self) -> list[str] | None:
        """Addresses of the reserved nodes by rank; None while not all are reserved and alive."""
        from ray.util.placement_group import placement_group_table

        table = placement_group_table(self.group)
        alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self.ray.nodes() if node["Alive"]}
        nodes = [table["bundles_to_node_id"].get(rank, "") for rank in range(len(table["bundles"]))]
        if table["state"] != "CREATED" or not set(nodes) <= set(alive):
            return None
        return [alive[node] for node in nodes]

    def fitting_nodes(self) -> int:
        """Number of nodes that have the resources, in use or not."""
        alive = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        return sum(all(node.get(name, 0) >= count for name, count in self.resources.items()) for node in alive)

    def run(self, rank: int, argv: Sequence[str], seconds: float = 10.0) -> int:
        """Runs a short program on a reserved node, and waits for it; returns its exit status.

        Raises:
            ClusterError: if the node is lost, or does not answer in time.
        """
        call = self._called(rank, argv, {"num_cpus": 0})
        try:
            return int(self.ray.get(call, timeout=seconds))
        except Exception as error:
            self.ray.cancel(call, force=True)
            raise ClusterError(_line(error)) from None

    def start(self, rank: int, argv: Sequence[str]) -> None:
        """Starts the program of a reserved node, which uses all that is reserved there."""
        amount = {"num_cpus": self.resources["CPU"], "num_gpus": self.resources.get("GPU", 0)}
        self.calls[rank] = self._called(rank, argv, amount)

    def _called(self, rank: int, argv: Sequence[str], amount: Mapping[str, int]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.group, rank)
        function = self.ray.remote(subprocess.call).options(max_retries=0, scheduling_strategy=where, **amount)
        return function.remote([str(word) for word in argv])

    def outcomes(self, seconds: float) -> dict[int, int | ClusterError]:
        """Of each started program that has ended, its exit status, or how Ray lost it.

        Args:
            seconds: how long to wait for all of them.
        """
        ranks = {call: rank for rank, call in self.calls.items()}
        ready, _ = self.ray.wait(list(ranks), num_returns=len(ranks), timeout=seconds)
        ended: dict[int, int | ClusterError] = {}
        for call in ready:
            try:
                ended[ranks[call]] = int(self.ray.get(call))
            except Exception as error:
                ended[ranks[call]] = ClusterError(_line(error))
        return ended

    def cancel(self) -> None:
        """Kills what Ray has started for the programs that still run."""
        for call in self.calls.values():
            self.ray.cancel(call, force=True)

    def end(self) -> None:
        """Gives the nodes back and leaves the cluster; a local one ends, and its files are removed."""
        from ray._private import worker

        session = worker._global_node.get_session_dir_path() if self.is_local else None
        self.ray.shutdown()
        if session:
            shutil.rmtree(session, ignore_errors=True)


def _line(error: Exception) -> str:
    """The first sentence of one of Ray's errors, which go on with advice and stack traces."""
    lines = [clean(line).strip() for line in str(error).splitlines() if line.strip()]
    return shortened(lines[0].partition(". ")[0] if lines else type(error).__name__, 200)
