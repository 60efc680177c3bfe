"""The pages: each only shows what `app/` returns and calls what `app/` offers."""
