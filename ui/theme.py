"""The theme of the pages, and the content of their `<head>`. Nothing is loaded from other servers."""

from __future__ import annotations

from pathlib import Path

from gradio.themes import Base
from gradio.themes.utils import colors, sizes

STATIC = Path(__file__).resolve().parent / "static"

_SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
_MONO = ("ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "Liberation Mono", "monospace")


class Tunesmith(Base):
    """A dense theme in slate and teal with system fonts; all text has a contrast of at least 4.5 in light and dark."""

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
        light_and_dark = {
            "body_background_fill": ("#f7f9fb", "#0c131e"),
            "body_text_color": ("*neutral_900", "*neutral_100"),
            "body_text_color_subdued": ("#4b5a6d", "#a9b7c8"),
            "background_fill_primary": ("white", "#131c2b"),
            "background_fill_secondary": ("#f1f5f9", "#182335"),
            "block_background_fill": ("white", "#131c2b"),
            "block_border_color": ("#d5dce5", "#2f3b4d"),
            "border_color_primary": ("#d5dce5", "#2f3b4d"),
            "block_label_background_fill": ("white", "#131c2b"),
            "block_label_text_color": ("*neutral_700", "*neutral_200"),
            "block_title_text_color": ("*neutral_800", "*neutral_100"),
            "block_info_text_color": ("#4b5a6d", "#a9b7c8"),
            "input_background_fill": ("white", "#0f1826"),
            "input_border_color": ("#8695a8", "#5b6b80"),
            "input_border_color_focus": ("*primary_700", "*primary_300"),
            "input_placeholder_color": ("#64748b", "#94a3b8"),
            "link_text_color": ("*primary_700", "*primary_300"),
            "link_text_color_hover": ("*primary_800", "*primary_200"),
            "link_text_color_active": ("*primary_800", "*primary_200"),
            "link_text_color_visited": ("*primary_700", "*primary_300"),
            "color_accent_soft": ("#ccfbf1", "#134e4a"),
            "border_color_accent": ("*primary_700", "*primary_400"),
            "button_primary_background_fill": ("*primary_700", "*primary_700"),
            "button_primary_background_fill_hover": ("*primary_800", "*primary_800"),
            "button_primary_border_color": ("*primary_700", "*primary_700"),
            "button_primary_text_color": ("white", "white"),
            "button_secondary_background_fill": ("#e2e8f0", "#2b384b"),
            "button_secondary_background_fill_hover": ("#cbd5e1", "#3a4a61"),
            "button_secondary_border_color": ("#cbd5e1", "#3a4a61"),
            "button_secondary_text_color": ("*neutral_900", "*neutral_100"),
            "button_cancel_background_fill": ("#b91c1c", "#b91c1c"),
            "button_cancel_background_fill_hover": ("#991b1b", "#991b1b"),
            "button_cancel_text_color": ("white", "white"),
            "checkbox_background_color_selected": ("*primary_700", "*primary_700"),
            "checkbox_border_color": ("#8695a8", "#5b6b80"),
            "checkbox_border_color_selected": ("*primary_700", "*primary_600"),
            "checkbox_label_text_color": ("*neutral_800", "*neutral_100"),
            "checkbox_label_background_fill": ("white", "#0f1826"),
            "checkbox_label_background_fill_selected": ("#ccfbf1", "#134e4a"),
            "checkbox_label_text_color_selected": ("#134e4a", "#ccfbf1"),
            "slider_color": ("*primary_700", "*primary_400"),
            "table_even_background_fill": ("white", "#131c2b"),
            "table_odd_background_fill": ("#f7f9fb", "#172132"),
            "error_text_color": ("#b91c1c", "#fecaca"),
            "error_background_fill": ("#fee2e2", "#450a0a"),
            "error_border_color": ("#b91c1c", "#f87171"),
            "code_background_fill": ("#f1f5f9", "#0f1826"),
            "stat_background_fill": ("*primary_200", "*primary_800"),
        }
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
        chosen = {name: light for name, (light, _) in light_and_dark.items()}
        chosen |= {f"{name}_dark": dark for name, (_, dark) in light_and_dark.items()}
        self.set(**chosen, **same_in_both)


def head() -> str:
    """The scripts and styles of `ui/static`, inlined so that they load first and need no requests."""
    scripts = sorted(STATIC.glob("*.js"), key=lambda path: (not path.name.startswith("uPlot"), path.name))
    styles = sorted(STATIC.glob("*.css"), key=lambda path: (not path.name.startswith("uPlot"), path.name))
    inlined = [f"<style>{path.read_text(encoding='utf-8')}</style>" for path in styles]
    inlined += [f"<script>{_script(path.read_text(encoding='utf-8'))}</script>" for path in scripts]
    return "\n".join(inlined)


def _script(text: str) -> str:
    """Escapes a script so that it cannot close its own element."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")
