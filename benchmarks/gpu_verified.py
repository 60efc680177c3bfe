"""What ran on one GPU: writes that section of docs/verified.md from the newest result of `make gpu`.

`python -m benchmarks.gpu_verified`; without a result, everything is "not yet".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_proof import FAILED, NOT_RUN, RESULTS, ROOT

PAGE = ROOT / "docs" / "verified.md"
BEGIN, END = "<!-- from the newest result of make gpu -->", "<!-- end -->"
NOT_YET = "not yet"
CLAIMS: dict[str, Sequence[str]] = {
    "`single`, bf16, packed, full: the losses of fp32 within rounding": ("test_bf16_stays_in_its_band",),
    "fp16 with its gradient scaler": ("test_fp16_trains_with_its_scaler",),
    "fp8": ("test_fp8_is_near_bf16",),
    "`torch_compile`": (
        "test_compiled_layers_train_alike", "test_compiled_varlen_is_not_made_anew_for_each_length",
    ),
    "attention kernels: `varlen`, `flex`, `documents`, `sdpa`": (
        "test_a_kernel_equals_plain_matrix_products", "test_a_kernel_trains_as_masked_attention_does",
        "test_packed_rows_in_bf16_get_varlen", "test_no_gradient_is_nan_under_a_mask", "test_a_leak_would_be_seen",
        "test_half_precision_on_packed_rows_gets_varlen",
    ),
    "activation offload": ("test_activations_in_host_memory_free_the_gpu",),
    "`fsdp2`, `fsdp2_offload` on one GPU": (
        "test_fsdp2_on_one_device_is_one_process", "test_fsdp2_offload_is_one_process_with_less_memory",
    ),
    "two GPUs by NCCL: `ddp`, its hooks bf16 and PowerSGD, `fsdp1` with offload, ZeRO++'s quantized messages": (
        "test_two_gpus_by_nccl_are_one_process", "test_compressed_gradients_train_alike",
        "test_fsdp1_offload_is_one_process_with_less_memory",
        "test_quantized_messages_train_and_are_named",
    ),
    "use and power of the GPU in `metrics.jsonl`": ("test_use_and_power_are_in_the_metrics",),
    "QLoRA": ("test_qlora_trains_near_lora",),
    "a killed run resumes bit for bit": ("test_a_killed_run_resumes_bit_for_bit",),
    "a deterministic rerun, bit for bit": ("test_a_deterministic_rerun_is_the_same_bit_for_bit",),
    "no micro-batch makes the host wait": (
        "test_micro_batches_never_make_the_host_wait", "test_a_wait_in_a_micro_batch_would_be_seen",
    ),
    "batches are copied from pinned memory while the host goes on": (
        "test_the_host_goes_on_while_a_batch_waits_for_the_device",
        "test_a_copy_from_pageable_memory_would_make_it_wait",
        "test_pinned_memory_is_not_reused_before_its_copy_has_ended",
        "test_memory_that_is_written_before_its_copy_has_ended_would_be_seen",
    ),
    "two GPUs by a chosen backend": ("test_two_gpus_by_a_chosen_backend_are_one_process",),
    "`prove` in bf16: `single`, `fsdp2_offload`": ("prove",),
    "plans within 7 % of what is reserved, at most 3 % under it": ("memory",),
    "rates beside a bare loop and TRL (`benchmarks/gpu.py`)": ("rates",),
}  # fmt: skip
"""What is claimed, by the tests of tests/gpu or the part of `make gpu` that shows it."""


def newest() -> dict[str, Any] | None:
    """The newest result; None if there is none."""
    files = sorted(RESULTS.glob("*-gpu.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def section(result: dict[str, Any] | None) -> str:
    """Markdown: where the newest result is from, and a row per claim."""
    origin = "`make gpu` has not run on a GPU yet."
    if result is not None:
        versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "transformers", "accelerate"))
        origin = f"{result['date']}, {result['device']}, driver {result['driver']}, {versions}."
    rows = [f"| {claim} | {cell(result, shown_by)} |" for claim, shown_by in CLAIMS.items()]
    return "\n".join([origin, "", "| what | one GPU |", "|---|---|", *rows])


def cell(result: dict[str, Any] | None, shown_by: Sequence[str]) -> str:
    """Whether all of it passed: what failed or was not run is said, and never counts as passed."""
    entries = [entry for name in shown_by for entry in _entries(result, name)]
    failed = [entry for entry in entries if entry["outcome"] == FAILED]
    skipped = [entry for entry in entries if entry["outcome"] == NOT_RUN]
    shown = {str(entry["name"]).partition("::")[2].partition("[")[0] or entry["name"] for entry in entries}
    if failed:
        return f"**failed**: {len(failed)} of {len(entries)}"
    if skipped:
        reasons = "; ".join(dict.fromkeys(str(entry["reason"]).replace("|", "/") for entry in skipped))
        return f"not run: {reasons}" if len(skipped) == len(entries) else f"in part; not run: {reasons}"
    return "yes" if entries and shown == set(shown_by) else NOT_YET if not entries else "in part"


def _entries(result: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The part of this name, or the results of the test of this name, one for each of its parameters."""
    by_name = {part["name"]: part for part in (result or {}).get("parts", [])}
    if not name.startswith("test_"):
        return [by_name[name]] if name in by_name else []
    tests = (by_name.get("tests", {}).get("results") or {}).get("tests", [])
    return [test for test in tests if test["name"].partition("::")[2].partition("[")[0] == name]


def page(text: str, result: dict[str, Any] | None) -> str:
    """The page with the section written anew."""
    before, _, more = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section(result)}\n{END}{more.partition(END)[2]}"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), newest()), encoding="utf-8")


if __name__ == "__main__":
    main()
