"""The embedded general text, on which `tunesmith eval --forgetting` measures what a model has forgotten.

`python -m benchmarks.embedded.general_text` writes `passages.jsonl`: the passages in `passages/`, which were written
for this project, and others that this program makes of numbers, tables, dates and everyday phrases. None is taken from
another text. Each row has a `text`, which is short, so that most models read it whole in 512 tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from collections.abc import Callable
from pathlib import Path

from trainers.embedded import GENERAL_DIR

PASSAGES = Path(__file__).resolve().parent / "passages"
SEPARATOR = "\n%%\n"
SEED = 11
NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Farida", "Goran", "Hanne", "Ivo", "Jun", "Kofi", "Leila", "Mira",
         "Nils", "Olga", "Pilar", "Quentin", "Rosa", "Sami", "Tove")  # fmt: skip
GOODS = ("apples", "candles", "nails", "stamps", "tiles", "lemons", "bricks", "buttons", "loaves", "tickets", "bulbs")
TOWNS = ("Arnau", "Belport", "Corvin", "Dunmere", "Eskby", "Falk", "Garrow", "Holm", "Ister", "Jarrow", "Kestrel Bay")


def arithmetic(draw: random.Random) -> str:
    """A calculation in steps."""
    a, b, c = draw.randint(12, 99), draw.randint(3, 19), draw.randint(2, 60)
    forms = [
        f"{a} times {b}: {a // 10 * 10} times {b} is {a // 10 * 10 * b}, and {a % 10} times {b} is {a % 10 * b}. "
        f"Together that is {a * b}. Adding {c} gives {a * b + c}.",
        f"Divide {a * b + c % b} by {b}. {b} goes into it {a} times, which takes {a * b}, and the remainder is "
        f"{c % b}.",
        f"{a} + {b} = {a + b}\n{a + b} + {c} = {a + b + c}\n{a + b + c} - {a} = {b + c}\n{a} * {c} = {a * c}",
        f"What is {c} percent of {a * 100}? One percent is {a}, so {c} percent is {c} times {a}, which is {a * c}.",
        f"The rectangle is {a} cm long and {b} cm wide. Its area is {a} * {b} = {a * b} square centimetres, and its "
        f"perimeter is 2 * ({a} + {b}) = {2 * (a + b)} cm.",
    ]
    return draw.choice(forms)


def word_problem(draw: random.Random) -> str:
    """A question about goods with its answer."""
    first, second = draw.sample(NAMES, 2)
    goods, each, count, given = draw.choice(GOODS), draw.randint(2, 9), draw.randint(11, 40), draw.randint(2, 10)
    return (
        f"Question: {first} buys {count} {goods} at {each} crowns each and gives {given} of them to {second}. How many "
        f"{goods} are left, and what did all of them cost?\nAnswer: {count} - {given} = {count - given} {goods} are "
        f"left. They cost {count} * {each} = {count * each} crowns."
    )


def table(draw: random.Random) -> str:
    """The same few records as a table of one of several notations."""
    rows = [(town, draw.randint(-9, 34), draw.randint(0, 90)) for town in draw.sample(TOWNS, 3)]
    warmest = max(rows, key=lambda row: row[1])[0]
    notations: list[Callable[[], str]] = [
        lambda: "town,celsius,rain_mm\n" + "\n".join(f"{town},{warm},{rain}" for town, warm, rain in rows),
        lambda: (
            "| town | °C | rain |\n|---|---|---|\n"
            + "\n".join(f"| {town} | {warm} | {rain} mm |" for town, warm, rain in rows)
        ),
        lambda: json.dumps([{"town": town, "celsius": warm, "rain_mm": rain} for town, warm, rain in rows]),
        lambda: "\n".join(f"{town}:\n  celsius: {warm}\n  rain_mm: {rain}" for town, warm, rain in rows),
    ]
    return f"{draw.choice(notations)()}\n\nThe warmest of the three is {warmest}."


def calendar(draw: random.Random) -> str:
    """Days between dates, in a sentence."""
    start = datetime.date(draw.randint(1990, 2030), draw.randint(1, 12), draw.randint(1, 28))
    days = draw.randint(5, 300)
    end = start + datetime.timedelta(days=days)
    name, town = draw.choice(NAMES), draw.choice(TOWNS)
    forms = [
        f"{name} left {town} on {start:%A}, {start.day} {start:%B} {start.year}, and came back {days} days later, on "
        f"{end:%A}, {end.day} {end:%B} {end.year}.",
        f"The exhibition in {town} opens on {start.isoformat()} and closes on {end.isoformat()}; that is {days // 7} "
        f"weeks and {counted(days % 7, 'day')}. It is open from {draw.randint(8, 11)}:30 to {draw.randint(16, 20)}:00.",
        f"Dear {name},\n\nthank you for your letter of {start.day} {start:%B}. The delivery to {town} will reach you "
        f"within {days} days, by {end.day} {end:%B} at the latest.\n\nKind regards,\n{draw.choice(NAMES)}",
    ]
    return draw.choice(forms)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def journey(draw: random.Random) -> str:
    """A dialogue at a counter."""
    start, end, change = draw.sample(TOWNS, 3)
    hour, minute, price = draw.randint(6, 20), draw.choice((5, 12, 20, 34, 48)), draw.randint(7, 60)
    wish = draw.choice(("by the window", "in the quiet carriage", "for my bicycle as well", "and one for my daughter"))
    reply = draw.choice(("That is still free.", "I can give you the last one.", "For that you must ask on the train."))
    end_of_talk = draw.choice(
        ("Have a good journey.", "Mind the gap; it is wide today.", "Platform two, over the bridge.")
    )
    return (
        f'"A ticket to {end}, please, {wish}."\n"{reply} The next train from {start} is at {hour}:{minute:02d}, with a '
        f'change at {change}."\n"And what does it cost?"\n"{price} crowns. {end_of_talk}"'
    )


def diary(draw: random.Random) -> str:
    """A few sentences of a diary."""
    weather = ("Rain until noon.", "A clear, cold morning.", "Fog so thick that the gulls walked.", "Warm wind.")
    work = (
        "mended the fence by the stream", "wrote four letters and posted three", "baked, and burnt the second tray",
        "counted the hives", "painted the boat", "went to the dentist at last", "sorted the seeds by colour",
    )  # fmt: skip
    met = ("who has a new dog", "who still coughs", "and spoke of nothing but the election", "on the ladder again",
           "with a suitcase and no hat", "who sends greetings")  # fmt: skip
    thought = (
        "I must find the other glove.", "The clock is slow again, or I am early.", "Tomorrow the well.",
        "In the evening a book about rivers.", "To bed before ten, for once.", "No news from the coast.",
    )  # fmt: skip
    first, second = draw.sample(work, 2)
    return (
        f"{draw.choice(weather)} I {first}, and then {second}. In {draw.choice(TOWNS)} I met {draw.choice(NAMES)}, "
        f"{draw.choice(met)}. {' '.join(draw.sample(thought, 2))}"
    )


MADE: tuple[tuple[str, Callable[[random.Random], str], int], ...] = (
    ("arithmetic", arithmetic, 50), ("word problem", word_problem, 30), ("table", table, 30),
    ("calendar", calendar, 35), ("dialogue", journey, 30), ("diary", diary, 35),
)  # fmt: skip


def passages() -> list[dict[str, str]]:
    """The rows: `kind` and `text`."""
    rows = [
        {"kind": path.stem, "text": text}
        for path in sorted(PASSAGES.glob("*.txt"))
        for text in path.read_text(encoding="utf-8").removesuffix("\n").split(SEPARATOR)
    ]
    draw = random.Random(SEED)
    return rows + [{"kind": kind, "text": make(draw)} for kind, make, count in MADE for _ in range(count)]


def write(folder: Path) -> None:
    """Writes `passages.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in passages()]
    (folder / "passages.jsonl").write_text("".join(lines), encoding="utf-8", newline="\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the embedded general text.")
    parser.add_argument("--output", type=Path, default=GENERAL_DIR)
    write(parser.parse_args().output)


if __name__ == "__main__":
    main()
