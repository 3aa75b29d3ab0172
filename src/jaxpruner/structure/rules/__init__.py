"""What is known of each primitive: a row of a table, with three rules.

Take `hidden = x @ up`, of which JAX makes a `dot_general`. With `x` of shape (5, 3) and `up` of shape (3, 8), its row
answers three questions:

    what it says of axes    `x[1]` and `up[0]` are one axis, and summed over; the result has the axes `x[0]` and `up[1]`
    what it makes of zeros  a column of `up` that is zero makes a column of the result that is zero; to sum over
                            removed channels is right only if the products there are zero
    how it runs smaller     as it did: it reads all sizes off its operands, such as an `up` of shape (3, 4)

A `reshape` to (5, 2, 4) differs in the third. The shape is one of its parameters, and has to become (5, 2, 3) if one of
each 4 features goes.

`primitives` joins the rows of `elementwise`, `moving`, `contracting` and `indexing`. The rules for zeros are in
`moving_fills` and `contracting_fills`, those for smaller operands in `resizing`.
"""
