"""What happens on a device: the objective, the local work and its one loop."""
