"""One file per page; each has `build(here)`, called once inside its route, when the server starts."""
