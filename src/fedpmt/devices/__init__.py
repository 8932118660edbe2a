"""Devices and fleets: who takes part, how fast it is and what it can hold."""
