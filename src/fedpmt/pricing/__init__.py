"""What a part of the model costs: operations per layer, memory, and the paper's complexity table."""
