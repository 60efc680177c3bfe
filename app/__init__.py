"""Everything that runs outside the ranks: command line, launch and supervision, services. Never imports torch."""
