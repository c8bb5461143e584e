"""Storages that keep files in a directory, one commit at a time: HDF5, Parquet, images, video."""
