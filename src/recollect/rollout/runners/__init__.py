"""Runners: where attempts run."""
