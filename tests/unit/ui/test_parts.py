"""Fragments that several pages share, and those of the Run page."""

from __future__ import annotations

from app.diagnosis.advice import Diagnosis, Evidence
from ui.pages.run_parts import diagnosis_cards
from ui.parts import Html, alert_list, data_table, note

CAUSE = "rank 1: OutOfMemoryError: CUDA out of memory"


def test_backticks_in_a_sentence_make_code_and_nothing_else() -> None:
    assert note("run `a <b>` now") == '<p class="ts-note">run <code>a &lt;b&gt;</code> now</p>'
    assert note("a ` alone") == '<p class="ts-note">a ` alone</p>'
    assert note(Html("<b>`x`</b>")) == '<p class="ts-note"><b>`x`</b></p>'
    assert "<li><code>--steps</code> is missing</li>" in alert_list(["`--steps` is missing"])


def test_a_table_without_rows_is_a_sentence() -> None:
    assert data_table(["Step"], [], "Checkpoints", empty="None yet.") == note("None yet.")
    assert "<th" in data_table(["Step"], [[1]], "Checkpoints", empty="None yet.")


def test_a_diagnosis_does_not_repeat_the_cause_above_it() -> None:
    evidence = [Evidence(CAUSE, 1), Evidence(CAUSE.removeprefix("rank 1: "), 1), Evidence("free: 1 GiB", 1)]
    diagnosis = Diagnosis("memory", "Rank 1 ran out of memory.", evidence, [], "")
    cards = diagnosis_cards([diagnosis], done=False, cause=CAUSE)
    assert cards.count("CUDA out of memory") == 0
    assert "rank 1: free: 1 GiB" in cards
    assert diagnosis_cards([diagnosis], done=False).count("CUDA out of memory") == 1
