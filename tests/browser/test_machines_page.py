"""Several machines on the Train page; the other one is a shell on this machine that runs the line the page shows."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Served, Tabs, axe, screenshot, wait_for
from tests.forked import Popen
from trainers.run.folder import RunFolder


def machines_page(new_page: Tabs, server: Served, size: str, scheme: str = "light") -> Page:
    """The Train page with several machines chosen, and the address of this machine alone."""
    page = new_page("/", size, scheme, server=server)
    expect(page.locator("#train-command pre")).to_be_visible()
    expect(page.locator("#opt-num_machines")).to_be_hidden()
    page.locator("#opt-on").get_by_label("Several machines", exact=True).check()
    expect(page.locator("#opt-num_machines input")).to_have_value("2")
    expect(page.locator("#opt-gpus")).to_be_visible()
    address = page.locator("#opt-main_process_ip input")
    assert address.input_value(), "an address is offered"
    address.fill("127.0.0.1")
    address.press("Enter")
    return page


@pytest.mark.long
@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_the_line_of_the_page_joins_and_who_has_joined_is_shown(
    serve: object, new_page: Tabs, size: str, scheme: str
) -> None:
    expect.set_options(timeout=300_000)
    server: Served = serve()  # type: ignore[operator]
    page = machines_page(new_page, server, size, scheme)
    page.locator("#opt-gpus input").fill("1")
    page.locator("#opt-main_process_port input").fill("99999")
    expect(page.locator("#opt-main_process_port .ts-field-error")).to_contain_text(
        "is not a whole number from 1 to 65535"
    )
    expect(page.locator("#launch")).to_be_disabled()
    page.locator("#opt-main_process_port input").fill("29677")
    page.locator("#opt-shared_folder").get_by_label("no", exact=True).check()
    expect(page.locator("#train-panel")).to_contain_text("all machines must see the run folder")
    page.locator("#opt-shared_folder").get_by_label("yes", exact=True).check()
    page.locator("#opt-max_steps input").fill("4")
    expect(page.locator("#train-command pre").first).to_contain_text("--max_steps 4")
    expect(page.locator("#train-command pre").first).to_contain_text(
        "--num_processes 2 --num_machines 2 --machine_rank 0 --main_process_ip 127.0.0.1 --main_process_port 29677"
    )
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"train-machines-{size}-{scheme}")
    expect(page.locator("#launch")).to_be_enabled()
    page.locator("#launch").click()
    page.wait_for_url("**/run?run=*", timeout=300_000)
    line = page.locator(".ts-join pre")
    expect(line).to_have_count(1)
    expect(page.get_by_text("awaited", exact=True)).to_be_visible()
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"run-machines-{size}-{scheme}")
    text = line.inner_text().strip()
    assert re.fullmatch(r"tunesmith resume \S+ --machine_rank 1", text)
    folder = Path(text.split()[2])
    out = server.folder / "machine-1.txt"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "XDG_STATE_HOME": str(server.folder / "other"), "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    with open(out, "wb") as file:
        other = Popen(["sh", "-c", text], cwd=server.folder, env=env, stdout=file, stderr=file)
    expect(page.get_by_text("trains", exact=True).first).to_be_visible()
    screenshot(page, f"run-machines-joined-{size}-{scheme}")
    expect(line).to_have_count(0)
    assert other.wait(300) == 0, out.read_text()
    state = RunFolder(folder)
    wait_for(lambda: (state.read_state() or {}).get("state") == "done", "the end", 300)
