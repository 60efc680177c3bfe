"""Sphinx builds the site from the pages of this folder and the README: `make docs`."""

project = "Tunesmith"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = project
myst_heading_anchors = 3
highlight_language = "none"
suppress_warnings = ["myst.header"]  # the log and the README begin sections at their own depth
