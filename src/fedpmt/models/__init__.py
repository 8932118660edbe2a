"""A model as an ordered list of layers; the paper's nets; adapters for any `nn.Module`."""
