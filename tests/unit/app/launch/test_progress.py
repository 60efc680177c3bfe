"""What a foreground run shows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from app.console import clean
from app.launch import progress
from app.launch.progress import progress_display
from trainers.run.folder import RunFolder, log_line


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.create()
    return folder


def test_off_a_terminal_the_first_ranks_lines_come_as_they_are_written(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    run.log.write_text(log_line("rank 0", "from an earlier attempt"))
    with progress_display(run, quiet=False) as show, open(run.log, "a") as log:
        log.write(log_line("rank 0", "step 1\x1b[31m red\x1b[0m") + log_line("rank 1", "mine") + "half")
        log.flush()
        show("tick", "")
        show("note", "stopping")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "step 1 red\nstopping\n")


def test_quiet_shows_notes_alone(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display(run, quiet=True) as show:
        run.log.write_text(log_line("rank 0", "step 1"))
        show("tick", "")
        show("note", "stopping")
    assert capsys.readouterr().err == "stopping\n"


def test_on_a_terminal_a_bar_follows_state_metrics_and_heartbeat(run: RunFolder) -> None:
    screen = io.StringIO()
    columns = progress._bar().columns
    with Progress(*columns, console=Console(file=screen, force_terminal=True, width=150)) as bar:
        show = progress._TerminalDisplay(run, bar)
        show("tick", "")
        run.write_state(state="running", step=10, total_steps=40)
        row = {"step": 10, "loss": 1.25, "tokens_per_second": 1, "recent_tokens_per_second": 12345.6, "eta_s": 3725}
        run.metrics.write_text(json.dumps(row) + '\n{"eval_loss": 3}\n[1]\nrubbish\n{"loss": 9')
        (run.heartbeats / "rank-0.json").write_text('{"step": 12, "section": "evaluation"}')
        show("tick", "")
        show("note", "stopping: [bold]saving")
    text = clean(screen.getvalue())
    for part in (
        "starting",
        "evaluation",
        "12/40",
        "loss 1.2500",
        "12,346 tok/s",
        "left 1:02:05",
        "stopping: [bold]saving",
    ):
        assert part in text


def test_what_a_log_holds_cannot_drive_the_terminal() -> None:
    assert clean("a\x1b[2Jb\x1b]0;title\x07c\x9bd\re\u202ef\tg\n") == "abcdef\tg\n"


@pytest.mark.parametrize("width", [40, 59, 60, 80, 110])
def test_the_step_count_and_the_loss_stay_on_any_width(run: RunFolder, width: int) -> None:
    screen = io.StringIO()
    columns = progress._bar(width).columns
    with Progress(*columns, console=Console(file=screen, force_terminal=True, width=width)) as bar:
        show = progress._TerminalDisplay(run, bar)
        run.write_state(state="running", step=54, total_steps=60)
        run.metrics.write_text('{"step": 54, "loss": 1.25, "tokens_per_second": 12345.6, "eta_s": 65}\n')
        show("tick", "")
    text = clean(screen.getvalue())
    assert "54/60" in text
    assert "loss 1.2500" in text
    assert ("tok/s" in text) == (width >= 80)


def test_what_the_first_rank_warns_of_reaches_every_user(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["checkpoint step-00000001 is bad: cut; set aside as bad-1", "there is no checkpoint to resume from",
            "the best checkpoint, of step 3, is not in this run", "warning: seed is odd"]  # fmt: skip
    lines = ["step 1", *told, "warning: known", "resumed from x at step 4"]
    screen = io.StringIO()
    with progress_display(run, quiet=True, printed=["warning: known"]) as quiet:
        with Progress(console=Console(file=screen, force_terminal=True, width=150)) as bar:
            terminal = progress._TerminalDisplay(run, bar, ["warning: known"])
            run.log.write_text("".join(log_line("rank 0", line) for line in lines) + log_line("rank 1", "warning: no"))
            terminal("tick", "")
        quiet("tick", "")
    assert capsys.readouterr().err.splitlines() == told
    text = clean(screen.getvalue())
    assert all(line in text for line in [*told, "resumed from x at step 4"])
    assert not any(line in text for line in ("step 1", "known", "warning: no"))


def test_what_the_check_has_shown_is_not_shown_again(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display(run, quiet=False, printed=["train data: 4 rows"]) as show:
        run.log.write_text("".join(log_line("rank 0", line) for line in ("train data: 4 rows", "train data: 5 rows")))
        show("tick", "")
    assert capsys.readouterr().err.splitlines() == ["train data: 5 rows"]
