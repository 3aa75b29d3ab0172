"""The fastest format for each product of a pruned model, by measurement.

Read the files in this order:

    zero_patterns      where matrices are zero
    executed_formats   a file for each format: what it stores, when it is worth measuring, the operator that it makes
    operators          how each format multiplies
    measuring          candidates timed in turns with the dense product
    choosing           the format of each leaf: measured, or as was asked
    removed_channels   the model without channels that are zero
    packed_models      the model for packed parameters
    report             what was measured and chosen
    versions           the whole model timed: dense, without channels, in the formats chosen
    checking           settings, devices, and whether results are those of the dense model
    compiling          `compile`, which goes through these

Channels that are zero are removed first, since then all layers around them shrink. What becomes of a leaf:

    MatrixLeaf        how the leaf is a matrix, and its `ProductSite`s, where the program multiplies by it
    Matrices          its values and zeros
    ExecutedFormat    `pack` makes the arrays that are stored, `operator` what multiplies by them
    ProductSite       `multiply` calls the operator in place of the product
"""
