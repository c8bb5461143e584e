"""Storages of packed rows: in memory, in shared memory, in a mapped file, and the dump that all of them write."""
