"""The journal: what a coordinator records, and how a later one goes on with it."""
