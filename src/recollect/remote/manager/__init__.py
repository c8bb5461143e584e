"""The manager's side of a remote buffer."""
