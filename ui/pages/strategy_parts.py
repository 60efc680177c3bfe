"""The strategies of the Train page as cards: a radio button, what each does, and its memory as a bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from app.plan.estimate import CLOSE
from app.services.form import Preview
from app.services.strategy_cards import StrategyCard, StrategyCards, register_job, strategy_cards
from trainers.config.byte_text import byte_text
from ui.parts import Html, element, join, loading, note, percent_text, sentence, with_code

_VISIBLE_CARDS = 4
"""Cards that are always visible; more that can run are folded below them."""
_USES = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations",),
    "other": ("gathered", "overhead"),
}
"""Parts of a bar, and the planner's uses that each shows."""


_QUICK: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
_LOOK_SECONDS = 1.0
"""Seconds between looks at an estimate; the first starts it, so that nothing is counted while one types."""
NO_JOB = "The strategies that can run are listed once the form has no mistakes."


class StrategyPicker:
    """The cards, and the timer that waits for their estimate.

    Args:
        preview_of: the preview of the form's values with the strategy that it gets without a choice.
    """

    def __init__(self, preview_of: Callable[..., Preview]):
        self.preview_of = preview_of
        self.panel = gr.HTML(loading(), elem_id="train-cards", apply_default_css=False)
        self.key = gr.Textbox("", visible=False, label="job of the cards")
        self.timer = gr.Timer(_LOOK_SECONDS, active=False)
        self.outputs = [self.panel, self.key, self.timer]

    def connect(self, changes: Sequence[Any], form: Sequence[Any]) -> None:
        """Follows the form.

        Args:
            changes: events of the form.
            form: the components whose values `preview_of` takes.
        """
        gr.on(changes, self.refresh, [self.key, *form], self.outputs, **_QUICK, trigger_mode="always_last")
        self.timer.tick(self.look, self.key, self.outputs, **_QUICK)

    def refresh(self, current_key: str, *form: Any) -> list[Any]:
        """The cards of the form's job; beside mistakes, those that are there stay."""
        preview = self.preview_of(*form)
        job, is_local = preview.job, preview.slurm is None
        if job is None and not current_key:
            return [note(NO_JOB), gr.skip(), gr.skip()]
        key = register_job(job.config, job.devices, job.strategy.name, is_local) if job else current_key
        cards = strategy_cards(key) if key != current_key else None
        if cards is None:
            return [gr.skip()] * 3
        return [cards_panel(cards), key, gr.Timer(active=cards.state == "counting")]

    def look(self, key: str) -> list[Any]:
        """Starts the estimate of the cards that are shown, and shows it once it is there."""
        cards = strategy_cards(key, estimate=True)
        if cards and cards.state == "counting":
            return [gr.skip()] * 3
        lost = note("The strategies are no longer known here; reload the page to see them.")
        return [cards_panel(cards) if cards else lost, gr.skip(), gr.Timer(active=False)]


def cards_panel(cards: StrategyCards) -> Html:
    """All cards, best first; what cannot run is folded with its reason. The browser marks the chosen one."""
    first, more = cards.able[:_VISIBLE_CARDS], cards.able[_VISIBLE_CARDS:]
    parts = [_legend(cards), *(_card(card, cards) for card in first)]
    if more:
        strategies = f"{len(more)} more {'strategies' if len(more) > 1 else 'strategy'}"
        parts.append(_fold("more", strategies, [_card(card, cards) for card in more]))
    body = element(
        "fieldset", join([element("legend", "Strategy", class_="ts-unseen"), *parts]), class_="ts-cards",
        id="strategy-cards", data_default=cards.default, data_state=cards.state,
        aria_busy="true" if cards.state == "counting" else None,
    )  # fmt: skip
    return join([body, _unable(cards)])


def _legend(cards: StrategyCards) -> Html:
    memory = f"Memory of each {cards.unit}: {byte_text(cards.memory)}"
    swatches = [element("span", name, class_=f"ts-key ts-use-{name}") for name in (*_USES, "free")]
    status: Any = "Estimating memory and speed ..." if cards.state == "counting" else cards.why
    if cards.recommended:
        best = next(card for card in cards.able if card.name == cards.recommended)
        status = join([element("b", f"Recommended: {best.title}."), " ", cards.why])
    line = element("p", with_code(status or "Best first."), class_="ts-cards-status", role="status")
    if not cards.is_local:
        return line
    return join(
        [line, element("p", join([element("span", memory, class_="ts-keys-title"), *swatches]), class_="ts-keys")]
    )


