"""A bad link between two machines: passes the frames of two TAP devices on, late, with losses, or not at all.

For kernels without netem. Run as a program, with the names of two devices, which it creates; it reads one order per
line: `delay SECONDS loss SHARE seed NUMBER`, `cut`, `mend`, and answers each with `ok`.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME = 65536


class Relay:
    """The program, as its starter sees it.

    Args:
        names: of the two devices.
    """

    def __init__(self, names: tuple[str, str]):
        argv = [sys.executable, "-m", "tests.relay", *names]
        root = Path(__file__).resolve().parents[1]
        self.program = subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self.answer():
            pytest.skip("this machine has no TAP devices")

    def answer(self) -> bool:
        assert self.program.stdout
        return self.program.stdout.readline() == "ok\n"

    def order(self, text: str) -> None:
        assert self.program.stdin
        self.program.stdin.write(f"{text}\n")
        self.program.stdin.flush()
        assert self.answer()

    def end(self) -> tuple[int, int]:
        """Ends the program; returns how many frames it has passed on and dropped."""
        out, _ = self.program.communicate(timeout=60)
        passed, dropped = out.split()
        return int(passed), int(dropped)

    def kill(self) -> None:
        """Ends the program if it still runs; its devices go with it."""
        self.program.kill()
        self.program.wait()


def tap(name: str) -> int:
    """Creates a TAP device that lives as long as the descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def main(names: list[str]) -> None:
    """Passes frames on until standard input ends."""
    first, second = (tap(name) for name in names)
    other = {first: second, second: first}
    waiting: list[tuple[float, int, int, bytes]] = []
    delay, loss, chance, is_cut = 0.0, 0.0, random.Random(0), False
    passed = dropped = 0
    print("ok", flush=True)
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select([first, second, 0], [], [], timeout)
        for device in ready:
            if device == 0:
                words = sys.stdin.readline().split()
                if not words:
                    print(passed, dropped)
                    return
                if words[0] == "delay":
                    delay, loss, chance = float(words[1]), float(words[3]), random.Random(int(words[5]))
                else:
                    is_cut = words[0] == "cut"
                print("ok", flush=True)
                continue
            frame = os.read(device, FRAME)
            if is_cut or chance.random() < loss:
                dropped += 1
            else:
                passed += 1
                heapq.heappush(waiting, (time.monotonic() + delay, passed, other[device], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, frame = heapq.heappop(waiting)
            try:
                os.write(device, frame)
            except OSError:  # the device is down, as while the machines are set up, or its queue is full
                dropped += 1


if __name__ == "__main__":
    main(sys.argv[1:])
