"""A tree in its smallest formats, in memory and as a file.

From the bottom up:

leaves        the leaves of a tree or of a checkpoint, one at a time, with their masks
packing       a tree packed in memory, and unpacked
digests       numbers that show damage
manifest      what a packed file says about its leaves, and what is refused
packed_file   a packed file, read leaf by leaf
saving        a tree saved as such a file
loading       such a file loaded
jax_sparse    to and from the matrices of `jax.experimental.sparse`
"""
