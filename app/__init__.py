"""What runs outside the ranks: the command line, the launcher, the supervisor. Never imports torch."""
