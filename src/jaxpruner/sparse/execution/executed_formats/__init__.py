"""The formats in which products can be executed: what each stores of a matrix, and why it may not suit one.

A format packs matrices into a dictionary of arrays with the layers in front. Inside of the model it makes an operator
of these arrays. All layers of a stack have arrays of one length; shorter ones are filled up with zeros.

    base      `ExecutedFormat`, which every format derives from
    csr       single weights
    blocks    blocks of one shape
    smaller   a dense matrix without inputs and outputs that are zero
    table     all formats, and those that a setting means

All that is known about a format stands in its class.
"""