def _card(card: StrategyCard, cards: StrategyCards) -> Html:
    name_id, about_id = f"card-{card.name}", f"card-{card.name}-about"
    chips = []
    if card.name == cards.recommended:
        chips.append(element("span", "recommended", class_="ts-chip ts-chip-good"))
    elif card.name == cards.default:
        chips.append(element("span", "default", class_="ts-chip"))
    if card.fits is False:
        chips.append(element("span", "does not fit", class_="ts-chip ts-chip-bad"))
    title = join([element("b", card.title), " ", element("code", card.name, class_="ts-option")])
    head = element("span", join([element("span", title, id=name_id), *chips]), class_="ts-card-head")
    summary = f"{card.summary} {sentence(card.reason)}." if card.reason else card.summary
    radio = element(
        "input", type="radio", name="strategy", value=card.name, aria_labelledby=name_id, aria_describedby=about_id
    )
    about = element("span", summary, class_="ts-card-about")
    figures = join([_bar(card, cards), _facts(card, cards)])
    facts = element("span", figures, class_="ts-card-facts") if cards.is_local else ""
    text = element("span", join([head, about]), class_="ts-card-text")
    content = join([radio, text, facts, element("span", _spoken(card, cards), id=about_id, class_="ts-unseen")])
    return element("label", content, class_="ts-card")


def _facts(card: StrategyCard, cards: StrategyCards) -> Html:
    """Memory and speed in figures below the bar, with their places kept while they are estimated."""
    memory = f"{byte_text(card.total)} of {byte_text(cards.memory)}" if card.memory else "memory not known"
    figures = ["memory ...", "speed ..."] if cards.state == "counting" else [memory, _speed(card)]
    if cards.unit == "process":  # GPUs are not measured for this: a run may hold them
        figures.append(_rate(card))
    return element("span", join(element("span", figure) for figure in figures), class_="ts-card-figures")


def _speed(card: StrategyCard) -> str:
    if card.speed is None:
        return "" if card.fits is False else "speed not known"
    return "fastest" if card.speed >= 1 / (1 + CLOSE) else f"{percent_text(card.speed)} of the fastest"


def _rate(card: StrategyCard) -> str:
    rate = card.tokens_per_second
    return "" if rate is None else f"at most {_three_digits(rate)} tokens/s"


def _three_digits(value: float) -> str:
    """An estimate without digits that it cannot have: `47,700`, `812`."""
    return f"{float(f'{value:.3g}'):,.0f}"


def _shares(card: StrategyCard, cards: StrategyCards) -> list[tuple[str, float, float]]:
    """Name, bytes and share of the bar of each part; more than the memory fills the bar."""
    memory, full = card.memory or {}, max(cards.memory, card.total)
    sizes = {name: sum(memory.get(use, 0.0) for use in uses) for name, uses in _USES.items()}
    return [(name, size, size / full) for name, size in sizes.items()]


def _bar(card: StrategyCard, cards: StrategyCards) -> Html:
    if card.memory is None:
        waiting = " ts-bar-waiting" if cards.state == "counting" else ""
        return element("span", class_=f"ts-bar{waiting}", aria_hidden="true")
    parts = [
        element("span", class_=f"ts-use-{name}", style=f"width:{100 * share:.2f}%", title=f"{name}: {byte_text(size)}")
        for name, size, share in _shares(card, cards)
        if size > 0
    ]
    full = card.total > cards.memory
    limit = element("i", style=f"left:{100 * cards.memory / card.total:.2f}%") if full else ""
    return element("span", join([*parts, limit]), class_=f"ts-bar{' ts-bar-full' if full else ''}", aria_hidden="true")


def _spoken(card: StrategyCard, cards: StrategyCards) -> str:
    """What a screen reader says after the name."""
    sentences = [card.summary]
    if card.name == cards.recommended:
        sentences.append(f"Recommended. {cards.why}")
    if card.memory:
        parts = ", ".join(f"{name} {byte_text(size)}" for name, size, _ in _shares(card, cards) if size > 0)
        sentences.append(f"Memory: {parts}, of {byte_text(cards.memory)}.")
        if card.speed is not None:
            sentences.append(f"Speed: {', '.join(filter(None, (_speed(card), _rate(card))))}.")
    if card.fits is False:
        sentences.append("Does not fit.")
    return " ".join(sentences)


def _unable(cards: StrategyCards) -> Html:
    if not cards.unable:
        return Html("")
    count = len(cards.unable)
    rows = [
        element("li", join([element("b", card.title), " ", element("code", card.name, class_="ts-option"),
                            element("span", f"{sentence(card.reason)}.")]))
        for card in cards.unable
    ]  # fmt: skip
    title = f"{count} {'strategies' if count > 1 else 'strategy'} cannot run {'here' if cards.is_local else 'there'}"
    return _fold("unable", title, [element("ul", join(rows), class_="ts-unable-list")])


def _fold(name: str, title: str, content: list[Html]) -> Html:
    return element("details", join([element("summary", title), *content]), class_="ts-fold", data_fold=name)
