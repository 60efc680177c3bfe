"""The theme of the pages, and the content of their `<head>`. Nothing is loaded from other servers."""

from __future__ import annotations

from pathlib import Path

from gradio.themes import Base
from gradio.themes.utils import colors, sizes

STATIC = Path(__file__).resolve().parent / "static"

_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace")


class Tunesmith(Base):
    """A dense theme with system fonts; its colours are those of `static/tokens.css`, which knows every theme."""

    def __init__(self) -> None:
        super().__init__(
            primary_hue=colors.teal,
            secondary_hue=colors.teal,
            neutral_hue=colors.slate,
            spacing_size=sizes.spacing_md,
            radius_size=sizes.radius_sm,
            text_size=sizes.text_md,
            font=_SANS,
            font_mono=_MONO,
        )
        self.name = "tunesmith"
        colours = {
            "body_background_fill": "page", "body_text_color": "body", "body_text_color_subdued": "muted",
            "background_fill_primary": "panel", "background_fill_secondary": "inset",
            "block_background_fill": "panel", "block_border_color": "line", "border_color_primary": "line",
            "block_label_background_fill": "panel", "block_label_text_color": "body", "block_title_text_color": "body",
            "block_info_text_color": "muted", "input_background_fill": "input", "input_border_color": "input-line",
            "input_border_color_focus": "accent", "input_placeholder_color": "muted",
            "link_text_color": "accent", "link_text_color_hover": "accent-over",
            "link_text_color_active": "accent-over",
            "link_text_color_visited": "accent",
            "color_accent_soft": "accent-soft", "border_color_accent": "accent",
            "button_primary_background_fill": "primary", "button_primary_background_fill_hover": "primary-over",
            "button_primary_border_color": "primary", "button_primary_text_color": "on-primary",
            "button_primary_text_color_hover": "on-primary", "button_secondary_text_color_hover": "body",
            "button_secondary_background_fill": "button", "button_secondary_background_fill_hover": "button-over",
            "button_secondary_border_color": "input-line", "button_secondary_text_color": "body",
            "button_cancel_background_fill": "panel", "button_cancel_background_fill_hover": "danger",
            "button_cancel_border_color": "danger", "button_cancel_border_color_hover": "danger",
            "button_cancel_text_color": "danger", "button_cancel_text_color_hover": "on-danger",
            "checkbox_background_color_selected": "accent", "checkbox_border_color": "input-line",
            "checkbox_border_color_selected": "accent", "checkbox_label_text_color": "body",
            "checkbox_label_background_fill": "input", "checkbox_label_background_fill_selected": "accent-soft",
            "checkbox_label_text_color_selected": "on-accent-soft", "slider_color": "accent",
            "table_even_background_fill": "panel", "table_odd_background_fill": "page", "error_text_color": "red",
            "error_background_fill": "red-soft", "error_border_color": "red", "code_background_fill": "inset",
            "stat_background_fill": "accent-soft",
        }  # fmt: skip
        same_in_both = {
            "block_shadow": "none",
            "button_primary_shadow": "none",
            "button_secondary_shadow": "none",
            "block_label_text_size": "*text_sm",
            "block_title_text_weight": "600",
            "block_label_text_weight": "600",
            "button_large_text_weight": "600",
            "button_border_width": "1px",
            "input_border_width": "1px",
            "layout_gap": "12px",
        }
        by_theme = {name: f"var(--ts-{token})" for name, token in colours.items()}
        self.set(**by_theme, **{f"{name}_dark": value for name, value in by_theme.items()}, **same_in_both)


def head() -> str:
    """The scripts and styles of `ui/static`, inlined so that they are there at the first paint and need no requests."""
    first = ("theme.js", "tokens.css", "uPlot.iife.min.js", "uPlot.min.css")
    scripts, styles = (
        sorted(STATIC.glob(pattern), key=lambda path: (path.name not in first, path.name))
        for pattern in ("*.js", "*.css")
    )
    inlined = [f"<style>{path.read_text(encoding='utf-8')}</style>" for path in styles]
    inlined += [f"<script>{_script(path.read_text(encoding='utf-8'))}</script>" for path in scripts]
    return "\n".join(inlined)


def _script(text: str) -> str:
    """Escapes a script so that it cannot close its own element."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
