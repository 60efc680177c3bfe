"""The language table: real texts in their languages, a stated sample, the tokens that are trained."""

from __future__ import annotations

from pathlib import Path

from tests.unit.data.test_near import as_chat, write
from trainers.config.validation import build
from trainers.tools.data_preview import Preview

TEXTS = {
    "en": "The weather was cold this morning, so we stayed at home and read a book about the sea.",
    "de": "Das Wetter war heute Morgen kalt, deshalb sind wir zu Hause geblieben und haben ein Buch gelesen.",
    "fr": "Il faisait froid ce matin, alors nous sommes restés à la maison et nous avons lu un livre.",
    "ja": "今朝は寒かったので、家にいて海についての本を読みました。",
    "ru": "Сегодня утром было холодно, поэтому мы остались дома и читали книгу о море.",  # noqa: RUF001
}
COUNTS = {"en": 12, "de": 6, "fr": 3, "ja": 2, "ru": 1}


def table(folder: Path, rows: list[object], count: int, seed: int = 1) -> dict[str, object]:
    data = write(folder / f"{len(rows)}.jsonl", rows)
    config = build({"model_name_or_path": "embedded", "dataset_name": data, "cache_dir": str(folder), "seed": seed,
                    "max_length": 512})  # fmt: skip
    return Preview(config).languages(count)


def test_replies_are_counted_by_their_language(tmp_path: Path) -> None:
    rows: list[object] = [
        as_chat(TEXTS["fr"], f"{TEXTS[name]} {number}") for name in COUNTS for number in range(COUNTS[name])
    ]
    counted = table(tmp_path, [*rows, as_chat("Why?", "42")], 1000)
    entries = {entry["language"]: entry for entry in counted["languages"]}  # type: ignore[attr-defined]
    assert {name: entry["documents"] for name, entry in entries.items()} == {**COUNTS, "unclear": 1}
    assert list(entries)[:2] == ["en", "de"]
    assert counted["sampled"] == counted["documents"] == 25
    assert sum(entry["share"] for entry in entries.values()) == 1
    assert abs(sum(entry["token_share"] for entry in entries.values()) - 1) < 1e-9
    # Control: the language of the question, which is not trained, does not count.
    assert entries["fr"]["documents"] == 3


def test_a_sample_is_drawn_by_its_seed(tmp_path: Path) -> None:
    rows: list[object] = [{"text": f"{TEXTS[name]} {number}"} for number in range(30) for name in ("en", "de", "fr")]
    first = table(tmp_path, rows, 20)
    assert first == table(tmp_path, rows, 20)
    assert first["sampled"] == 20
    assert len({str(table(tmp_path, rows, 20, seed)["languages"]) for seed in range(1, 6)}) > 1, "control"
