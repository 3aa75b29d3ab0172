"""How the zeros of one array are left out: a file for each format, and a table of them all.

    dense     the array as it is
    n_by_m    N of each M weights along an axis, and where in the M they stand
    blocks    blocks of the last two axes, and where they stand
    csr       the kept weights, their columns, and where each row begins
    bitmask   one bit a weight, and the kept weights

Each format plans its arrays from a mask, packs a leaf into them, checks arrays that come from elsewhere, and unpacks
them. All arrays are NumPy arrays, and bits are copied as they are.
"""
