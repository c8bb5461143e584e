"""numpy inside, torch and jax at the edge: conversion and devices."""

from __future__ import annotations

from recollect.backends.base import Backend
from recollect.backends.nested import copied, map_arrays, move
from recollect.backends.registry import backend_of, get_backend

__all__ = ["Backend", "backend_of", "copied", "get_backend", "map_arrays", "move"]
