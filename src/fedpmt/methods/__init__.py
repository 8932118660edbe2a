"""The methods: one file each, readable beside its paper. None of them knows another."""
