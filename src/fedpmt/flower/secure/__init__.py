"""Secure aggregation (SecAgg+): the server learns sums per layer, and not what one device sent.

fixed_point   updates as whole numbers modulo 2³², which masks can hide and which add up exactly
layer_vector  a device's reply as one vector, a group of numbers for each layer
masks         keys, shares of secrets, and masks that cancel in a sum
node          the node's side of the protocol
sums          the server's side of the protocol
checks        what the server can check of a masked reply
sealed        the collector that the strategy uses in place of replies in clear
"""
