"""How the zeros of one array are left out: each format is a file, and a row of `table.FORMATS`.

    dense     the array as it is
    n_by_m    N of each M weights along an axis, and where in the M they stand
    blocks    blocks of the last two axes, and where they stand
    csr       the kept weights, their columns, and where each row begins
    bitmask   one bit a weight, and the kept weights

Each has the same functions:

    plan(kept, itemsize)               the bytes that a mask takes, `None` if it does not fit
    pack(array, mask, settings)        the arrays of a leaf, with what the plan settled
    check(arrays)                      the shape of the leaf; refuses arrays that `pack` could not have made
    unpack(arrays)                     the leaf, of arrays that were checked

and `KEYS`, the names of all arrays, of which that of the kept weights comes first.

`check` needs no more memory than the arrays take. All arrays are NumPy arrays, and bits are copied as they are.
"""
