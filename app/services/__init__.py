"""Services shared by the command line and the pages."""
