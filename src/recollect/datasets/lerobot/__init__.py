"""LeRobot data sets: read in versions 2.0, 2.1 and 3.0, written in 3.0; the package `lerobot` is not needed."""
