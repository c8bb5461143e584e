"""The worker's side of a remote buffer."""
