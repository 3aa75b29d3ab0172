"""Products with stored blocks on TPUs and Hopper GPUs, in kernels written in Pallas.

`blocks.multiply` runs everywhere: it gathers the inputs of each group of blocks in memory, and multiplies. These
kernels do not write to memory what they gather. They are compiled for their devices, but have not been timed on one: if
you have a choice, measure both.

The files, from the bottom up:

    steps          what a kernel computes, as a list of steps; padding, and `vmap`
    tpu, hopper    the kernels; each is loaded where its device is
    choosing       whether there is a kernel, and why not
    product        the product and its derivatives
"""
