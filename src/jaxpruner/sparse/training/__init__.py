"""Models that are trained on compact weights: blocks, or single weights in CSR.

Only stored weights have values and moments. The zeros inside of blocks are still multiplied. With CSR, the backward
pass still computes the dense gradient of each matrix.

The files, from the bottom up:

    layouts          how a leaf is stored: all that tells blocks and single weights apart
    compact_model    the model: apply, unpack, masks, update; what becomes of each leaf, as a table; how it is made
"""
