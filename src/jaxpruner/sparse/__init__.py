"""Zeros that weigh nothing: storage, execution and training on compact weights.

The rooms, from the bottom up:

    operators      products of rows with compact matrices, and their derivatives
    program        the products of a traced model with its parameters; the model with other products in their place
    formats        how the zeros of one array are left out: a file for each format
    storage        a tree in its smallest formats, in memory and as a file
    training       models that are trained on compact weights
    execution      the fastest way for each product of a pruned model, by measurement
"""
