"""The fastest format for each product of a pruned model, by measurement.

    formats      how a product can run: what is stored, and the operator that multiplies
    choosing     the format of each leaf: as was asked, or timed in turns with the dense product
    report       what was measured and chosen
    compiling    `compile`, which goes through these, and times the whole

Channels that are zero are removed first, since then all layers around them shrink.
"""
