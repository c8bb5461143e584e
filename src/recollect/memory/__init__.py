"""The primitives under everything: segments of memory, and Rows, any whole value."""
