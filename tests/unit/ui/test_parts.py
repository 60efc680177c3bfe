"""Fragments that several pages share, and those of the Run page."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from app.diagnosis.advice import Change, Diagnosis, Evidence
from app.services.form import Numbers
from ui.pages.run_parts import diagnosis_cards, remedy_label
from ui.pages.train_parts import _length
from ui.parts import Html, alert_list, data_table, note, sentence, unbroken

CAUSE = "rank 1: OutOfMemoryError: CUDA out of memory"


def test_backticks_in_a_sentence_make_code_and_nothing_else() -> None:
    assert note("run `a <b>` now") == '<p class="ts-note">run <code>a &lt;b&gt;</code> now</p>'
    assert note("a ` alone") == '<p class="ts-note">a ` alone</p>'
    assert note(Html("<b>`x`</b>")) == '<p class="ts-note"><b>`x`</b></p>'
    assert "<li><code>--steps</code> is missing</li>" in alert_list(["`--steps` is missing"])


def test_a_table_without_rows_is_a_sentence() -> None:
    assert data_table(["Step"], [], "Checkpoints", empty="None yet.") == note("None yet.")
    assert "<th" in data_table(["Step"], [[1]], "Checkpoints", empty="None yet.")


def test_a_failure_is_told_once_in_a_sentence_and_once_as_it_was_recorded() -> None:
    evidence = [Evidence(CAUSE, 1), Evidence(CAUSE.removeprefix("rank 1: "), 1), Evidence("free: 1 GiB", 1)]
    diagnosis = Diagnosis("memory", "Rank 1 ran out of memory.", evidence, [], "")
    cards = diagnosis_cards([diagnosis], "failed", CAUSE)
    assert cards.count("CUDA out of memory") == 1
    assert "rank 1: free: 1 GiB" in cards
    assert 'role="alert"' in cards
    unknown = Diagnosis("", CAUSE.removeprefix("rank 1: "), evidence[:1], [], "The last error in the log says more.")
    cards = diagnosis_cards([unknown], "failed", CAUSE)
    assert "<h3>Rank 1: OutOfMemoryError" in cards
    assert cards.count("CUDA out of memory") == 1


def test_the_cause_of_another_end_stands_above_the_cards_alone() -> None:
    diagnosis = Diagnosis("slow", "Rank 1 is slow.", [Evidence("stopped by a stop request")], [], "")
    cards = diagnosis_cards([diagnosis], "stopped", "stopped by a stop request")
    assert "stop request" not in cards
    assert 'role="alert"' not in cards


@pytest.mark.parametrize(
    ("text", "state", "label"),
    [
        ("recompute activations in the backward pass: less memory", "failed",
         "Resume: recompute activations in the backward pass"),
        ("keep saved activations in host memory, the same model", "stopped",
         "Resume: keep saved activations in host memory"),
        ("learning rate 2e-05 instead of 0.0002", "done", "Train again: learning rate 2e-05 instead of 0.0002"),
    ],
)  # fmt: skip
def test_the_button_of_a_remedy_names_it(text: str, state: str, label: str) -> None:
    assert remedy_label(Change(3, text, {}, {}, force=False), state) == label


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("stop requested; the run saves", "Stop requested; the run saves"),
        ("rank 1: ValueError: x", "Rank 1: ValueError: x"),
        ("max_steps=0 is refused", "max_steps=0 is refused"),
        ("packing needs more rows", "packing needs more rows"),
        ("ddp runs here", "ddp runs here"),
        ("/data/x is missing", "/data/x is missing"),
        ("`tunesmith` is missing", "`tunesmith` is missing"),
        (Html("<b>as it is</b>"), "<b>as it is</b>"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_and_a_name_as_it_is_written(line: str, shown: str) -> None:
    assert sentence(line) == shown
    assert shown.replace("`", "") in alert_list([line]).replace("<code>", "").replace("</code>", "")


def test_a_command_is_broken_between_its_words_and_copied_as_it_is() -> None:
    command = "train --on slurm  --name 'a & b'"
    shown = unbroken(command)
    assert '<span class="ts-word">--name</span>' in shown
    assert unescape(re.sub("<[^>]*>", "", shown)) == command


def test_a_length_without_a_number_of_steps_says_where_they_are_counted() -> None:
    counted = Numbers(2, 2, 8, 1, 16, 4096, 3e-3, epochs=1.0, steps_per_epoch=123, total_steps=123)
    assert _length(counted) == "1 pass over the data: 123 steps"
    unknown = replace(counted, steps_per_epoch=None, total_steps=None)
    assert _length(unknown) == '1 pass over the data (<a href="data">count its steps</a>)'


def test_the_cells_of_a_card_say_what_they_are() -> None:
    assert '<td data-name="Step">1</td>' in data_table(["Step"], [[1]], "Steps", cards=True)
    assert "data-name" not in data_table(["Step"], [[1]], "Steps")
