"""Experience: its space, rows and columns, its bytes, and its way through operators into a sink."""
