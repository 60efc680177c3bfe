"""Scripts and styles of the pages; nothing is fetched from the internet."""
