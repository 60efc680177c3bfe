"""On the device: a batch is copied while earlier work still runs, and its pinned memory is not reused before that."""

from __future__ import annotations

import pytest
import torch

from trainers.data.layout import to_device

LONG = 4_000_000_000
"""Clock cycles that the device is kept busy for: about two seconds."""
SIZE = 2**22
"""Numbers of a batch here, 32 MiB: the driver copies kilobytes at once whatever memory they are in."""
BATCHES = 8


@pytest.fixture
def device() -> torch.device:
    device = torch.device("cuda", torch.cuda.current_device())
    # Asked of the driver beforehand, which may wait for the device, and kept by torch for the next who asks.
    blocks = [torch.empty(SIZE, dtype=torch.int64).pin_memory() for _ in range(BATCHES)]
    del blocks
    to_device(torch.zeros(SIZE, dtype=torch.int64), device)
    torch.cuda.synchronize()
    return device


def busy() -> torch.cuda.Event:
    """Keeps the stream busy; the event comes after."""
    torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    return event


def test_the_host_goes_on_while_a_batch_waits_for_the_device(device: torch.device) -> None:
    batch = torch.arange(SIZE)
    before = busy()
    copy = to_device(batch, device)
    assert not before.query(), "the copy was only queued"
    assert torch.equal(copy.cpu(), batch)


def test_a_copy_from_pageable_memory_would_make_it_wait(device: torch.device) -> None:
    before = busy()
    torch.arange(SIZE).to(device, non_blocking=True)
    assert before.query()


def test_pinned_memory_is_not_reused_before_its_copy_has_ended(device: torch.device) -> None:
    """Each batch is dropped by the host at once, while none has been copied."""
    before = busy()
    copies = [to_device(torch.full((SIZE,), number), device) for number in range(BATCHES)]
    assert not before.query()
    assert [(copy == number).all().item() for number, copy in enumerate(copies)] == [True] * BATCHES


def test_memory_that_is_written_before_its_copy_has_ended_would_be_seen(device: torch.device) -> None:
    pinned = torch.zeros(SIZE, dtype=torch.int64).pin_memory()
    before = busy()
    copy = pinned.to(device, non_blocking=True)
    pinned.fill_(1)
    assert not before.query()
    assert (copy == 1).all().item()
