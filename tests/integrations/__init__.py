"""Tests against large or foreign packages, in an environment of their own: `make test-integrations`."""
