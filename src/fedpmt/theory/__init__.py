"""What the paper proves: the splitting constant ψ."""
