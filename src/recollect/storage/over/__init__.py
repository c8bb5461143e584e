"""Storages over other storages: one per part of a Dict, flattened, transformed, of another backend."""
