"""A table with a row of three rules for each primitive.

Take `hidden = x @ up`, which JAX turns into a `dot_general`. With `x` of shape (5, 3) and `up` of shape (3, 8), its row
says this:

    axes     `x[1]` and `up[0]` are one axis, which is summed over; the result has the axes `x[0]` and `up[1]`
    fills    a zero column of `up` makes a zero column of the result; a sum over removed channels is the same without
             them only if the products there are zero
    resized  nothing: it reads all sizes off its operands, such as an `up` of shape (3, 4)

A `reshape` to (5, 2, 4) has a rule for smaller operands. The shape is one of its parameters, and has to become
(5, 2, 3) if one of each 4 features is removed.

`primitives` joins the rows of `elementwise`, `moving`, `contracting` and `indexing`. The rules for fills are in
`moving_fills` and `contracting_fills`, those for smaller operands in `resizing`.
"""
