"""How the zeros of one array are left out: a file for each format, and a row of `table.FORMATS`.

    dense     the array as it is
    n_by_m    N of each M weights along an axis, and where in the M they stand
    blocks    blocks of the last two axes, and where they stand
    csr       the kept weights, their columns, and where each row begins
    bitmask   one bit a weight, and the kept weights

Each file has the same functions, which its row names:

    plan(kept, itemsize, most_bytes)   the bytes that a mask takes, `None` if it does not fit or takes more
    pack(array, mask, settings)        the arrays of a leaf, with what the plan settled
    check(arrays)                      the shape of the leaf; refuses arrays that `pack` could not have made
    unpack(arrays)                     the leaf, of arrays that were checked

`check` needs no more memory than the arrays take. All arrays are NumPy arrays, and bits are copied as they are.
"""
