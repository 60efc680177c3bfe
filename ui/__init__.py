"""The web UI: pages that only show what `app/` returns and call its functions."""
