"""One batch of tasks, from its submission to its end: a module for each step of its life."""
