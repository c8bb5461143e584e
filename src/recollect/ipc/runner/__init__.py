"""The parts of AsyncRunner: collector processes, what they share with the learner, and a collector's side of it."""
