"""The virtual federation: sampling, clock, executors, the round loop and its checkpoints."""
