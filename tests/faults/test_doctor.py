"""`tunesmith doctor` names what is wrong: each fault is caused, in ranks and in machines (network namespaces)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.detached import TUNESMITH, inside, until
from tests.launching import ROOT
from tests.network import Network, set_up

INJECT = Path(__file__).parent / "inject_doctor"
Checks = dict[str, dict[str, Any]]


def by_name(printed: str) -> Checks:
    return {check["name"]: check for check in json.loads(printed)["checks"]}


def faults(checks: Checks) -> set[str]:
    return {name for name, check in checks.items() if check["passed"] is False}


def doctor(home: Path, *words: str, fault: str = "") -> Checks:
    """The checks of a doctor of two ranks; its exit status says whether there is a fault."""
    variables = {"PYTHONPATH": f"{ROOT}:{INJECT}", "DOCTOR_FAULT": fault} if fault else {}
    done = forked.run(
        [*TUNESMITH, "doctor", "--json", "--num_processes", "2", *words],
        cwd=home, env=inside(home, **variables), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    checks = by_name(done.stdout)
    assert done.returncode == (1 if faults(checks) else 0), done.stderr
    assert all(check["remedy"] for check in checks.values() if check["passed"] is False)
    return checks


# -- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_ranks_of_a_killed_doctor_end(home: Path) -> None:
    temporary = home / "tmp"
    temporary.mkdir()
    words = ["--num_processes", "2", "--timeout", "600"]
    program = forked.Popen([*TUNESMITH, "doctor", *words], cwd=home, env=inside(home, TMPDIR=str(temporary)))
    until(lambda: list(temporary.glob("tunesmith-doctor-*/rank-1.jsonl")), 100)
    tree = psutil.Process(program.pid).children(recursive=True)
    program.kill()
    program.wait()
    assert len(tree) >= 3
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in tree), 60)
    assert list(temporary.iterdir()) == [], "nothing is left"


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("all_reduce", "all-reduce"),
        pytest.param("all_gather_into_tensor", "all-gather", marks=pytest.mark.long),
        pytest.param("reduce_scatter_tensor", "reduce-scatter", marks=pytest.mark.long),
        pytest.param("broadcast", "broadcast", marks=pytest.mark.long),
        pytest.param("reduce", "reduce", marks=pytest.mark.long),
        pytest.param("scatter", "scatter", marks=pytest.mark.long),
        pytest.param("gather", "gather", marks=pytest.mark.long),
        pytest.param("all_to_all_single", "all-to-all", marks=pytest.mark.long),
        pytest.param("batch_isend_irecv", "send/receive", marks=pytest.mark.long),
    ],
)
def test_one_wrong_element_is_seen(function: str, name: str, home: Path) -> None:
    checks = doctor(home, "--quick", fault=f"wrong:1:{function}")
    assert faults(checks) == {name}
    receiver = 0 if name == "send/receive" else 1
    assert checks[name]["value"].startswith(f"rank {receiver} (machine 0, ")
    assert "in world of ranks 0, 1, 1031 elements: element 1030 is " in checks[name]["value"] or name != "all-reduce"


def test_a_barrier_that_lets_a_rank_through_is_seen(home: Path) -> None:
    checks = doctor(home, "--quick", fault="skipped:1:barrier")
    assert "barrier" in faults(checks)
    assert "left before rank 0 arrived" in checks["barrier"]["value"]


def test_a_stopped_rank_is_named(home: Path) -> None:
    checks = doctor(home, "--quick", "--timeout", "8", fault="stop:1:reduce")
    assert faults(checks) == {"ranks", "reduce"}
    assert checks["ranks"]["value"].startswith("rank 1 (machine 0, ")
    assert "is stopped in 'reduce in world'" in checks["ranks"]["value"]
    assert checks["broadcast"]["passed"] is True
    assert checks["barrier"]["passed"] is None


def test_a_killed_rank_is_named(home: Path) -> None:
    checks = doctor(home, "--quick", "--timeout", "20", fault="kill:1:reduce")
    assert "was killed in 'reduce in world'" in checks["ranks"]["value"]
    assert checks["ranks"]["value"].startswith("rank 1 ")


@pytest.mark.long
def test_a_rank_of_low_priority_is_slow(home: Path) -> None:
    checks = doctor(home, fault="nice:1:")
    assert "rank speed" in faults(checks)
    assert checks["rank speed"]["value"].startswith("rank 1 ")


def test_two_ranks_without_a_fault(home: Path) -> None:
    """Every collective, every speed; nothing is left running."""
    checks = doctor(home, "--strategy", "tp")
    assert not faults(checks)
    assert checks["all-to-all"]["value"] == "every element right in world of 2"
    assert "64 KiB" in checks["all-reduce inside a machine"]["value"]
    assert checks["links between machines"]["passed"] is None


# -- machines ----------------------------------------------------------------------------------------------------------


class Machines(Network):
    """Machines that doctors examine together."""

    def doctor(self, *words: str, odd: str = "", absent: int = 0, **variables: str) -> list[Checks]:
        """The report on every machine.

        Args:
            words: further arguments.
            odd: a shell line that the last machine runs first, in mount and host name spaces of its own.
            absent: machines of the highest ranks that nobody starts.
            variables: environment of the last machine.
        """
        started = []
        for number, name in enumerate(self.names[: self.count - absent]):
            line = [*TUNESMITH, "doctor", "--json", "--num_processes", str(self.count), "--num_machines"]
            line += [str(self.count), "--machine_rank", str(number), "--main_process_ip", "10.87.0.10"]
            line += ["--main_process_port", "29500", "--runs_dir", str(self.home / "runs"), *words]
            env = inside(self.home)
            if number == self.count - 1:
                env |= variables
                if odd:
                    line = ["unshare", "--mount", "--uts", "sh", "-c", f'{odd}; exec "$@"', "sh", *line]
            line = ["ip", "netns", "exec", name, *line]
            started.append(subprocess.Popen(line, cwd=self.home, env=env, stdout=subprocess.PIPE, text=True))
        return [by_name(each.communicate(timeout=200)[0]) for each in started]


@pytest.fixture
def network(request: pytest.FixtureRequest, home: Path) -> Iterator[Machines]:
    (home / "runs").mkdir()
    net = Machines(home, request.param)
    with set_up(net):
        yield net


three = pytest.mark.parametrize("network", [3], indirect=True)
two = pytest.mark.parametrize("network", [2], indirect=True)


@three
def test_what_differs_on_a_machine_is_named_before_any_rank_starts(network: Machines, home: Path) -> None:
    """Another version, a clock that is ahead, a folder that is not shared; Debian's 127.0.1.1 does not matter."""
    (home / "other" / "transformers-4.1.0.dist-info").mkdir(parents=True)
    (home / "other" / "transformers-4.1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 4.1.0\n"
    )
    (home / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node2\n")
    odd = f"mount -t tmpfs none {home}/runs; mount --bind {home}/hosts /etc/hosts; hostname node2"
    path = f"{home}/other:{ROOT}:{INJECT}"
    reports = network.doctor("--quick", odd=odd, PYTHONPATH=path, DOCTOR_FAULT="clock:7200:")
    assert [report == reports[0] for report in reports] == [True] * 3
    checks = reports[0]
    expected = {"machine 2: versions", "equal versions", "clocks", "shared folder"}
    assert expected <= faults(checks) <= expected | {"machine 2: package requirements"}
    assert "machine 2 has transformers 4.1.0, and the others " in checks["equal versions"]["value"]
    assert "machine 1 has" not in checks["equal versions"]["value"]
    assert checks["clocks"]["value"] == "machine 2 is 7200.0 s ahead of machine 0"
    assert "machine 2 does not see what machine 0 wrote" in checks["shared folder"]["value"]
    assert checks["machine 2: host name"]["value"] == "node2 is 127.0.1.1; the ranks use 10.87.0.12 on eth0"
    assert checks["all-reduce"]["value"] == "not tried: mend equal versions first"


@pytest.mark.long
@three
def test_a_slow_link_is_named(network: Machines) -> None:
    """The last machine sends at a hundredth of the speed of the others."""
    network.on(
        2, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "1s"
    )
    reports = network.doctor()
    assert [report == reports[0] for report in reports] == [True] * 3
    assert "links between machines" in faults(reports[0])
    assert "all links of rank 2 (machine 2, " in reports[0]["links between machines"]["value"]
    assert reports[0]["all-reduce"]["passed"] is True


@pytest.mark.long
@three
def test_two_machines_that_cannot_reach_each_other_are_named(network: Machines) -> None:
    network.on(1, "ip", "route", "add", "unreachable", "10.87.0.12/32")
    checks = network.doctor("--quick")[0]
    assert "machine 1 cannot reach machine 2 at 10.87.0.12:" in checks["connections"]["value"]
    assert "machine 0 cannot" not in checks["connections"]["value"]
    assert checks["all-reduce"]["passed"] is None


@two
def test_a_machine_that_cannot_reach_the_port_says_so(network: Machines) -> None:
    network.on(1, "ip", "route", "add", "unreachable", "10.87.0.10/32")
    first, second = network.doctor("--quick", "--timeout", "5")
    assert first["port"]["value"] == "machine 1 did not reach port 29500 of machine 0 within 5 s"
    assert second["port"]["value"].startswith("machine 1 could not reach machine 0 at 10.87.0.10:29500 within 5 s: ")
    assert first["all-reduce"]["passed"] is second["all-reduce"]["passed"] is None
    assert first["machine 0: run folder"]["passed"] is second["machine 1: run folder"]["passed"] is True


@pytest.mark.long
@two
def test_delay_is_no_fault(network: Machines) -> None:
    """A far machine is slow to answer, and right; its two links are alike."""
    try:
        network.on(1, "tc", "qdisc", "add", "dev", "eth0", "root", "netem", "delay", "20ms")
    except subprocess.CalledProcessError:
        pytest.skip("this kernel has no netem")
    first, _ = network.doctor("--quick")
    assert not faults(first)
