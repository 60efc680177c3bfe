"""SLURM on the Train page, with stand-ins for its programs; `tests/slurm` has the real ones, without a page."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Served, Tabs, axe, choose_strategy, is_whole, screenshot

PROGRAMS = {
    "sbatch": 'for word; do script="$word"; done\ncp "$script" "$0.script"\necho "$script" > "$0.path"\necho 42',
    "squeue": "echo '42|PENDING|0|Resources|'",
    "scontrol": 'echo "JobId=42"; echo "   Command=$(cat "$(dirname "$0")/sbatch.path")"',
    "scancel": "true",
}
SITE = 'slurm:\n  partition: gpu\n  account: "my-group"\n  time: "8:00:00"\n  gpus_per_node: 8\n'


@pytest.fixture
def site(serve: Callable[..., Served], tmp_path: Path) -> Served:
    """A server on a login node."""
    expect.set_options(timeout=60_000)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, lines in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{lines}\n")
        (programs / name).chmod(0o755)
    file = tmp_path / "config" / "tunesmith" / "site.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(SITE)
    return serve(PATH=f"{programs}:{os.environ['PATH']}", XDG_CONFIG_HOME=str(tmp_path / "config"))


def slurm_page(new_page: Tabs, site: Served, size: str, scheme: str = "light") -> Page:
    """The Train page with SLURM chosen."""
    page = new_page("/", size, scheme, server=site)
    expect(page.locator("#train-command pre")).to_be_visible()
    expect(page.locator("#opt-nodes")).to_be_hidden()
    page.locator("#opt-on").get_by_label("SLURM", exact=True).check()
    expect(page.locator("#opt-nodes input")).to_be_visible()
    expect(page.locator("#opt-gpus")).to_be_hidden()
    expect(page.get_by_text("The memory of the nodes is not known on this machine.")).to_be_visible()
    expect(page.locator("#strategy-cards .ts-bar")).to_have_count(0)
    return page


@pytest.mark.parametrize("size", ["wide", pytest.param("phone", marks=pytest.mark.long)])
def test_a_job_is_filled_in_from_the_site_and_submitted(
    site: Served, new_page: Tabs, size: str, tmp_path: Path
) -> None:
    page = slurm_page(new_page, site, size)
    for name, value in {"partition": "gpu", "account": "my-group", "time": "8:00:00", "gpus_per_node": "8"}.items():
        expect(page.locator(f"#opt-{name} input")).to_have_value(value)
    assert page.locator("#opt-container, #opt-slurm_extra").count() == 0, "code comes from no page"
    page.locator("#opt-nodes input").fill("2")
    page.locator("#opt-time input").fill("eight")
    expect(page.locator("#opt-time .ts-field-error")).to_contain_text("is not a time limit such as 30, 8:00:00")
    expect(page.locator("#launch")).to_be_disabled()
    page.locator("#opt-time input").fill("30")
    page.locator("#opt-gpus_per_node input").fill("0")
    expect(page.locator("#train-preview .ts-verdict")).to_contain_text("on 2 nodes of SLURM")
    script = page.locator("#train-command pre").nth(1)
    expect(script).to_contain_text("#SBATCH --time=30\n")
    expect(page.locator("#train-command pre").first).to_contain_text(
        "train --on slurm --nodes 2 --gpus_per_node 0 --partition gpu --account my-group --time 30 --strategy ddp"
    )
    choose_strategy(page, "fsdp2")
    expect(page.locator("#train-command pre").first).to_contain_text("--strategy fsdp2")
    expect(script).to_contain_text("#SBATCH --nodes=2\n")
    page.reload()
    expect(page.locator("#opt-on").get_by_label("SLURM", exact=True)).to_be_checked()
    expect(page.locator("#opt-nodes input")).to_have_value("2")
    expect(page.locator("#strategy-cards input:checked")).to_have_value("fsdp2")
    expect(page.locator("#train-command pre").first).to_contain_text("--time 30 --strategy fsdp2")
    is_whole(page)
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"train-slurm-{size}")
    page.locator("#opt-max_steps input").fill("3")
    expect(page.locator("#train-command pre").first).to_contain_text("--max_steps 3")
    expect(page.locator("#launch")).to_have_text("Submit to SLURM")
    page.locator("#launch").click()
    page.wait_for_url("**/run?run=*")
    expect(page.locator("main, body").first).to_contain_text("SLURM job 42 waits for free nodes (Resources)")
    (path,) = site.runs_dir.glob("*/slurm.sh")
    assert (tmp_path / "bin" / "sbatch.script").read_text() == path.read_text()
    assert "#SBATCH --nodes=2\n" in path.read_text()
    screenshot(page, f"run-slurm-{size}")


def test_this_machine_again_is_as_before(site: Served, new_page: Tabs) -> None:
    page = slurm_page(new_page, site, "wide")
    page.locator("#opt-on").get_by_label("This machine", exact=True).check()
    expect(page.locator("#opt-gpus")).to_be_visible()
    expect(page.locator("#opt-nodes")).to_be_hidden()
    expect(page.locator("#train-command pre")).to_have_count(1)
    expect(page.locator(".ts-verdict-good")).to_contain_text("Ready to start: ddp on 2 CPU processes")
    expect(page.locator("#strategy-cards .ts-bar").first).to_be_visible()
