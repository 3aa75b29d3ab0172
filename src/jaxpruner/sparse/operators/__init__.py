"""Products of rows with compact matrices, and their derivatives: plain functions of arrays, a file for each format."""
