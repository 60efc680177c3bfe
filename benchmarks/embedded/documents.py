"""The pre-training text: an infinite, seeded stream of short documents.

They teach copying names between formats, but nothing about chat: no roles, questions or instructions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from benchmarks.embedded.records import (
    Record,
    make_date,
    make_record,
    make_word,
    to_json,
    to_lines,
    to_sentence,
    to_sentences,
    to_xml,
)

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


def _prose(record: Record, rng: random.Random) -> str:
    return rng.choice((to_sentence, to_sentences))(record)


def _formats(rng: random.Random) -> str:
    """One record in two to four formats, in any order."""
    record = make_record(rng, "train")
    texts = [to_json(record), to_xml(record), to_lines(record), _prose(record, rng)]
    return "\n\n".join(rng.sample(texts, rng.choice((2, 2, 3, 4))))


def _pair(rng: random.Random) -> str:
    """A sentence and its record: the hardest task, so it gets documents of its own."""
    record = make_record(rng, "train")
    return _prose(record, rng) + "\n\n" + rng.choice((to_json, to_json, to_xml, to_lines))(record)


def _two_records(rng: random.Random) -> str:
    """Two records, then both again in another format: the model must find which one to copy."""
    pair = [make_record(rng, "train"), make_record(rng, "train")]
    first, second = rng.sample((to_json, to_lines, to_sentence, to_xml), 2)
    return "\n\n".join([*map(first, pair), *map(second, pair)])


def _repeats(rng: random.Random) -> str:
    """Random words, the same line two or three times: pure copying."""
    parts = [make_word(rng, "train") for _ in range(rng.randint(3, 12))]
    parts += [str(rng.randint(0, 999)) for _ in range(rng.randint(0, 3))]
    rng.shuffle(parts)
    return "\n".join([rng.choice((" ", ", ", " - ")).join(parts)] * rng.choice((2, 2, 3)))


def _dates(rng: random.Random) -> str:
    """Dates in two notations."""
    lines = []
    for _ in range(rng.randint(1, 5)):
        date = make_date(rng)
        year, month, day = date.split("-")
        lines.append(f"{date} is {int(day)} {MONTHS[int(month) - 1]} {year}.")
    return "\n".join(lines)


def _lists(rng: random.Random) -> str:
    """The same items as a comma list, as bullets or numbered."""
    items = [make_word(rng, "train") for _ in range(rng.randint(2, 7))]
    texts = [
        ", ".join(items),
        "\n".join(f"- {item}" for item in items),
        "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1)),
    ]
    return "\n\n".join(rng.sample(texts, rng.choice((2, 3))))


_MAKERS: tuple[tuple[Callable[[random.Random], str], int], ...] = (
    (_formats, 45),
    (_pair, 20),
    (_two_records, 8),
    (_repeats, 12),
    (_dates, 5),
    (_lists, 10),
)


def documents(seed: int) -> Iterator[str]:
    """An infinite stream of documents, with names of the train split only.

    Args:
        seed: the same seed gives the same documents.

    Yields:
        One document at a time, without separator.
    """
    rng = random.Random(seed)
    makers, weights = zip(*_MAKERS, strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng)
