"""One module per page. Each has `build(context)`, which is called once, inside its route, when the server starts."""
