"""Modules that are built from source with smaller widths: their arguments, and the numbers in which they differ.

Take a model that divides by a width: `mean = (x @ up).sum(-1) / 8`, with 8 hidden units. Python computed the 8 before
anything was traced. If 4 units stay, the smaller program still divides by 8. That is what the zeroed model does, so the
two are equal. But a module that is built from source with `hidden=4` divides by 4.

    constructors       find that `hidden: 8 -> 4` builds the module
    width_flow         finds that the 8 follows a sum over `up[1]`, so it may be the width of `up[1]`
    source_programs    goes through both programs side by side, and finds that the module has 4 instead of 8
    scales, folding    find that the module gives the same results if `up` is halved
"""
