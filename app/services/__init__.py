"""What the command line and the pages both ask."""
