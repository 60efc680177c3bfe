"""Scripts and styles that the pages draw with; nothing is fetched from the internet."""
