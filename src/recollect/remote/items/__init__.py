"""Items: what is stored and sent, packed and as a user sees it."""
