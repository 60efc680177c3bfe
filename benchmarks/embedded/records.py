"""Records about an invented world, and five formats to write them in.

A record is an ordered dict of fields (`kind` first); proper names are random syllables. The hash of a word alone
decides which split it belongs to, so no list of names is needed to hold out test names.
"""

from __future__ import annotations

import hashlib
import json
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "eval", "test"]
Record = dict[str, str | int]
ValueType = Literal["name", "place", "age", "amount", "year", "date", "job", "topic", "animal", "colour", "goods"]

JOBS = ("baker", "teacher", "nurse", "farmer", "painter", "pilot", "sailor", "writer", "doctor", "singer")
TOPICS = ("rivers", "bridges", "stars", "music", "birds", "trains", "gardens", "islands", "winter", "maps")
ANIMALS = ("dog", "cat", "horse", "goat", "rabbit", "parrot", "turtle", "donkey")
COLOURS = ("red", "blue", "green", "black", "white", "brown", "grey", "yellow")
GOODS = ("bread", "shoes", "lamps", "books", "flowers", "clocks", "fish", "paper", "hats", "tea")
_CLOSED: dict[str, tuple[str, ...]] = {
    "job": JOBS,
    "topic": TOPICS,
    "animal": ANIMALS,
    "colour": COLOURS,
    "goods": GOODS,
}

_ONSETS = (*"bdfghjklmnprstvwz", "br", "dr", "kr", "st", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
_CODAS = ("", "", "", "n", "r", "s", "l", "k")


@dataclass(frozen=True)
class Field:
    """One field of a kind: its key, the type of its values, and the clause that states it in a sentence."""

    key: str
    value: ValueType
    clause: str


@dataclass(frozen=True)
class Kind:
    """One kind of record: its name, the key of its subject, and the fields that may follow."""

    name: str
    subject: str
    fields: tuple[Field, ...]


KINDS: tuple[Kind, ...] = (
    Kind(
        "person",
        "name",
        (
            Field("age", "age", "is {} years old"),
            Field("city", "place", "lives in {}"),
            Field("job", "job", "works as a {}"),
            Field("born", "date", "was born on {}"),
            Field("friend", "name", "is a friend of {}"),
        ),
    ),
    Kind(
        "book",
        "title",
        (
            Field("author", "name", "was written by {}"),
            Field("pages", "amount", "has {} pages"),
            Field("year", "year", "came out in {}"),
            Field("topic", "topic", "is about {}"),
            Field("city", "place", "was printed in {}"),
        ),
    ),
    Kind(
        "pet",
        "name",
        (
            Field("animal", "animal", "is a {}"),
            Field("owner", "name", "belongs to {}"),
            Field("weight", "age", "weighs {} kg"),
            Field("colour", "colour", "has {} fur"),
            Field("found", "date", "was found on {}"),
        ),
    ),
    Kind(
        "boat",
        "name",
        (
            Field("harbour", "place", "lies in {}"),
            Field("captain", "name", "is led by {}"),
            Field("length", "age", "is {} metres long"),
            Field("built", "year", "was built in {}"),
            Field("colour", "colour", "has {} sails"),
        ),
    ),
    Kind(
        "trip",
        "guest",
        (
            Field("goal", "place", "goes to {}"),
            Field("date", "date", "leaves on {}"),
            Field("price", "amount", "costs {} coins"),
            Field("days", "age", "takes {} days"),
            Field("guide", "name", "is planned by {}"),
        ),
    ),
    Kind(
        "shop",
        "name",
        (
            Field("street", "place", "stands in {}"),
            Field("goods", "goods", "sells {}"),
            Field("owner", "name", "belongs to {}"),
            Field("opened", "date", "opened on {}"),
            Field("staff", "age", "employs {} people"),
        ),
    ),
)
_BY_NAME = {kind.name: kind for kind in KINDS}


def split_of(word: str) -> Split:
    """The split of a name: 70% train, 15% eval, 15% test, by the hash of the word in lower case."""
    bucket = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:4], "big") % 100
    return "train" if bucket < 70 else "eval" if bucket < 85 else "test"


def make_word(rng: random.Random, split: Split) -> str:
    """One capitalised name of two or three random syllables that belongs to `split`."""
    while True:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
        word = "".join(syllables) + rng.choice(_CODAS)
        if split_of(word) == split:
            return word.capitalize()


def make_date(rng: random.Random) -> str:
    """A date as YYYY-MM-DD, with days up to 28 so that it is valid in every month."""
    return f"{rng.randint(1950, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _make_value(rng: random.Random, value: ValueType, split: Split) -> str | int:
    if value == "name":
        return " ".join(make_word(rng, split) for _ in range(rng.choice((1, 2))))
    if value == "place":
        return make_word(rng, split)
    if value == "date":
        return make_date(rng)
    if value == "age":
        return rng.randint(2, 99)
    if value == "amount":
        return rng.randint(100, 999)
    if value == "year":
        return rng.randint(1900, 2029)
    return rng.choice(_CLOSED[value])


def make_record(rng: random.Random, split: Split) -> Record:
    """A record with names of `split` only: its kind, its subject, and two to four other fields in random order."""
    kind = rng.choice(KINDS)
    record: Record = {"kind": kind.name, kind.subject: _make_value(rng, "name", split)}
    for field in rng.sample(kind.fields, rng.choice((2, 3, 3, 4))):
        record[field.key] = _make_value(rng, field.value, split)
    return record


def names_in(text: str) -> set[str]:
    """The names in a text: its capitalised words, without words that start sentences."""
    tokens = "".join(c if c.isalpha() else " " for c in text).split()
    openers = {"The", "It", "This"}
    return {word for word in tokens if word[0].isupper() and word[1:].islower() and word not in openers}


def to_lines(record: Record) -> str:
    """Lines of `key: value`, one per field."""
    return "\n".join(f"{key}: {value}" for key, value in record.items())


def to_json(record: Record) -> str:
    """One line of JSON, keys in the record's order."""
    return json.dumps(record)


def to_xml(record: Record) -> str:
    """One line of XML: an element named after the kind, with one child per field."""
    root = ElementTree.Element(str(record["kind"]))
    for key, value in record.items():
        if key != "kind":
            ElementTree.SubElement(root, key).text = str(value)
    return ElementTree.tostring(root, encoding="unicode")


def _clauses(record: Record) -> tuple[str, str, list[str]]:
    kind = _BY_NAME[str(record["kind"])]
    clauses = {field.key: field.clause for field in kind.fields}
    return kind.name, str(record[kind.subject]), [clauses[k].format(v) for k, v in record.items() if k in clauses]


def to_sentence(record: Record) -> str:
    """One sentence that states every field, in the record's order."""
    kind, subject, clauses = _clauses(record)
    return f"The {kind} {subject} {', '.join(clauses[:-1])} and {clauses[-1]}."


def to_sentences(record: Record) -> str:
    """The same as several short sentences."""
    kind, subject, clauses = _clauses(record)
    return f"The {kind} {subject} {clauses[0]}. " + " ".join(f"It {clause}." for clause in clauses[1:])


def read_json(text: str) -> Record:
    """The record that `to_json` wrote; raises ValueError if the text is not a JSON object."""
    record = json.loads(text)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    return record


def read_xml(text: str) -> Record:
    """The record that `to_xml` wrote, whole numbers read as int; raises ParseError for bad XML."""
    root = ElementTree.fromstring(text)  # noqa: S314  only parses answers of our own models
    fields = {child.tag: child.text or "" for child in root}
    return {"kind": root.tag} | {key: int(v) if v.isdigit() else v for key, v in fields.items()}
