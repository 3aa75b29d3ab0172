"""The fastest format for each product of a pruned model, by measurement.

    choosing     how a product can run, and the format of each leaf: as was asked, or timed in turns; the report
    compiling    `compile`, which goes through these, and times the whole

Channels that are zero are removed first, since then all layers around them shrink.
"""
